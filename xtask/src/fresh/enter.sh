# Sets up its namespaces for the system in $1, and runs a command there. All mounts end with the last
# process. $2 is the Rust toolchain, $3 cargo's downloads (or nothing), $4 a directory for new
# downloads of cargo.
set -eu
root=$1 toolchain=$2 registry=$3 room=$4
shift 4
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --make-rslave "$root/sys"
mount -t tmpfs -o mode=755 run "$root/run"

# The standard devices, FUSE and loop devices; no disk.
dev="$root/dev"
mount -t tmpfs -o mode=755 dev "$dev"
device() { mknod -m 666 "$dev/$1" c "$2" "$3"; }
device null 1 3
device zero 1 5
device full 1 7
device random 1 8
device urandom 1 9
device tty 5 0
device fuse 10 229
if [ -e /dev/loop-control ]; then
    mknod -m 600 "$dev/loop-control" c 10 237
    number=0
    while [ $number -lt 64 ]; do
        mknod -m 600 "$dev/loop$number" b 7 $number
        number=$((number + 1))
    done
fi
mkdir "$dev/pts" "$dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$dev/pts"
mount -t tmpfs -o mode=1777 shm "$dev/shm"
ln -s pts/ptmx "$dev/ptmx"
ln -s /proc/self/fd "$dev/fd"
for stream in 0:stdin 1:stdout 2:stderr; do
    ln -s "/proc/self/fd/${stream%%:*}" "$dev/${stream#*:}"
done

mkdir -p "$root/opt/rust" "$root/root/.cargo/registry" "$room/new" "$room/work"
mount --bind "$toolchain" "$root/opt/rust"
mount -o remount,bind,ro "$root/opt/rust"
if [ -n "$registry" ]; then
    mount -t overlay -o "lowerdir=$registry,upperdir=$room/new,workdir=$room/work" \
        registry "$root/root/.cargo/registry"
fi
# This shell is the first process, and takes the end of processes whose parents have ended while it waits.
# Without that, ended daemons would stay.
status=0
chroot "$root" sh -c 'cd /root/defuse && exec "$@"' sh "$@" || status=$?
exit $status
