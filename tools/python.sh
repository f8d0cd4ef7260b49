#!/bin/sh
# Prints the Python that .venv is made of: PYTHON or, where that is python3 and will not do, another one that is there.
#
# Exit code 1: there is none, and the output is the Debian package that has one, or nothing (and standard error says why).
set -eu
python=${PYTHON:-python3}

# New enough, and able to make an environment: Debian has ensurepip in a package of its own.
fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
available() { apt-cache show "$1" 2>/dev/null | grep -q '^Package:'; }

others=""
[ "$python" != python3 ] || others="python3.14 python3.13 python3.12 python3.11"
for found in "$python" $others; do
    if fits "$found"; then echo "$found" && exit 0; fi
done

version=$("$python" -V 2>/dev/null) || version=""
if [ -z "$version" ]; then
    why="PYTHON=$python is not found"
elif "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    why="PYTHON=$python has no modules venv and ensurepip"
else
    why="Python 3.11 or newer is needed, and $python is $version; with another, type: make PYTHON=/path/to/python3.11"
    python=""
fi
for found in $python $others; do
    if available "$found-venv"; then echo "$found-venv" && exit 1; fi
done
if [ "$python" = python3 ]; then echo python3-venv && exit 1; fi  # where apt has no lists yet
echo "$why" >&2
exit 1
