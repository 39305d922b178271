#!/bin/sh
# quickstart-image.sh DIRECTORY: the root file system that the quickstart's sandboxes start from, made
# of one static busybox and a link for each of its commands.  `agentenv image import` takes it from there.
set -eu

if [ $# -ne 1 ]; then
    echo "usage: quickstart-image.sh DIRECTORY" >&2
    exit 2
fi
root=$1
busybox=${BUSYBOX:-$(command -v busybox || true)}
if [ -z "$busybox" ]; then
    echo "quickstart-image.sh: busybox is missing; apt-get install busybox-static" >&2
    exit 1
fi
if [ -e "$root" ] && [ -n "$(ls -A "$root")" ]; then
    echo "quickstart-image.sh: $root is not empty; give a new directory" >&2
    exit 1
fi

umask 022
mkdir -p "$root/bin" "$root/etc" "$root/root" "$root/work" "$root/proc" "$root/sys" "$root/dev" "$root/usr"
mkdir -m 1777 "$root/tmp"
cp "$busybox" "$root/bin/busybox"
chmod 755 "$root/bin/busybox"
# A dynamic busybox would find no libraries in there.
if ! chroot "$root" /bin/busybox true; then
    echo "quickstart-image.sh: $busybox does not run by itself; apt-get install busybox-static" >&2
    exit 1
fi
for command in $("$busybox" --list); do
    [ "$command" = busybox ] || ln -s busybox "$root/bin/$command"
done
ln -s ../bin "$root/usr/bin"
ln -s bin "$root/sbin"
echo 'root:x:0:0:root:/root:/bin/sh' > "$root/etc/passwd"
echo 'root:x:0:' > "$root/etc/group"
