#!/bin/sh
# What ARRAY and SCALERS of make's command line say: sh tools/array.sh ARRAY SCALERS
#
# Prints rows, columns and scalers ("8 32 4"), or "error:" and one line. SCALERS may be empty: then it is what
# hw/rtl/matmul_axi.sv takes by itself. The rules are those of hw/rtl/array_sizes.sv.

refuse() {
    echo "error: $1"
    exit
}

printf '%s\n' "$1" | grep -qxE '[0-9]{1,4}x[0-9]{1,4}' || refuse "ARRAY=$1: expected rows x columns, such as 16x16"
rows=${1%x*} cols=${1#*x}
case $rows in
4 | 8 | 16 | 32 | 64) ;;
*) refuse "ARRAY=$1: rows have to be 4, 8, 16, 32 or 64, as they divide groups of 64" ;;
esac
case $cols in
0*) refuse "ARRAY=$1: columns have to be a multiple of 4, 4 to 4092" ;;
esac
[ $((cols % 4)) = 0 ] || refuse "ARRAY=$1: columns have to be a multiple of 4"
[ "$cols" -le 4092 ] || refuse "ARRAY=$1: columns have to be 4092 at most"

# The largest power of two that divides the columns and is at most 64 / rows: columns that share a scaler.
share=$(((cols | 64 / rows) & -(cols | 64 / rows)))
scalers=${2:-$((cols / share))}
printf '%s\n' "$scalers" | grep -qxE '[1-9][0-9]{0,3}' || refuse "SCALERS=$2: expected a number, 1 and up"
[ $((cols % scalers)) = 0 ] || refuse "SCALERS=$2: has to divide the $cols columns of ARRAY=$1"
echo "$rows $cols $scalers"
