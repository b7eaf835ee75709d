#!/bin/bash
# Process 1 of the node's own net, mount, pid, uts and ipc namespaces: makes its mounts and its network, then runs the
# programs, each again when it ends. All of it vanishes with this process.   usage: node.sh STATE
set -uo pipefail
state=$1 logs=$1/logs pki=$1/pki
. "$state/node.env" # NODE, addresses, CGROUP: written by render.py
export PATH=$state/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
unset HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy
die() { echo "node.sh: $*" >&2; exit 1; }
hostname "$NODE" || die "cannot set the host name"

# Mounts. Private towards the machine, so that none of them gets out; shared inside, so that pods can ask for propagation.
mount --make-rprivate / || die "cannot make the mounts private"
for folder in /var/lib/kubelet /var/lib/containerd /var/lib/cni /var/log; do
  mkdir -p "$folder" "$state$folder" && mount --bind "$state$folder" "$folder" || die "cannot cover $folder"
done
mount -t tmpfs -o mode=755 tmpfs /run || die "cannot cover /run"
mkdir -p /run/netns /run/lock
# The kubelet sets these six for the whole machine. It finds files here that hold what it wants, and leaves the machine alone.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
  kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  file=$state/sysctl/${setting%=*}
  mkdir -p "${file%/*}" && echo "${setting#*=}" > "$file" && mount --bind "$file" "/proc/sys/${setting%=*}" || die "cannot cover $setting"
done
mount --make-rshared / || die "cannot share the mounts"

# Network. Pods are on the bridge cni0, which the CNI plugin makes. The node's address is on a bridge without ports (some
# kernels have no dummy device). There is no default route: whatever is no pod, service or node is unreachable at once.
# The route to the services only has to exist: kube-proxy rewrites the address before a packet would leave.
ip link set lo up &&
  ip link add node0 type bridge && ip addr add "$NODE_IP/24" dev node0 && ip link set node0 up &&
  ip route add "$SERVICE_CIDR" dev node0 src "$NODE_IP" &&
  echo 1 > /proc/sys/net/ipv4/ip_forward || die "cannot make the network"
echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables || die "this kernel lacks br_netfilter: run 'modprobe br_netfilter' on the machine"

# keep NAME COMMAND...: runs it for ever.
keep() {
  local name=$1
  shift
  while :; do
    "$@" >> "$logs/$name.log" 2>&1
    echo "node.sh: $name ended with $?, starting it again" >> "$logs/$name.log"
    sleep 1
  done
}
api_answers() { kubectl --kubeconfig "$pki/node-admin.kubeconfig" get --raw /readyz > /dev/null 2>&1; }

keep etcd etcd --name "$NODE" --data-dir "$state/var/lib/etcd" --log-level warn \
  --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
  --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
  --initial-cluster "$NODE=http://127.0.0.1:2380" &
keep containerd containerd --config "$state/containerd.toml" &
keep kube-apiserver kube-apiserver --advertise-address "$NODE_IP" --secure-port 6443 --etcd-servers http://127.0.0.1:2379 \
  --service-cluster-ip-range "$SERVICE_CIDR" --allow-privileged --authorization-mode Node,RBAC \
  --enable-admission-plugins NodeRestriction --client-ca-file "$pki/ca.crt" \
  --tls-cert-file "$pki/apiserver.crt" --tls-private-key-file "$pki/apiserver.key" \
  --kubelet-certificate-authority "$pki/ca.crt" --kubelet-preferred-address-types InternalIP \
  --kubelet-client-certificate "$pki/apiserver-kubelet-client.crt" --kubelet-client-key "$pki/apiserver-kubelet-client.key" \
  --service-account-issuer https://kubernetes.default.svc.cluster.local \
  --service-account-key-file "$pki/sa.pub" --service-account-signing-key-file "$pki/sa.key" \
  --requestheader-client-ca-file "$pki/front-proxy-ca.crt" --requestheader-allowed-names front-proxy-client \
  --requestheader-username-headers X-Remote-User --requestheader-group-headers X-Remote-Group \
  --requestheader-extra-headers-prefix X-Remote-Extra- \
  --proxy-client-cert-file "$pki/front-proxy-client.crt" --proxy-client-key-file "$pki/front-proxy-client.key" \
  --enable-aggregator-routing --profiling=false \
  --audit-policy-file "$state/audit-policy.yaml" --audit-log-path "$state/audit.log" --audit-log-maxsize 20 --audit-log-maxbackup 3 &
keep kube-controller-manager kube-controller-manager --kubeconfig "$pki/controller-manager.kubeconfig" \
  --authentication-kubeconfig "$pki/controller-manager.kubeconfig" \
  --authorization-kubeconfig "$pki/controller-manager.kubeconfig" \
  --service-account-private-key-file "$pki/sa.key" --root-ca-file "$pki/ca.crt" --use-service-account-credentials \
  --cluster-signing-cert-file "$pki/ca.crt" --cluster-signing-key-file "$pki/ca.key" \
  --requestheader-client-ca-file "$pki/front-proxy-ca.crt" --leader-elect=false --profiling=false \
  --allocate-node-cidrs --cluster-cidr "$POD_CIDR" --service-cluster-ip-range "$SERVICE_CIDR" &
keep kube-scheduler kube-scheduler --kubeconfig "$pki/scheduler.kubeconfig" --leader-elect=false --profiling=false \
  --authentication-kubeconfig "$pki/scheduler.kubeconfig" --authorization-kubeconfig "$pki/scheduler.kubeconfig" &
# These two give up at their first failed request, so they wait for the API server.
{
  until api_answers; do sleep 0.2; done
  keep kubelet kubelet --config "$state/kubelet.yaml" --kubeconfig "$pki/kubelet.kubeconfig" \
    --hostname-override "$NODE" --node-ip "$NODE_IP" &
  keep kube-proxy kube-proxy --config "$state/proxy.yaml" --hostname-override "$NODE" &
  wait
} &
# The API server's door to the machine: a Unix socket, because it crosses network namespaces.
keep relay socat "UNIX-LISTEN:$state/api.sock,fork,unlink-early,mode=600" TCP:127.0.0.1:6443 &
wait
