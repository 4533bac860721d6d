running=$!
if [ -n "$asked" ]; then
    hand_on "$asked"
fi
while true; do
    asked=''
    wait "$running"
    status=$?
    if [ -z "$asked" ]; then # else a signal interrupted the wait
        break
    fi
done
exit "$status"
