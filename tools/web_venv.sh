#!/bin/sh
# Makes the Python environment of `make test-web`: that of the tests, and some packages: tools/web_venv.sh FOLDER PACKAGE...
#
# Playwright's own browsers are not fetched: it drives the distribution's. FOLDER/ready is there when all of it is.
set -eu
venv=$1
shift
log=$venv/pip.log

python=$(PYTHON="${PYTHON:-python3}" sh tools/python.sh) || exit 1
"$python" -m venv --clear "$venv"
echo "setting up $venv" >&2
if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements.txt "$@" >"$log" 2>&1; then
    touch "$venv/ready"
else
    echo "pip cannot install $*: $(grep -m1 '^ERROR' "$log" || tail -n 1 "$log") (all of it: $log)" >&2
    exit 1
fi
