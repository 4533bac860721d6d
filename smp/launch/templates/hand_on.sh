# This shell stays, to hand signals on: a container is no child of it, and a pod's first process, which it is, does not
# end by a signal that it has not asked for.
running='' asked=''
hand_on() {
    asked=$1
    if [ -n "$running" ]; then
        kill -s "$1" "$running" 2>/dev/null
    fi
}
trap 'hand_on USR1' USR1
trap 'hand_on TERM' TERM HUP
trap 'hand_on INT' INT
