# The book: docs/ as a site in build/book (tools/book/), with the page in which the model runs where that is built.
#
#     make book                   build/book
#     make book-serve PORT=8000   the same, served on this machine alone
#     make test-book              the same, and tests/test_book.py looks at all of it

BOOK_VENV := build/book-venv
PORT      ?= 8000
$(foreach goal,book book-serve test-book,$(eval NEEDS_$(goal) := PYTHON))

.PHONY: book book-serve test-book
book: $(BOOK_VENV)/ready
	@if [ ! -d build/web ] && command -v em++ > build/em++ && $(MAKE) -n web > build/web.log 2>&1; then $(MAKE) web; fi
	@[ -d build/web ] || echo 'without the page in which the model runs: make web builds it, with emscripten'
	@NO_MKDOCS_2_WARNING=1 $(BOOK_VENV)/bin/mkdocs build --quiet --config-file tools/book/mkdocs.yml

book-serve: book
	@'$(PYTHON)' tools/book/serve.py build/book '$(PORT)'

test-book: book $(VENV_READY)
	@$(PY) -m pytest -q tests/test_book.py

$(BOOK_VENV)/ready: tools/book/requirements.lock
	@$(call install,$(PACKAGES_PYTHON))
	@echo "setting up $(BOOK_VENV)" >&2
	@PYTHON='$(PYTHON)' sh tools/venv.sh $(BOOK_VENV) '$(MAKECMDGOALS)' tools/book/requirements.lock
