# Three servers of GlusterFS and a client, as the first process of name spaces of their own: processes, mounts, and the
# network of the client. Each server has mounts and a network of its own, with a line to the client's bridge.
# Everything ends with this process, which waits for the end of its input. Nothing is written outside of memory.
set -e
PATH=$PATH:/usr/sbin:/sbin
ip link set lo up
mkdir -p /run/gluster /var/lib/glusterd /var/log/glusterfs
for dir in /run/gluster /var/lib/glusterd /var/log/glusterfs; do
    mount -t tmpfs -o mode=0700 gluster "$dir"
done
ip link add hub type bridge
ip addr add 10.77.0.100/24 dev hub
ip link set hub up

# The first process of a server: waits for its line to the bridge, and starts glusterd. Without the options about
# the line, a glusterd answers no other one that asks it to join.
cat >/run/gluster/server.sh <<'SERVER'
set -e
number=$1
mount --bind "/run/gluster/s$number/gluster/lib" /var/lib/glusterd
mount --bind "/run/gluster/s$number/gluster/log" /var/log/glusterfs
# Programs of GlusterFS look for the socket of glusterd at a fixed place in it.
mount --bind "/run/gluster/s$number" "$(readlink -f /run)"
ip link set lo up
until ip link show line >/dev/null 2>&1; do sleep 0.02; done
ip addr add "10.77.0.$number/24" dev line
ip link set line up
cat >/var/lib/glusterd/glusterd.vol <<VOLUME
volume management
    type mgmt/glusterd
    option working-directory /var/lib/glusterd
    option transport-type socket
    option transport.socket.read-fail-log off
    option transport.socket.keepalive-time 10
    option transport.socket.keepalive-interval 2
    option transport.tcp-user-timeout 10
    option ping-timeout 5
    option event-threads 1
end-volume
VOLUME
glusterd -f /var/lib/glusterd/glusterd.vol -L WARNING
exec sleep infinity
SERVER

holders=
for number in 1 2 3; do
    for dir in lib log bricks; do mkdir -p "/run/gluster/s$number/gluster/$dir"; done
    unshare --net --mount --propagation private sh /run/gluster/server.sh "$number" >/dev/null </dev/null &
    holder=$!
    holders="$holders $holder"
    ip link add "to$number" type veth peer name "line$number"
    ip link set "to$number" master hub
    ip link set "to$number" up
    # The process has its name spaces a moment after its start.
    until [ "$(readlink /proc/$holder/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
    ip link set "line$number" netns "$holder" name line
done
# The last server gets the commands.
on() {
    holder=$1
    shift
    nsenter --target "$holder" --net --mount gluster --mode=script "$@" </dev/null
}
g() { on "${holders##* }" "$@" >/dev/null; }
until g pool list 2>/dev/null; do sleep 0.05; done
for number in 1 2; do
    until g peer probe "10.77.0.$number" 2>/dev/null; do sleep 0.1; done
done
# Each server checks by itself that the others are there.
for holder in $holders; do
    until [ "$(on "$holder" peer status | grep -c 'Peer in Cluster (Connected)')" = 2 ]; do sleep 0.1; done
done
# The first two servers have a brick each.
bricks() { echo "10.77.0.1:/run/gluster/bricks/$1 10.77.0.2:/run/gluster/bricks/$1"; }
make_volumes
trap 'exit 0' TERM
exec 3<&0
{ read -r _ <&3 || :; kill -TERM 1; } &
echo "ready$holders"
# A killed brick stays a process until somebody waits for it, and glusterd would not start it again.
while :; do wait; done
