#!/usr/bin/env bash
# Start a Python program as MPI ranks on this host:  mpirun.sh 2 -m launch.train --backend mpi
# Copy and edit it: on a cluster add the hosts (mpirun --hostfile ...), or use srun, see slurm.sbatch.
set -euo pipefail

ranks=${1:?usage: mpirun.sh RANKS script.py|-m module [arguments]}
shift
cores=$(nproc)
options=(-n "$ranks")

if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
    if [[ $(id -u) -eq 0 ]]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        echo "mpirun.sh: this is root, so OMPI_ALLOW_RUN_AS_ROOT and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM are set" >&2
    fi
    if ((ranks > cores)); then
        options+=(--oversubscribe)
        export OMPI_MCA_mpi_yield_when_idle=1
        echo "mpirun.sh: $ranks ranks on $cores cores, so --oversubscribe and OMPI_MCA_mpi_yield_when_idle=1 are set" >&2
    fi
    options+=(--bind-to none) # one core a rank, the default, would also bind the threads of data loaders to it
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}

exec mpirun "${options[@]}" "${PYTHON:-python}" "$@"
