"""Hugging Face directory -> one model file: python -m export q8 HF_DIR OUT.bin"""
