# README's first commands on new, minimal Debian systems: tests/fresh.py. Needs root, debootstrap and a package mirror.
#     make test-fresh SUITES=bookworm
SUITES ?= bookworm trixie
.PHONY: test-fresh
test-fresh:
	@'$(PYTHON)' tests/fresh.py $(SUITES)
