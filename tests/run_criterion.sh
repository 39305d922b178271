#!/bin/sh
# run_criterion.sh TEST_PROGRAM [ARG...]: fails when a test fails, when no test ran (a filter that
# matches nothing exits 0), or when a worker left a sanitizer report (Criterion ignores leaks).  Says which tests were
# skipped and why, which Criterion keeps to itself; 77 when all were.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
ASAN_OPTIONS="${ASAN_OPTIONS:+$ASAN_OPTIONS:}log_path=$dir/san"
# Criterion itself now and then forgets 48 bytes of its own; what our code allocates has our frames.
echo "leak:libcriterion.so" > "$dir/suppressions"
LSAN_OPTIONS="${LSAN_OPTIONS:+$LSAN_OPTIONS:}log_path=$dir/san:suppressions=$dir/suppressions:print_suppressions=0"
export ASAN_OPTIONS LSAN_OPTIONS
"$@" --verbose > "$dir/log" 2>&1
rc=$?
grep -av -e '\[.*RUN.*\] ' -e '\[.*PASS.*\] ' "$dir/log"
if ! grep -aq 'Tested: .*[1-9]' "$dir/log"; then
    [ "$rc" = 0 ] && grep -aq 'SKIPPED, ' "$dir/log" && exit 77
    echo "no test ran"
    exit 1
fi
if ls "$dir"/san.* > /dev/null 2>&1; then
    cat "$dir"/san.*
    exit 1
fi
exit $rc
