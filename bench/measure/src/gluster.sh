# The servers of GlusterFS, as the first process of name spaces of their own: network, mounts, processes.
# Everything ends with this process, which waits for the end of its input. Nothing is written outside of memory.
set -e
PATH=$PATH:/usr/sbin:/sbin
ip link set lo up
mkdir -p /run/gluster /var/lib/glusterd /var/log/glusterfs
for dir in /run/gluster /var/lib/glusterd /var/log/glusterfs; do
    mount -t tmpfs -o mode=0700 gluster "$dir"
done
host=127.1.1.1
socket=/run/gluster/glusterd.socket
cat >/var/lib/glusterd/glusterd.vol <<VOLUME
volume management
    type mgmt/glusterd
    option working-directory /var/lib/glusterd
    option transport-type socket
    option transport.socket.bind-address $host
    option transport.socket.read-fail-log off
    option glusterd-sockfile $socket
    option ping-timeout 0
    option event-threads 1
end-volume
VOLUME
glusterd -f /var/lib/glusterd/glusterd.vol -L WARNING
g() { gluster --glusterd-sock=$socket --mode=script "$@" >/dev/null </dev/null; }
until g pool list 2>/dev/null; do sleep 0.05; done
room=/run/gluster/bricks
mkdir $room
bricks() {
    for number in 1 2 ${2:+3}; do
        mkdir "$room/$1$number"
        echo "$host:$room/$1$number"
    done
}
make_volumes
echo ready
read -r _ || exit 0
