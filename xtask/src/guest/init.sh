#!/bin/busybox sh
# The first and only program of the guest. It does the job that the kernel's command line names, and reports on the
# second serial port: "@ok CHECK", "@fail CHECK", "@value NAME TEXT", "@durable WRITER FILE", "@want ACTION", "@end".

export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp
/bin/busybox mkdir -p /etc /proc /sys /dev /tmp /run /mnt /mnt2
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
stty -F /dev/ttyS1 raw
exec > /dev/ttyS1 2>&1 < /dev/null

# The controllers: the first one is given to user space, and the kernel keeps the second one.
A=0000:01:00.0
B=0000:02:00.0

# check NAME COMMAND...: reports if the command succeeds, with its output if it does not.
check() {
    name=$1
    shift
    if "$@" > /tmp/out 2>&1; then
        echo "@ok $name"
    else
        echo "# exit $?: $*"
        sed 's/^/# /' /tmp/out
        dmesg | tail -12 | sed 's/^/# /'
        tail -12 /tmp/log 2> /dev/null | sed 's/^/# /'
        echo "@fail $name"
        end
    fi
}

# refused TEXT COMMAND...: true if the command fails and says TEXT.
refused() {
    text=$1
    shift
    ! "$@" > /tmp/refusal 2>&1 && grep -q "$text" /tmp/refusal && return
    cat /tmp/refusal
    return 1
}

# says TEXT COMMAND...: true if the command succeeds and says TEXT.
says() {
    text=$1
    shift
    "$@" > /tmp/said 2>&1 && grep -q "$text" /tmp/said && return
    cat /tmp/said
    return 1
}

end() {
    echo "@end"
    sync
    poweroff -f
    exit
}

disk_of() {
    ls /sys/bus/pci/devices/$1/nvme/nvme*/ | grep '^nvme[0-9]*n[0-9]*$'
}

# Waits until the kernel's driver has found the disk of a controller.
wait_disk() {
    for _ in $(seq 100); do
        disk=$(disk_of $1 2> /dev/null)
        [ -b "/dev/$disk" ] && return
        sleep 0.1
    done
    return 1
}

content() {
    seq "$1" $(($1 + 700))
}

# Writes the files of a tree: large, small, in directories, renamed and removed.
fill() {
    mkdir -p "$1/d/e" && cp /usr/bin/defuse "$1/program" && ln -s program "$1/link" || return 1
    for n in $(seq 30); do
        content "$n" > "$1/d/new" && mv "$1/d/new" "$1/d/$n" || return 1
    done
    rm "$1/d/7" && echo more >> "$1/d/8" && fsync "$1/d/8" && truncate -s 100 "$1/d/9"
}

# True if a tree is as `fill` made it.
filled() {
    cmp /usr/bin/defuse "$1/link" && [ ! -e "$1/d/7" ] && [ "$(wc -c < "$1/d/9")" = 100 ] || return 1
    [ "$(tail -1 "$1/d/8")" = more ] && [ "$(ls "$1/d" | wc -l)" = 30 ] || return 1
    for n in 1 2 15 30; do
        content "$n" | cmp - "$1/d/$n" || return 1
    done
}

# True if a process has the device's own file and an iommufd, and none a group.
uses_iommufd() {
    ls -l /proc/[0-9]*/fd > /tmp/open 2> /dev/null
    grep -q '/dev/iommu$' /tmp/open && grep -q '/dev/vfio/devices/vfio' /tmp/open && ! grep -q '/dev/vfio/[0-9v]' /tmp/open
}

mount_uhs() {
    check "mount" defuse mount --log-file /tmp/log uhs:nvme:$A /mnt
}

umount_uhs() {
    check "unmount" defuse umount /mnt
}

