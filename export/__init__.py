"""Hugging Face directory -> one model file: python -m export SCHEME MODEL OUT.bin"""

from formats.interpreter import check

check("export")
