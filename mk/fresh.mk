# README's first commands on new, minimal Debian systems: tests/fresh.py. Needs root, debootstrap and a package mirror.
#     make test-fresh SUITES=bookworm
#     make test-fresh FULL=1             and make test
SUITES ?= bookworm trixie
.PHONY: test-fresh
test-fresh:
	@FULL='$(FULL)' '$(PYTHON)' tests/fresh.py $(SUITES)
