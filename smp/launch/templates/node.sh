set -o pipefail
@@TRAPS@@
@@NETWORK@@
@@RANK_INFO@@
@@ENTER@@
@@SETUP@@
@@ENVIRONMENT@@
@@EXEC@@@@INSIDE@@python3 -u -m smp.launch.local --nnodes "$nnodes" --node_rank "$node_rank" \
    --master_addr "$address" --master_port "$port" --nproc_per_node @@PROCESSES@@ @@NO_GPUS@@@@CONTROLLED@@@@PROGRAM@@ "$@"@@BESIDE@@
@@AFTER@@
