# clang-tidy on a file, unless it has passed in the same bytes before: sh tools/tidy.sh FOLDER FILE OPTION...
# FOLDER remembers what has passed, and may be empty.
set -eu
folder=$1 file=$2
shift 2
if [ -n "$folder" ]; then
    bytes=$({ clang-tidy --version; cat .clang-tidy; clang++ -E -C "$@" "$file"; echo "$@"; } | sha256sum | cut -d' ' -f1)
    [ ! -e "$folder/$bytes" ] || exit 0
fi
clang-tidy --quiet --warnings-as-errors="*" "$file" -- "$@"
[ -z "$folder" ] || { mkdir -p "$folder" && touch "$folder/$bytes"; }
