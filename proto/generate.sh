#!/bin/sh
# generate.sh PROTOC_C SOURCE_DIR OUT_DIR NAME...: C code for every schema under OUT_DIR/gen, one file that
# compiles it all, and schemas.h, which every generated header includes.  ninja knows schemas.h as an output and
# not the headers, so this is how it learns, before it compiles anything, that they are about to change.
set -eu
protoc_c=$1 source=$2 out=$3
shift 3
mkdir -p "$out/gen"
rm -f "$out/schemas.c" "$out/schemas.h"
for name in "$@"; do
    "$protoc_c" "--proto_path=$source" "--c_out=$out/gen" "$name.proto"
    echo "#include \"$name.pb-c.c\"" >> "$out/schemas.c"
    sed -i '0,/^#include/s//#include <..\/schemas.h>\n&/' "$out/gen/$name.pb-c.h"
done
echo '/* Changes when a schema does; see generate.sh. */' > "$out/schemas.h"
touch "$out/schemas.stamp"
