#!/bin/sh
# run.sh BUILD_DIR SECONDS: runs every fuzz target of the build for a while from the corpus beside it, if
# there is one.  A crash leaves its input in BUILD_DIR/tests/fuzz.
set -u
here=$(cd "$(dirname "$0")" && pwd)
cd "$1/tests/fuzz" || exit 1
rc=0
ran=0
for target in fuzz_*; do
    [ -x "$target" ] && [ ! -d "$target" ] || continue
    ran=$((ran + 1))
    corpus=$here/corpus/$target
    [ -d "$corpus" ] || corpus=
    mkdir -p "found-$target"
    # shellcheck disable=SC2086
    if ./"$target" -max_total_time="$2" -rss_limit_mb=2048 -timeout=10 "found-$target" $corpus > "$target.log" 2>&1; then
        echo "ok $target: $(grep -o 'Done [0-9]* runs' "$target.log")"
    else
        tail -n 30 "$target.log"
        echo "FAILED $target"
        rc=1
    fi
done
[ "$ran" -gt 0 ] || { echo "FAILED: no fuzz target in $1"; rc=1; }
exit $rc