# Each command of `defuse nvme`, and uhs on the driver.
driver() {
    check "the kernel has both controllers" says "$A.* nvme .*$(disk_of $A)" defuse nvme list
    disk=$(disk_of $A)
    mkfs.ext4 -q "/dev/$disk" && mount -t ext4 "/dev/$disk" /mnt2
    check "a mounted disk is not bound" refused "$disk is mounted at /mnt2" defuse nvme bind $A
    check "its mount works" touch /mnt2/file
    umount /mnt2
    check "user space does not have it yet" refused "defuse nvme bind $A" defuse nvme identify $A
    check "bind" defuse nvme bind $A
    check "a bound controller is listed" says "$A.*vfio-pci" defuse nvme list
    check "identify" says "serial *guest0" defuse nvme identify $A
    defuse nvme identify $A | sed 's/^/# /'
    check "smart" says temperature_celsius defuse nvme smart $A
    check "priorities" says "priorities_of_queues *false" defuse nvme identify $A
    check "a namespace that is not there" refused "namespace 7" defuse nvme identify --namespace 7 $A
    check "a file system is not destroyed" refused "has an ext2, ext3 or ext4" defuse mkfs uhs nvme:$A
    check "mkfs" defuse mkfs uhs --force nvme:$A
    mount_uhs
    [ ! -e /dev/iommu ] || check "an iommufd has its memory" uses_iommufd
    check "files are written" fill /mnt
    check "sync" sync
    check "a controller in use stays" refused "has /dev/vfio/.* open" defuse nvme unbind $A
    check "a controller has one user" refused "busy" defuse nvme smart $A
    umount_uhs
    check "fsck" defuse fsck nvme:$A
    mount_uhs
    check "files are there" filled /mnt
    umount_uhs
    check "unbind" defuse nvme unbind $A
    check "the kernel has it again" wait_disk $A
    dd if="/dev/$(disk_of $A)" of=/tmp/copy bs=4096 skip=3 count=700 2> /dev/null
    check "fsck by way of the kernel" defuse fsck "/dev/$(disk_of $A)"
    check "bind again" defuse nvme bind $A
    check "compare" defuse nvme compare $A /tmp/copy --block 3
    check "compare other blocks" refused "differ from" defuse nvme compare $A /tmp/copy --block 4
    check "compare beyond the end" refused "cannot compare" defuse nvme compare $A /tmp/copy --block 131071
    mount_uhs
    check "files are there still" filled /mnt
    umount_uhs
}

# as USER KIB COMMAND...: runs a command as an ordinary user who may lock so much memory.
as() (
    user=$1
    ulimit -l "$2" || return
    shift 2
    # The words of the command have no spaces.
    su -s /bin/sh -c "exec $*" "$user"
)

# raised KIB COMMAND...: a command of the owner is refused with this limit, and succeeds with the limit that the refusal names.
raised() {
    limit=$1
    shift
    refused "RLIMIT_MEMLOCK lets this process lock $limit KiB" as owner "$limit" "$@" || return
    limit=$(sed -n 's/.*`ulimit -l \([0-9]*\)`.*/\1/p' /tmp/refusal)
    as owner "$limit" "$@"
}

