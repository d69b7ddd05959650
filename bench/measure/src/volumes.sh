# Makes the volumes of $VOLUMES. A line is the name of a volume, its kind, and options. The script that calls this has `g`, which runs
# gluster(8), and `bricks`, which prints the two bricks of a volume, or three with a
# further argument.
make_volumes() {
    while read -r name kind options; do
        [ -n "$name" ] || continue
        three=
        case $kind in
            replicated) kind='replica 2' ;;
            arbiter) kind='replica 3 arbiter 1' three=three ;;
            disperse) kind='disperse 3 redundancy 1' three=three ;;
            *) kind= ;;
        esac
        # shellcheck disable=SC2046,SC2086 # words
        g volume create "$name" $kind $(bricks "$name" $three) force
        # shellcheck disable=SC2086 # words
        [ -z "$options" ] || g volume set "$name" $options
        g volume start "$name"
    done <<LINES
${VOLUMES%?}
LINES
}
