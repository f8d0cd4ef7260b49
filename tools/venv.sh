#!/bin/sh
# Makes a Python environment of what requirements.lock, or another LOCK, has: tools/venv.sh FOLDER GOALS [LOCK]
#
# FOLDER/ready is there when all of it is. GOALS: what make was asked for, to be asked for again when this fails.
set -eu
venv=$1 goals=$2 lock=${3:-requirements.lock}
log=$venv/pip.log

if ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    python=$(PYTHON="${PYTHON:-python3}" sh tools/python.sh) || exit 1
    "$python" -m venv --clear "$venv"
fi
if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$lock" >"$log" 2>&1; then
    touch "$venv/ready"
elif grep -q 'connection broken by' "$log"; then
    reason=$(sed -n "s/.*connection broken by '\(.*\)': .*/\1/p" "$log" | sed -n "1{s/.*: //;s/[')]*\$//;p}")
    echo "pip reaches no package index ($reason); once there is a network, type: make${goals:+ $goals}" >&2 && exit 1
else
    echo "pip cannot install $lock: $(grep -m1 '^ERROR' "$log" || tail -n 1 "$log") (all of it: $log)" >&2 && exit 1
fi
