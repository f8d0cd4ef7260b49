"""The tests, and what makes their fixtures."""

from formats.interpreter import check

check("tests")
