"""Hugging Face directory -> one model file: python -m export {q8,w8a8,awq} HF_DIR OUT.bin"""

from formats.interpreter import check

check("export")
