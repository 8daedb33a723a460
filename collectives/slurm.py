"""Slurm's variables: its compressed lists, its steps, and where rank 0 of a step is."""

from __future__ import annotations

from collections.abc import Mapping

from collectives.errors import RendezvousError

SPECIAL_STEP = 0xFFFFFFF0  # from here on: batch script, interactive shell, extern (slurm.h); none of them has ranks
FIRST_PORT, PORTS = 20000, 12000  # below the ports that Linux hands out by itself, 32768 on


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether these are the variables of a task that srun started.

    The script of a batch job has SLURM_PROCID=0 and SLURM_NTASKS too, whatever the number of tasks, but no step.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if step is not None:
        return step.isdigit() and int(step) < SPECIAL_STEP
    return "SLURM_JOB_ID" not in environ or environ.get("SLURM_PROCID", "0") != "0"


def batch_script_warning(environ: Mapping[str, str]) -> list[str]:
    """What to say to a program that runs once in a job of several tasks."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if in_step(environ) or "SLURM_PROCID" not in environ or tasks == "1":
        return []
    return [f"this is the script of a Slurm job with {tasks} tasks, not one of them: start the program with srun"]


def one_task_per_node(environ: Mapping[str, str]) -> bool:
    """Whether the step may be one of daemons, which mpirun starts on each host of a job."""
    nodes = environ.get("SLURM_STEP_NUM_NODES")
    return nodes is not None and nodes == environ.get("SLURM_STEP_NUM_TASKS")


def tasks_here(environ: Mapping[str, str], node: int, size: int) -> int:
    """How many of the step's ``size`` tasks run on its host number ``node``."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if tasks:
        counts = expand_counts(tasks)
        if node < len(counts):
            return counts[node]
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    return -(-size // max(1, int(nodes))) if nodes.isdigit() else size


def first_host(environ: Mapping[str, str]) -> str:
    """The host of rank 0. Raises ``RendezvousError`` where no node list tells it."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if name in environ and (hosts := expand_nodelist(environ[name])):
            return hosts[0]
    raise RendezvousError(
        "a Slurm step on several hosts without SLURM_STEP_NODELIST; set MASTER_ADDR to the host of rank 0"
    )


def step_port(job: int, step: int) -> int:
    """A port that all ranks of a step agree on, and that steps and jobs nearby do not share."""
    return FIRST_PORT + (job * 16 + step) % PORTS


def expand_nodelist(text: str) -> list[str]:
    """The host names of a Slurm node list, in its order: "a[1-2],b" is a1, a2, b.

    Groups may have several brackets, ranges may be padded with zeros ("n[08-10]") and text may follow a bracket.
    Format: Slurm's "hostlist expressions". Raises ``RendezvousError`` where brackets or ranges make no sense.
    """
    hosts: list[str] = []
    depth, start = 0, 0
    for i, character in enumerate(text + ","):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise RendezvousError(f"node list {text!r}: the brackets do not match")
        if character == "," and depth == 0:
            hosts += _expand_group(text[start:i].strip(), text)
            start = i + 1
    if depth:
        raise RendezvousError(f"node list {text!r}: the brackets do not match")
    return [host for host in hosts if host]


def _expand_group(group: str, text: str) -> list[str]:
    prefix, bracket, rest = group.partition("[")
    if not bracket:
        return [group]
    body, _, tail = rest.partition("]")
    tails = _expand_group(tail, text)
    numbers: list[str] = []
    for item in body.split(","):
        first, dash, last = item.partition("-")
        if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last))):
            raise RendezvousError(f"node list {text!r}: expected a number or a range in brackets, found {item!r}")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [prefix + number + end for number in numbers for end in tails]


def expand_counts(text: str) -> list[int]:
    """Tasks on each node from Slurm's short form: "2(x3),1" is 2, 2, 2, 1."""
    counts: list[int] = []
    for item in text.split(","):
        count, _, times = item.strip().partition("(x")
        repeat = times.removesuffix(")") or "1"
        if not (count.isdigit() and repeat.isdigit()):
            raise RendezvousError(f"tasks per node {text!r}: expected items like 2 or 2(x3), found {item!r}")
        counts += [int(count)] * int(repeat)
    return counts
