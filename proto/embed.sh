#!/bin/sh
# embed.sh PROTOC SOURCE_DIR OUT NAME...: the descriptors of every schema as an array in C.
set -eu
protoc=$1 source=$2 out=$3
shift 3
for name in "$@"; do
    shift
    set -- "$@" "$name.proto"
done
"$protoc" "--proto_path=$source" --include_imports "--descriptor_set_out=$out.set" "$@"
{
    echo '#include "proto/rpc_core.h"'
    echo 'const unsigned char rpc_descriptors[] = {'
    od -An -v -tx1 "$out.set" | sed 's/ \(..\)/0x\1,/g'
    echo '};'
    echo 'const size_t rpc_descriptors_size = sizeof rpc_descriptors;'
} > "$out"
rm "$out.set"
