name=@@NAME@@
docker rm --force "$name" >/dev/null 2>&1 # left by an earlier attempt
devices=() variables=()
if [ -e /dev/infiniband ]; then
    devices=(--device /dev/infiniband --ulimit memlock=-1)
fi
# What is exported here is exported there, except what says where things are on this machine. Names only: docker takes
# the values from the environment, where a list of processes does not show them.
while read -r variable; do
    case $variable in
    PATH | HOME | USER | LOGNAME | SHELL | SHLVL | PWD | OLDPWD | HOSTNAME | TERM | TMPDIR | TMP | TEMP | LANG | LANGUAGE) ;;
    LC_* | LD_* | XDG_* | SSH_* | DBUS_* | BASH* | CONDA* | VIRTUAL_ENV* | PYTHONPATH | PYTHONHOME | CUDA_HOME | CUDA_PATH) ;;
    NVIDIA_* | DOCKER_* | _) ;;
    *) variables+=(--env "$variable") ;;
    esac
done < <(compgen -e)
# With --init, as the first process of a container does not end by a signal that it has not asked for.
inside=(docker run --rm --init@@INTERACTIVE@@ --name "$name" --network host --ipc host@@GPUS@@ "${devices[@]}" "${variables[@]}"
    --volume "$PWD:$PWD" --workdir "$PWD"@@MOUNTS@@ @@IMAGE@@)
trap 'docker rm --force "$name" >/dev/null 2>&1' EXIT