# The owner of the group needs no other rights, but memory that may be locked.
owner() {
    printf 'root:x:0:0::/tmp:/bin/sh\nowner:x:1000:1000::/tmp:/bin/sh\nother:x:1001:1001::/tmp:/bin/sh\n' > /etc/passwd
    check "bind for a user" defuse nvme bind $A
    group=$(basename "$(readlink /sys/bus/pci/devices/$A/iommu_group)")
    own=/dev/vfio/$group
    # A kernel may have nothing but iommufd.
    if [ ! -e /dev/vfio/vfio ]; then
        own=$(echo /dev/vfio/devices/*)
        chown owner /dev/iommu
    fi
    chown owner "$own"
    check "it is an ordinary user" says "^CapEff:.*00000000$" as owner 8192 grep CapEff /proc/self/status
    check "identify as the owner" says "serial *guest0" as owner 8192 defuse nvme identify $A
    check "smart as the owner" says temperature_celsius as owner 8192 defuse nvme smart $A
    check "mkfs as the owner" as owner 65536 defuse mkfs uhs --force nvme:$A
    check "dump as the owner" says superblock as owner 65536 defuse dump nvme:$A
    check "fsck as the owner" says clean as owner 65536 defuse fsck nvme:$A
    for ask in "nvme identify $A" "mkfs uhs --force nvme:$A" "fsck nvme:$A"; do
        check "another user, ${ask%% *}" refused "$own: Permission denied.*chown USER $own" \
            as other 65536 defuse $ask
    done
    check "another user does not bind" refused "driver_override: Permission denied.*needs root" as other 8192 defuse nvme unbind $A
    for ask in "nvme identify $A" "mkfs uhs --force nvme:$A" "dump nvme:$A" "fsck nvme:$A"; do
        check "no memory to lock, ${ask%% *}" raised 0 defuse $ask
    done
    check "the kernel's default is too little for mkfs" raised 8192 defuse mkfs uhs --force nvme:$A
    check "unbind after all" defuse nvme unbind $A
}

# Writes files one by one, and says so when each is durable.
writer() {
    mkdir "/mnt/$1" && fsync "/mnt/$1" || return
    for n in $(seq 100000); do
        content "$n" > "/mnt/$1/new" && fsync "/mnt/$1/new" && mv "/mnt/$1/new" "/mnt/$1/$n" \
            && fsync "/mnt/$1/$n" && echo "@durable $1 $n" || return
    done
}

# Writes until the power is cut.
load() {
    check "bind" defuse nvme bind $A
    check "mkfs" defuse mkfs uhs --force nvme:$A
    mount_uhs
    writer 1 &
    writer 2 &
    wait
}

# Looks for the files that were durable: durable=FILES-OF-1,FILES-OF-2 on the kernel's command line.
after() {
    check "bind" defuse nvme bind $A
    check "fsck after a power cut" defuse fsck nvme:$A
    mount_uhs
    durable=$(sed 's/.*durable=\([0-9,]*\).*/\1/' /proc/cmdline)
    check "durable files of writer 1" durable_files 1 "${durable%,*}"
    check "durable files of writer 2" durable_files 2 "${durable#*,}"
    check "files are written" fill /mnt
    umount_uhs
    check "fsck" defuse fsck nvme:$A
}

# The controller is taken out while a program writes.
taken_out() {
    check "bind" defuse nvme bind $A
    check "mkfs" defuse mkfs uhs --force nvme:$A
    mount_uhs
    writer 1 > /tmp/writes 2>&1 &
    writing=$!
    check "a program writes" grows 10
    "$@"
    check "the program ends" ended $writing
    check "it is told of an error" grep -qi "input/output error\|read-only" /tmp/writes
    check "the driver says why" grep -q "taken back\|it is gone\|given up" /tmp/log
    grep -i "controller" /tmp/log | sed 's/^/# /'
    timeout 300 defuse umount /mnt > /tmp/out 2>&1
    check "unmount ends" [ $? -lt 124 ]
    umount -l /mnt 2> /dev/null
    check "the daemon ends" no_daemon
}

unplug() {
    taken_out echo "@want device_del"
    check "the controller has left" has_left
    echo "@want device_add"
    check "the controller is back" wait_disk $A
    check "bind again" defuse nvme bind $A
    check "fsck" defuse fsck nvme:$A
    mount_uhs
    check "durable files" durable_files 1 "$(grep -c @durable /tmp/writes)"
    umount_uhs
}

# Nobody is told: also the kernel believes that the controller is there, and waits a minute for it when it is closed.
surprise() {
    taken_out power_off
    echo "@value durable $(grep -c @durable /tmp/writes)"
}

# Ends the power of the slot of the first controller: two bytes of the slot control register of its port, which say that
# power and its indicator are off.
power_off() {
    port=/sys/bus/pci/devices/$A/../config
    echo "# slot control: $(dd if=$port bs=1 skip=$((0x54 + 0x18)) count=2 2> /dev/null | od -An -tx2)"
    printf '\361\007' | dd of=$port bs=2 seek=$(((0x54 + 0x18) / 2)) count=1 conv=notrunc 2> /dev/null
}

# True when this many files are durable.
grows() {
    for _ in $(seq 600); do
        [ "$(grep -c @durable /tmp/writes)" -ge "$1" ] && return
        sleep 0.1
    done
    return 1
}

ended() {
    for _ in $(seq 900); do
        kill -0 "$1" 2> /dev/null || return 0
        sleep 0.1
    done
    return 1
}

has_left() {
    for _ in $(seq 300); do
        [ -e /sys/bus/pci/devices/$A ] || return 0
        sleep 0.1
    done
    return 1
}

no_daemon() {
    for _ in $(seq 300); do
        pidof defuse > /dev/null || return 0
        sleep 0.1
    done
    return 1
}

# The controller is a device of a manager, and an application has it for a while.
bound() {
    check "bind" defuse nvme bind $A
    check "mkfs" defuse mkfs uhs --force nvme:$A
    mkdir /tmp/m
    printf 'socket = "/tmp/m/socket"\nanswer-within = 30\n[[device]]\npath = "/fast"\nbind = []\n' > /tmp/m/config
    echo "source = \"uhs:nvme:$A\"" >> /tmp/m/config
    defuse manager --foreground --log-file /tmp/m/log /tmp/m/config &
    manager=$!
    check "a manager has the controller" eventually defuse stat /tmp/m/socket
    check "mount the tree" defuse mount shared:/tmp/m/socket /mnt
    echo one > /mnt/fast/one
    check "an application has it" defuse mount -o device=/fast bound:/tmp/m/socket /mnt2
    check "the manager says so" says "process [0-9]* of user 0 has it" defuse stat /tmp/m/socket
    application=$(sed -n 's/process \([0-9]*\) of user 0 has it/\1/p' /tmp/said)
    check "it has the files" grep one /mnt2/one
    echo two > /mnt2/two
    fsync /mnt2/two
    check "others have its files" grep two /mnt/fast/two
    echo three > /mnt/fast/three
    check "it has those of others" grep three /mnt2/three
    kill -9 "$application"
    umount -l /mnt2
    check "the manager has it again" eventually grep two /mnt/fast/two
    check "and nobody else" says "the manager has it" defuse stat /tmp/m/socket
    check "unmount" defuse umount /mnt
    kill $manager
    check "the manager ends" wait $manager
    check "fsck" defuse fsck nvme:$A
}

# True as soon as a command succeeds.
eventually() {
    for _ in $(seq 300); do
        "$@" > /tmp/tried 2>&1 && return
        sleep 0.2
    done
    cat /tmp/tried /tmp/m/log
    return 1
}

# The driver beside that of the kernel: rounds in turn, and then with the controllers exchanged.
speed() {
    for depth in 1 32; do
        for _ in 1 2 3; do
            compare $depth $A $B
            compare $depth $B $A
        done
    done
    check "bind" defuse nvme bind $A
    check "mkfs" defuse mkfs uhs --force nvme:$A
    for round in 1 2; do
        mount_uhs
        small uhs
        umount_uhs
        for kind in ext4 xfs f2fs; do
            disk=/dev/$(disk_of $B)
            force=-f
            [ $kind = ext4 ] && force=-F
            check "mkfs.$kind" mkfs.$kind $force $disk
            check "mount $kind" mount -t $kind $disk /mnt
            small $kind
            check "unmount $kind" umount /mnt
        done
    done
}

# compare DEPTH USER KERNEL: reads of both controllers at a depth.
compare() {
    defuse nvme bind $2 || echo "@fail bind $2"
    wait_disk $3
    disk=/dev/$(disk_of $3)
    check "bench" defuse nvme bench $2 --file $disk --file $disk --depth $1 --seconds 2
    awk -v depth=$1 'NR > 1 { print "@value reads " depth, (NR == 2 ? "driver" : "kernel"), $2, $1 }' /tmp/out
    defuse nvme unbind $2 || echo "@fail unbind $2"
    wait_disk $2
}

# The latencies of small operations, in ms: the median of each.
small() {
    mkdir -p /mnt/small
    check "workload on $1" defuse workload /small.f --dir /mnt/small
    awk -v kind=$1 '$1 ~ /^(create|write|fsync|stat|read)$/ { print "@value small", kind, $1, $6 }' /tmp/out
    rm -r /mnt/small
}

# durable_files WRITER COUNT: the files of a writer up to this number have their content.
durable_files() {
    [ "$2" -ge 0 ] || return 1
    for n in $(seq "$2"); do
        content "$n" | cmp - "/mnt/$1/$n" || return 1
    done
}

job=$(sed 's/.*job=\([a-z]*\).*/\1/' /proc/cmdline)
while read -r module; do
    insmod "/modules/$module.ko" || echo "@fail module $module"
done < /modules/order
if ! wait_disk $A || ! wait_disk $B; then
    ls /sys/bus/pci/devices
    dmesg | tail -40
    echo "@fail the controllers are there"
    end
fi
$job
end
