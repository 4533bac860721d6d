# Which network the node has decides; what is set already stays. Arguments: where /sys and /proc are.
choose_network() {
    local sys=${1:-/sys} proc=${2:-/proc} device driver port route='' efa='' infiniband=''
    for device in "$sys"/class/infiniband/*; do
        [ -e "$device" ] || continue
        driver=$(readlink -f "$device/device/driver")
        if [ "${driver##*/}" = efa ]; then
            efa=1
            continue
        fi
        for port in "$device"/ports/*; do
            if grep -qs InfiniBand "$port/link_layer" && grep -qs ACTIVE "$port/state"; then
                infiniband+=${infiniband:+,}${device##*/}:${port##*/}
            fi
        done
    done
    while read -r device destination _; do
        if [ "$destination" = 00000000 ]; then
            route=$device
            break
        fi
    done < <(cat "$proc/net/route" 2>/dev/null)
    if [ -n "$efa" ]; then
        export FI_PROVIDER=${FI_PROVIDER:-efa} FI_EFA_USE_DEVICE_RDMA=${FI_EFA_USE_DEVICE_RDMA:-1}
        export RDMAV_FORK_SAFE=${RDMAV_FORK_SAFE:-1}
    elif [ -n "$infiniband" ]; then
        export NCCL_IB_HCA=${NCCL_IB_HCA:-=$infiniband}
    fi
    if [ -n "$route" ]; then
        export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$route} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$route}
    fi
}
choose_network
