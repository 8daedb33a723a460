#!/usr/bin/env bash
# A real Slurm of one node, for tests: controller, node daemon and munge of its own, all state in one folder.
#
#   tests/launch/one_node_slurm.sh start DIR    start it (again: no effect) and print the SLURM_CONF to export
#   tests/launch/one_node_slurm.sh stop DIR     end its daemons
#
# Runs as root on Debian or Ubuntu and installs slurm-wlm and munge where they are missing. Nothing outside DIR is
# written, so a Slurm that the machine already has is left alone. MPI_TASKS (default 8) is the number of task slots.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[[ $# -eq 2 ]] || usage
action=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)
export SLURM_CONF=$dir/slurm.conf

alive() { # whether the daemon with this pid file runs; a zombie that nobody has waited for does not
    [[ -s $dir/$1.pid ]] && grep -qs '^State:[[:space:]]*[^Z[:space:]]' "/proc/$(<"$dir/$1.pid")/status"
}

ready() { timeout 5 sinfo --noheader --format=%t 2>/dev/null | grep -qE '^(idle|mix|alloc)'; }

stop() {
    local daemon
    for daemon in slurmd slurmctld munged; do
        if alive "$daemon"; then kill "$(<"$dir/$daemon.pid")"; fi
    done
    for _ in {1..50}; do
        alive slurmd || alive slurmctld || alive munged || return 0
        sleep 0.1
    done
    for daemon in slurmd slurmctld munged; do
        if alive "$daemon"; then kill -KILL "$(<"$dir/$daemon.pid")"; fi
    done
}

install_packages() {
    command -v slurmctld slurmd srun munged mungekey >/dev/null && return 0
    [[ $(id -u) -eq 0 ]] || { echo "one_node_slurm: slurm-wlm and munge are missing, and only root can install them" >&2; exit 1; }
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge; } >&2
}

configure() {
    local host slots=${MPI_TASKS:-8}
    host=$(hostname -s)
    [[ -f $dir/munge.key ]] || mungekey --create --keyfile="$dir/munge.key"
    mkdir -p "$dir/state" "$dir/spool"
    # A job that is queued again waits as long as a credential lasts: 120 seconds, if nothing is said.
    # The node announces more processors than the machine may have: tests start more ranks than cores.
    cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$((16000 + $$ % 2000 * 2))
SlurmdPort=$((16001 + $$ % 2000 * 2))
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=20
CryptoType=crypto/munge
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=bf_interval=2,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$slots State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
    install_packages
    if [[ -f $SLURM_CONF ]] && ready; then return 0; fi
    stop
    configure
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munged.log" --seed-file="$dir/munged.seed"
    slurmctld -f "$SLURM_CONF"
    slurmd -f "$SLURM_CONF"
    for _ in {1..60}; do
        if ready; then return 0; fi
        sleep 0.5
    done
    echo "one_node_slurm: the node did not become idle within 30 s; the logs are in $dir" >&2
    tail -n 20 "$dir"/*.log >&2
    exit 1
}

case $action in
start) start && echo "$SLURM_CONF" ;;
stop) stop ;;
*) usage ;;
esac
