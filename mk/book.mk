# The book: docs/ as a site in build/book (tools/book/), with the page in which the model runs where that is built.
#
#     make book                   build/book
#     make book-serve PORT=8000   the same, served on this machine alone
#     make book-pdf               build/book/runq.pdf, by a Chromium
#     make test-book              the same, and tests/test_book.py looks at all of it

BOOK_VENV := build/book-venv
PORT      ?= 8000
BOOK_GOALS := book book-serve book-pdf test-book

# The page in which the model runs: taken as it is, or made if there is what makes it, or left out.
BOOK_RUN := $(and $(filter $(BOOK_GOALS),$(MAKECMDGOALS)),$(if $(wildcard build/web/index.html),,yes),$(wildcard mk/web.mk),$(shell command -v emcc),web)
$(foreach goal,$(BOOK_GOALS),$(eval NEEDS_$(goal) := PYTHON $(if $(BOOK_RUN),WEB)))

.PHONY: $(BOOK_GOALS)
book: $(BOOK_VENV)/ready $(BOOK_RUN)
	@[ -f build/web/index.html ] || echo 'without the page in which the model runs: make web makes it, with emscripten'
	@NO_MKDOCS_2_WARNING=1 $(BOOK_VENV)/bin/mkdocs build --quiet --config-file tools/book/mkdocs.yml

book-serve: book
	@'$(PYTHON)' tools/book/serve.py build/book '$(PORT)'

# Whoever is root has no sandbox to print in.
CHROMIUM = $(firstword $(shell command -v chromium chromium-browser google-chrome) chromium)
book-pdf: book
	@$(CHROMIUM) --headless $(if $(filter 0,$(shell id -u)),--no-sandbox) --no-pdf-header-footer \
	    --print-to-pdf=build/book/runq.pdf 'file://$(CURDIR)/build/book/print.html' > build/book-pdf.log 2>&1 || \
	    { echo 'book-pdf: $(CHROMIUM) does not print (build/book-pdf.log); Debian has it in the package chromium' >&2; exit 1; }
	@echo build/book/runq.pdf

test-book: book $(VENV_READY)
	@$(PY) -m pytest -q tests/test_book.py

$(BOOK_VENV)/ready: tools/book/requirements.lock $(call moved,$(BOOK_VENV))
	$(call set_up,tools/book/requirements.lock)
