#!/bin/sh
# Makes sure that Debian packages are there: tools/install.sh PACKAGE...
#
# Installs what is missing with apt when it can (as root, or through sudo), and otherwise prints the one line to type.
# g++ stands for the compiler that CXX names, python3-venv for what tools/python.sh asks for.
set -eu

fail() { echo "$*" >&2 && exit 1; }
has_lists() { ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1; }
# Where apt has no lists nobody knows.
exists() { ! has_lists || apt-cache show "$1" 2>/dev/null | grep -q '^Package:'; }

# The package of a compiler, for names as Debian gives them: aarch64-linux-gnu-g++ is in g++-aarch64-linux-gnu.
compiler_package() {
    case "$1" in
    */*) ;;
    c++) echo g++ ;;
    g++ | g++-[0-9]*) echo "$1" ;;
    clang++ | clang++-[0-9]*) echo "clang${1#clang++}" ;;
    *-linux-gnu*-g++) echo "g++-${1%-g++}" | tr _ - ;;
    *-linux-gnu*-g++-*) echo "g++-${1##*-}-${1%-g++-*}" | tr _ - ;;
    esac
}

missing=""
for package in "$@"; do
    # A tool or library that came another way counts too; only what cannot be found is asked for.
    case "$package" in
    g++)
        for word in ${CXX:-g++}; do  # as in ccache g++ -m64
            case "$word" in -*) continue ;; esac
            command -v "$word" >/dev/null 2>&1 && continue
            compiler=$(compiler_package "$word")
            { [ -n "$compiler" ] && exists "$compiler"; } || fail "the compiler '$word' is not found (CXX=$CXX)"
            missing="$missing $compiler"
        done ;;
    clang | clang-format | clang-tidy | pkg-config) command -v "$package" >/dev/null 2>&1 || missing="$missing $package" ;;
    emscripten) command -v emcc >/dev/null 2>&1 || missing="$missing $package" ;;
    nodejs) command -v node >/dev/null 2>&1 || missing="$missing $package" ;;
    libpcre2-dev) pkg-config --exists libpcre2-8 2>/dev/null || missing="$missing $package" ;;
    libedit-dev) pkg-config --exists libedit 2>/dev/null || missing="$missing $package" ;;
    libutf8proc-dev) pkg-config --exists libutf8proc 2>/dev/null || missing="$missing $package" ;;
    doctest-dev) [ -e /usr/include/doctest/doctest.h ] || missing="$missing $package" ;;
    nlohmann-json3-dev) [ -e /usr/include/nlohmann/json.hpp ] || missing="$missing $package" ;;
    libclang-rt-dev)  # libFuzzer and the sanitizers, in a package of clang's version: of the one that is there or will be
        if ! echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
            clang++ -fsanitize=fuzzer,address -x c++ - -o /dev/null >/dev/null 2>&1; then
            version=$(clang -dumpversion 2>/dev/null || apt-cache depends clang | sed -n 's/.*Depends: clang-\([0-9]\)/\1/p')
            missing="$missing libclang-rt-${version%%.*}-dev"
        fi ;;
    python3-venv) python=$(sh tools/python.sh) || { [ -n "$python" ] && missing="$missing $python"; } || exit 1 ;;
    *) dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

command -v apt-get >/dev/null 2>&1 || fail "please install what Debian has in the packages$missing"
if [ "$(id -u)" = 0 ]; then sudo="" as=""
elif command -v sudo >/dev/null 2>&1; then sudo="sudo " as=""
else sudo="false " as=" as root"; fi
typed=${sudo#false }
line="${typed}apt-get install -y$missing"
has_lists || line="${typed}apt-get update && $line"

# Said before sudo asks for a password. It does so once, whatever it remembers: all that root does is one command, which
# first says that it has begun. Another rule of a parallel make, or another program, may be at it: apt waits.
[ "$sudo" = "false " ] || echo "installing:$missing" >&2
options="-y -qq -o DPkg::Lock::Timeout=600 --no-install-recommends"
install="DEBIAN_FRONTEND=noninteractive apt-get install $options$missing"
begun="as root"
said=$(${sudo}sh -c "echo '$begun'; $install >/dev/null 2>&1 && exit
    apt-get update -qq >/dev/null 2>&1; $install 2>&1 >/dev/null" 2>/dev/null) && exit 0
case "$said" in
"$begun"*) fail "apt-get: $(echo "$said" | grep -m1 '^E:' || echo failed); please type$as: $line" ;;
esac
fail "packages are missing; please type$as: $line"
