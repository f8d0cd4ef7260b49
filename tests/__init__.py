"""The tests, and what makes their fixtures."""
