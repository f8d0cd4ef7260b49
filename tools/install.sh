#!/bin/sh
# Makes sure that Debian packages are there: tools/install.sh PACKAGE...
#
# Installs what is missing with apt when it can (as root, or through sudo), and otherwise prints the one line to type.
set -eu

missing=""
for package in "$@"; do
    # A tool or library that came another way counts too; only what cannot be found is asked for.
    case "$package" in
    g++) command -v "${CXX:-g++}" >/dev/null 2>&1 || missing="$missing $package" ;;
    clang | clang-format | clang-tidy | pkg-config) command -v "$package" >/dev/null 2>&1 || missing="$missing $package" ;;
    libpcre2-dev) pkg-config --exists libpcre2-8 2>/dev/null || missing="$missing $package" ;;
    libutf8proc-dev) pkg-config --exists libutf8proc 2>/dev/null || missing="$missing $package" ;;
    doctest-dev) [ -e /usr/include/doctest/doctest.h ] || missing="$missing $package" ;;
    nlohmann-json3-dev) [ -e /usr/include/nlohmann/json.hpp ] || missing="$missing $package" ;;
    libclang-rt-dev)  # libFuzzer and the sanitizers, in a package of the version of clang that is there
        echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
            clang++ -fsanitize=fuzzer,address -x c++ - -o /dev/null >/dev/null 2>&1 ||
            missing="$missing libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev" ;;
    python3-venv) python3 -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3 $package" ;;
    *) dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then sudo=""; elif command -v sudo >/dev/null 2>&1; then sudo="sudo"; else sudo="none"; fi
    if [ "$sudo" != none ]; then
        echo "installing:$missing" >&2
        # shellcheck disable=SC2086  (a list of words)
        install="$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing"
        if $install >/dev/null 2>&1 || { $sudo apt-get update -qq && $install >/dev/null; }; then exit 0; fi
    fi
fi
echo "missing packages; please type: sudo apt-get install -y$missing" >&2
exit 1
