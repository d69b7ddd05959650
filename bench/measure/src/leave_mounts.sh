# The first commands of a script in a mount namespace of its own: it leaves mounts of FUSE and of loop devices that others have
# made. A copy would keep such a mount alive after its owner has unmounted it, while the owner waits for its end.
while read -r _ _ _ _ target rest; do
    case "${rest#* - }" in
        fuse\ * | fuse.* | fuseblk\ * | *\ /dev/loop*) ;;
        *) continue ;;
    esac
    target=$(printf '%b' "$target")
    case "$PWD/" in
        # The project may lie on one.
        "${target%/}/"*) ;;
        *) umount -i -c -l "$target" 2>/dev/null || : ;;
    esac
done </proc/self/mountinfo
