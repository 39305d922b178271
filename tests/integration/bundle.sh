#!/bin/sh
# bundle.sh PREFIX SOURCE: the archive of deploy/bundle in a root that holds glibc and a static busybox and nothing
# else, under a path it was not made for.
set -u
prefix=$1 source=$2
skip() {
    echo "SKIPPED, $*"
    [ -z "${LONGHAUL_MUST_WORK:-}" ] || exit 1
    exit 77
}

[ "$(id -u)" = 0 ] || skip "root is missing: the bundle is tried in a chroot"
command -v patchelf > /dev/null || skip "patchelf is missing: deploy/setup check"
dir=$(mktemp -d /tmp/longhaul-bundle-XXXXXX)
trap 'rm -rf "$dir"' EXIT

fail() {
    echo "FAILED: $*"
    cat "$dir/out"
    exit 1
}

"$source/deploy/bundle" "$dir/b.tar.gz" "$prefix" > "$dir/out" 2>&1 || fail "deploy/bundle"
mkdir "$dir/unpacked"
tar -xzf "$dir/b.tar.gz" -C "$dir/unpacked" || fail "unpacking"
root=$dir/root
cp -a "$dir/unpacked/longhaul/share/quickstart/image" "$root"
mkdir -p "$root/lib64" "$root/some/where"
mv "$dir/unpacked/longhaul" "$root/some/where/else"
for library in libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libresolv.so.2; do
    cp -L "$(cc -print-file-name=$library)" "$root/lib64/" || fail "$library of this machine"
done
cp -L /lib64/ld-linux-x86-64.so.2 "$root/lib64/" || fail "loader of this machine"

# inside WHAT COMMAND...: in the root, with its own /proc, and a loader that is told of no other library.
inside() {
    what=$1
    shift
    unshare --mount --propagation private sh -c 'mount -t proc proc "$0/proc" && exec env -i \
        PATH=/bin:/some/where/else/bin LD_LIBRARY_PATH=/lib64 "$(command -v chroot)" "$0" "$@"' "$root" "$@" > "$dir/out" 2>&1 ||
        fail "$what"
}

here=/some/where/else n=0
for program in "$root$here"/bin/*; do
    name=$(basename "$program")
    inside "$name --help" "$here/bin/$name" --help
    n=$((n + 1))
done
inside "a model made and shown" "$here/bin/longhaul" policy init "$here/jobs/quickstart-model/config.json" /work/model
inside "the model shown" "$here/bin/longhaul" policy show /work/model
inside "the job read" "$here/bin/longhaul" run --dry-run "$here/jobs/quickstart.yaml" --dir /work/run
grep -q "$here/jobs/../share/quickstart/tasks.pb" "$dir/out" || fail "the job names tasks elsewhere"
[ -s "$root$here/share/quickstart/tasks.pb" ] || fail "no tasks"
[ -x "$root$here/libexec/longhaul/busybox" ] || fail "no busybox for verifiers"
[ $n -ge 12 ] || fail "only $n programs"
echo "Tested: $n programs, a model and the quickstart's job from a moved bundle"
