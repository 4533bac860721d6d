#!/bin/bash
@@COMMENTS@@
#
# Run it with bash 4.4 or newer on a machine that reaches all hosts by ssh without a password. SIGTERM, SIGUSR1 and
# Ctrl-C save a checkpoint. The exit status is that of the first host that failed.
set -uo pipefail

hosts=(@@HOSTS@@)
address=${SMP_MASTER_ADDR:-${hosts[0]#*@}} # of the first host, as all hosts reach it
port=${SMP_MASTER_PORT:-@@PORT@@}
grace=${SMP_GRACE_SECONDS:-60} # for the others to end, once one host has
ssh=(ssh -o BatchMode=yes -o ServerAliveInterval=15)
train=(
@@ARGUMENTS@@
)

# What runs on each host.
read -r -d '' node_script <<'SMP_NODE_SCRIPT' || true
@@NODE@@
SMP_NODE_SCRIPT

# Words for the other host's shell, each as it is.
quote() {
    local word
    for word in "$@"; do
        printf "'%s' " "${word//\'/\'\\\'\'}"
    done
}

scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
pipes=() running=()
hand_on() {
    local pipe
    for pipe in "${pipes[@]}"; do
        echo "$1" >&"$pipe"
    done
}
trap 'hand_on USR1' USR1
trap 'hand_on TERM' TERM
trap 'hand_on INT' INT

# Each host's standard input carries the names of signals; when it ends, the host's part of the job does.
for index in "${!hosts[@]}"; do
    mkfifo "$scratch/$index" || exit 2
    exec {pipe}<>"$scratch/$index"
    pipes+=("$pipe")
done
for index in "${!hosts[@]}"; do
    command=$(quote bash -c "$node_script" smp-node "${#hosts[@]}" "$index" "$address" "$port" "${train[@]}")
    (
        trap '' INT USR1 TERM # they go through the pipe
        for pipe in "${pipes[@]}"; do
            exec {pipe}>&-
        done
        exec "${ssh[@]}" "${hosts[$index]}" "exec $command"
    ) <"$scratch/$index" &
    running[index]=$!
done

status=0 waited=0
while [ "${#running[@]}" -gt 0 ]; do
    for index in "${!running[@]}"; do
        if kill -0 "${running[$index]}" 2>/dev/null; then
            continue
        fi
        wait "${running[$index]}"
        ended=$?
        unset 'running[index]'
        if [ "$ended" -ne 0 ]; then
            echo "smp: ${hosts[$index]} has ended with status $ended" >&2
            if [ "$status" -eq 0 ]; then
                status=$ended
            fi
        fi
    done
    if [ "$status" -ne 0 ] && [ "${#running[@]}" -gt 0 ]; then
        waited=$((waited + 1))
        if [ "$waited" -eq $((5 * grace)) ]; then
            echo "smp: ending the other hosts" >&2
            for pipe in "${pipes[@]}"; do
                exec {pipe}>&-
            done
            pipes=()
        elif [ "$waited" -eq $((5 * (grace + 90))) ]; then
            kill -9 "${running[@]}" # they have lost the connection
        fi
    fi
    sleep 0.2 &
    wait $!
done
exit "$status"
