# Installs, uses and removes the packages, on a minimal system. Each failure ends it.
set -eu
cd /root/packages
# Of packages and their manager, and of the files of a root user, paths may stay.
paths() {
    find / -xdev \( -path /root -o -path /tmp -o -path /var/log -o -path /var/cache/apt -o -path /var/cache/ldconfig \
        -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /etc/ld.so.cache \) -prune -o -print | sort
    find /var/lib/dpkg/info | sort
}
fail() {
    echo "failed: $1" >&2
    exit 1
}
installed() {
    test -x /usr/bin/defuse && test -x /usr/bin/defuse-study && test -e /usr/include/defuse.h
}
# Its removal would leave more than that of a package of ours.
apt-get -q install -y --no-install-recommends python3 > /tmp/apt 2>&1 || { cat /tmp/apt; fail "apt-get install python3"; }
paths > /tmp/before
begun=$(date +%s)
apt-get -q install -y --no-install-recommends ./*.deb > /tmp/apt 2>&1 || { cat /tmp/apt; fail "apt-get install"; }
installed || fail "a file is missing"

test "$(defuse run --mount /x=memory: -- sh -c 'echo hello > /x/file && cat /x/file')" = hello || fail "a run"
echo "installation and first run: $(($(date +%s) - begun)) s"
test -z "$(find /root/.cache/defuse /var/cache/defuse -name 'library-*' 2> /dev/null)" || fail "the library was unpacked"

mkdir /mnt/a
defuse mount memory: /mnt/a -o nosymfollow
echo hello > /mnt/a/file && grep -q hello /mnt/a/file || fail "a mount"
ln -s file /mnt/a/link
! cat /mnt/a/link 2> /dev/null && test "$(readlink /mnt/a/link)" = file || fail "nosymfollow"
defuse umount /mnt/a
rmdir /mnt/a
# With the helpers.
mount -t fuse.defuse memory: /mnt/a -o size=1M,x-gvfs-hide,X-mount.mkdir
test "$(findmnt -n -o FSTYPE /mnt/a 2> /dev/null || grep ' /mnt/a ' /proc/mounts | cut -d ' ' -f 3)" = fuse.defuse || fail "mount(8)"
umount /mnt/a
echo 'memory: /mnt/a fuse.defuse size=1M,nofail 0 0' >> /etc/fstab
mount /mnt/a && umount /mnt/a || fail "fstab"
sed -i '/fuse.defuse/d' /etc/fstab
# The commands of a unit, without systemd.
mkdir /etc/defuse
printf 'source = "memory:"\nmountpoint = "/mnt/a"\n' > /etc/defuse/a.toml
defuse mount --config /etc/defuse/a.toml
mount | grep -q ' /mnt/a ' || fail "a mount by its configuration"
defuse umount /mnt/a
rm -r /etc/defuse
defuse study --help > /dev/null || fail "defuse-study"
python3 -c '
import defuse_fs
defuse_fs.mount("x:", "memory:")
defuse_fs.write_file("x:/file", b"hello")
assert defuse_fs.read_file("x:/file") == b"hello"' || fail "the module for Python"
ldconfig -p | grep -q libdefuse.so.0 || fail "libdefuse is not known to the loader"
rmdir /mnt/a

apt-get -q purge -y defuse defuse-study libdefuse0 libdefuse-dev python3-defuse-fs > /tmp/apt 2>&1 || { cat /tmp/apt; fail "apt-get purge"; }
! installed || fail "a file is left"
paths > /tmp/after
diff /tmp/before /tmp/after || fail "these paths are left or gone"
echo "removed, and nothing is left"

# The archive.
mkdir /opt/defuse
tar -xzf ./*.tar.gz -C /opt/defuse --strip-components=1
test "$(/opt/defuse/bin/defuse run --mount /x=memory: -- sh -c 'echo hello > /x/file && cat /x/file')" = hello || fail "a run of the archive"
/opt/defuse/bin/defuse study --help > /dev/null || fail "defuse-study of the archive"
