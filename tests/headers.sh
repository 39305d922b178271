#!/bin/sh
# headers.sh SOURCE_DIR GENERATED_DIR COMPILER...: every header compiles by itself.
set -u
cd "$1" || exit 1
generated=$2
shift 2
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
n=0
bad=0
for header in $(find agentenv deploy kvstore proto rollout tests trainer -name '*.h'); do
    n=$((n + 1))
    # Vectors wider than the build's baseline are passed in a few static inline functions.
    printf '#include "%s"\n' "$header" | "$@" -std=gnu17 -D_GNU_SOURCE -Wall -Wno-psabi -Werror -fsyntax-only \
        -I. -I"$generated" -I"$(dirname "$header")" -x c - 2> "$log" && continue
    bad=$((bad + 1))
    echo "$header does not compile alone:"
    head -n 5 "$log"
done
echo "$n headers, $bad of them bad"
[ "$n" -gt 0 ] && [ "$bad" = 0 ]
