#!/bin/sh
# Makes a Python environment of what lock files list, with hashes: tools/venv.sh FOLDER GOALS [LOCK...]
#
# FOLDER/ready is there when all of it is. GOALS: what make was asked for, to be asked for again when this fails. LOCK is
# requirements.lock, that of requirements.txt, if not said.
set -eu
venv=$1 goals=$2
shift 2
[ $# -gt 0 ] || set -- requirements.lock
log=$venv/pip.log

# Programs of an environment name the folder that they were installed to: one that was moved is made anew.
here=$(cd "$venv" 2>/dev/null && pwd -P) || here=""
if ! grep -qsF "$here/bin/python" "$venv/bin/pip" ||
    ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    python=$(PYTHON="${PYTHON:-python3}" sh tools/python.sh) || exit 1
    "$python" -m venv --clear "$venv"
fi
options=""
for lock in "$@"; do options="$options -r $lock"; done
# shellcheck disable=SC2086  (a list of words)
if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes $options >"$log" 2>&1; then
    touch "$venv/ready"
elif grep -q 'connection broken by' "$log"; then
    reason=$(sed -n "s/.*connection broken by '\(.*\)': .*/\1/p" "$log" | sed -n "1{s/.*: //;s/[')]*\$//;p}")
    echo "pip reaches no package index ($reason); once there is a network, type: make${goals:+ $goals}" >&2 && exit 1
else
    # pip first lists versions for another Python, then the package of which it wanted one.
    line=$(grep '^ERROR' "$log" | grep -m1 -v '^ERROR: Ignored the following versions') || line=$(tail -n 1 "$log")
    package=$(sed -n 's/^ERROR: Could not find a version that satisfies the requirement \([^ ;]*\).*/\1/p' "$log" | head -n 1)
    needs=$(sed -n "s/^ERROR: Ignored .*[:;] ${package#*==} Requires-Python \([^;]*\).*/\1/p" "$log" | head -n 1)
    [ -z "$package" ] || [ -z "$needs" ] || line="$package needs Python $needs, and this is $("$venv/bin/python" -V)"
    echo "pip cannot install $*: $line (all of it: $log)" >&2 && exit 1
fi
