#!/bin/bash
@@DIRECTIVES@@
#
@@COMMENTS@@
#
# Before the time is over the job saves a checkpoint and goes back into the queue, where it resumes.
set -uo pipefail

@@ENTER@@
max_requeues=@@MAX_REQUEUES@@ # of any kind
max_failures=@@MAX_FAILURES@@ # in a row
restarts=${SLURM_RESTART_COUNT:-0}
failures=${SLURM_SUBMIT_DIR:-.}/slurm-$SLURM_JOB_ID.failures # their number, while the job waits in the queue
if [ "$restarts" -eq 0 ]; then
    rm -f "$failures"
elif [ "$restarts" -gt "$max_requeues" ]; then # Slurm itself put it there
    echo "smp: not started again: it was in the queue $restarts times before (--max_requeues $max_requeues)"
    rm -f "$failures"
    exit 75
fi
train=(
@@ARGUMENTS@@
)
@@RESUME@@

# What runs on each node.
read -r -d '' node_script <<'SMP_NODE_SCRIPT' || true
@@NODE@@
SMP_NODE_SCRIPT

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Not what the submitting shell has in MASTER_ADDR, which sbatch hands on.
MASTER_ADDR=${SMP_MASTER_ADDR:-${nodes%%$'\n'*}}
MASTER_PORT=${SMP_MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT

# A node whose processes have failed does not end the others at once: they say what they have lost, and end themselves.
# Those that wait for one that never came do so later than all else.
step_options=(--nodes=@@NODES@@ --ntasks=@@NODES@@ --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=@@WAIT@@ --cpu-bind=none)
if [ -d /opt/sagemaker_cluster ]; then
    step_options+=(--auto-resume=1) # HyperPod replaces nodes that break
fi
@@STEP_OPTIONS@@
step='' asked='' woken=''
# Both reach the step as USR1: srun kills its tasks when SIGTERM comes to itself.
hand_on() {
    asked=1 woken=1
    if [ -n "$step" ]; then
        kill -s USR1 "$step" 2>/dev/null
    fi
}
trap hand_on USR1 TERM

# Tries a command again while Slurm's controller does not answer, as it may not for some seconds.
patiently() {
    local pause
    for pause in 1 2 4; do
        "$@" && return
        sleep "$pause"
    done
    "$@"
}

# Succeeds if the job will run again.
requeue() {
    if [ "$restarts" -ge "$max_requeues" ]; then
        echo "smp: not put back into the queue: it has been there $restarts times (--max_requeues $max_requeues)"
        return 1
    fi
    local shown
    shown=$(patiently scontrol --oneliner show job "$SLURM_JOB_ID") # says nothing if it fails: then try
    case " $shown " in
    *" JobState=RUNNING "*) ;;
    *" JobState="*)
        echo "smp: not put back into the queue: Slurm is ending the job"
        return 1
        ;;
    *) echo "smp: scontrol does not say the job's state" ;;
    esac
    echo "smp: back into the queue, $((restarts + 1)) of at most $max_requeues times"
    if ! patiently scontrol requeue "$SLURM_JOB_ID"; then
        echo "smp: not put back into the queue: scontrol requeue failed"
        return 1
    fi
}

srun "${step_options[@]}" bash -c "$node_script" smp-node "${train[@]}" </dev/null &
step=$!
status=0
while true; do
    woken=''
    wait "$step"
    status=$?
    if [ -z "$woken" ]; then # else a signal interrupted the wait
        break
    fi
done

step=''

echo "smp: the step has ended with status $status"
if [ -n "$asked" ] && { [ "$status" -eq 138 ] || [ "$status" -eq 143 ]; }; then
    status=75 # the signal came before training began
fi
@@CLEANUP@@
case $status in
0) ;;
75)
    rm -f "$failures"
    requeue && exit 0
    ;;
2 | 126 | 127 | 130)
    echo "smp: not put back into the queue: it would end so again"
    ;;
*)
    count=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
    if [ "$count" -gt "$max_failures" ]; then
        echo "smp: not put back into the queue: $count failures in a row (--max_failures $max_failures)"
    else
        echo "$count" >"$failures"
        requeue && exit 0
    fi
    ;;
esac
rm -f "$failures"
exit "$status"
