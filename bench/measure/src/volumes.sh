# Makes the volumes of $VOLUMES. A line is the name of a volume, its kind, and options. The script that calls this has `g`, which runs
# gluster(8), and `bricks`, which prints the two bricks of a volume.
make_volumes() {
    while read -r name kind options; do
        [ -n "$name" ] || continue
        case $kind in
            replicated) kind='replica 2' ;;
            *) kind= ;;
        esac
        # shellcheck disable=SC2046,SC2086 # words
        g volume create "$name" $kind $(bricks "$name") force
        # shellcheck disable=SC2086 # words
        [ -z "$options" ] || g volume set "$name" $options
        g volume start "$name"
    done <<LINES
${VOLUMES%?}
LINES
}
