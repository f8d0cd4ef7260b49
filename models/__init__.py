"""The tiny models: the stories they learn from, how they are trained, how they are measured."""

from formats.interpreter import check

check("models")
