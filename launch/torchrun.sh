#!/usr/bin/env bash
# Start a Python program under torchrun on this host:  torchrun.sh 2 -m launch.train --backend gloo
# On several hosts run it on each, with NODES, and MASTER_ADDR as the name of the first one (any free MASTER_PORT).
set -euo pipefail

ranks=${1:?usage: torchrun.sh RANKS_PER_HOST script.py|-m module [arguments]}
shift
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}

if [[ ${NODES:-1} -eq 1 ]]; then
    place=(--standalone)
else
    place=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-id "${JOB:-job}"
        --rdzv-endpoint "${MASTER_ADDR:?the first host}:${MASTER_PORT:-29500}")
fi
exec torchrun "${place[@]}" --nproc-per-node "$ranks" "$@"
