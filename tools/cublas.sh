#!/bin/sh
# Prints the flags that nvcc takes to compile and link with cuBLAS: tools/cublas.sh NVCC PYTHON
#
# cuBLAS is part of the CUDA toolkit, or else a package of that Python (nvidia-cublas, which comes with PyTorch). Without
# either, or where it cannot be linked, the flag is -DNO_CUBLAS.
set -eu
nvcc=$1 python=$2

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/try.cu" <<'EOF'
#include <cublas_v2.h>
int main() {
    cublasHandle_t handle;
    return cublasCreate(&handle);
}
EOF
links() { "$nvcc" "$folder/try.cu" -o "$folder/try" "$@" >/dev/null 2>&1; }

toolkit=$("$nvcc" --dryrun "$folder/try.cu" 2>&1 | sed -n 's/^#\$ TOP=//p')
for lib in "$toolkit"/lib64 "$toolkit"/targets/*/lib; do
    [ -e "$lib/libcublas.so" ] || continue
    flags="-lcublas -Xlinker -rpath,$lib"
    # shellcheck disable=SC2086  (a list of words, here and below)
    if links $flags; then echo "$flags" && exit 0; fi
done
if links -lcublas; then echo "-lcublas" && exit 0; fi

# In the package the library's name ends in its version, which has to be the toolkit's.
"$python" - 2>/dev/null <<'EOF' >"$folder/packages" || true
import glob, sysconfig
for name in sorted(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib/libcublas.so.*")):
    print(name)
EOF
while read -r library; do
    lib=$(dirname "$library")
    flags="-isystem $(dirname "$lib")/include -L$lib -l:$(basename "$library") -Xlinker -rpath,$lib"
    if links $flags; then echo "$flags" && exit 0; fi
done <"$folder/packages"
echo "-DNO_CUBLAS"
