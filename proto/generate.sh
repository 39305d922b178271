#!/bin/sh
# generate.sh PROTOC_C SOURCE_DIR OUT_DIR NAME...: C code for every schema under OUT_DIR/gen, and one
# file that includes it all, so that meson has outputs to depend on.
set -eu
protoc_c=$1 source=$2 out=$3
shift 3
mkdir -p "$out/gen"
rm -f "$out/schemas.c" "$out/schemas.h"
for name in "$@"; do
    "$protoc_c" "--proto_path=$source" "--c_out=$out/gen" "$name.proto"
    echo "#include \"$name.pb-c.c\"" >> "$out/schemas.c"
    echo "#include \"$name.pb-c.h\"" >> "$out/schemas.h"
done
touch "$out/schemas.stamp"
