"""Models of real sizes with random weights, for measuring speed and memory."""

from formats.interpreter import check

check("bench")
