"""Launchers: what each tells its processes, and which to believe where several speak.

[Note: which launcher counts]
A process may carry variables of several launchers: a Slurm step that runs mpirun, an mpirun that runs torchrun, a
shell that still exports RANK from an earlier run. The innermost launcher is right, and the order of ``LAUNCHERS`` is
from inner to outer. torchrun and this project's own launcher start worlds of their own inside anything, so they win
silently. Two of the others that disagree are a mistake nobody can resolve by guessing, with one exception: process
managers (mpirun across Slurm nodes) start their daemons as a step of one task per node, and the ranks inherit the
variables of that step. Plain RANK and WORLD_SIZE lose against any launcher, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from collectives import slurm
from collectives.errors import RendezvousError
from collectives.hosts import is_loopback
from collectives.types import RankInfo

MpiWorld = Callable[[], "tuple[int, int, int, int] | None"]


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher; of several names the first that is set counts.

    ``marker`` must be set for the launcher to count at all (where its rank variable is not telling enough). ``mpi``
    says that the processes it starts form an MPI world, ``nested`` that it may run inside any other.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    marker: tuple[str, ...] = ()
    mpi: bool = False
    nested: bool = False


def _torch_style(name: str, *marker: str) -> Launcher:
    return Launcher(
        name,
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node=("GROUP_RANK",),
        marker=marker,
        nested=bool(marker),
    )


SLURM = Launcher(
    "slurm",
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
    node=("SLURM_NODEID",),
)

LAUNCHERS = (
    _torch_style("torchrun", "TORCHELASTIC_RUN_ID"),
    _torch_style("launch", "COLLECTIVES_LAUNCH"),
    Launcher(
        "openmpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        mpi=True,
    ),
    Launcher(
        "mvapich2",
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        mpi=True,
    ),
    Launcher(
        "pmi",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK", "MPI_LOCALRANKID"),  # Cray, Hydra
        local_size=("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        mpi=True,
    ),
    Launcher(
        "pals",
        rank=("PALS_RANKID",),
        size=(),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE",),
        node=("PALS_NODEID",),
        mpi=True,
    ),
    Launcher("pmix", rank=("PMIX_RANK",), size=(), mpi=True),
    SLURM,
)
PLAIN = _torch_style("environment")
_PARTS = ("rank", "size", "local_rank", "local_size", "node")


@dataclass(frozen=True)
class _Claim:
    """What one launcher's variables say; None where they do not."""

    launcher: Launcher
    used: Mapping[str, str]
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    node: int | None

    def contradicts(self, other: _Claim) -> bool:
        pairs = ((self.rank, other.rank), (self.size, other.size))
        return any(mine is not None and theirs is not None and mine != theirs for mine, theirs in pairs)

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.used.items())
        return f"{self.launcher.name} ({values})"


def resolve(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    mpi_world: MpiWorld | None = None,
) -> RankInfo:
    """Who this process is, from arguments and variables alone: nothing is opened, looked up or started.

    Args:
        environ: the environment; empty values count as unset.
        rank, world_size: given together they outrank every variable.
        local_rank, local_world_size: the same among the ranks of this host.
        master_addr, master_port: where rank 0 keeps the store; they outrank MASTER_ADDR and MASTER_PORT.
        mpi_world: asks MPI for (rank, size, local rank, local size), None where there is no MPI; called only where a
            launcher of MPI jobs leaves one of them open in its variables.

    Raises:
        RendezvousError: values that are no numbers, incomplete or out of range; two launchers that contradict.
        ValueError: arguments that do so.
    """
    environ = {name: value for name, value in environ.items() if value.strip()}
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together; found rank={rank}, world_size={world_size}")
    claim: _Claim | None
    warnings: list[str] = []
    if rank is not None and world_size is not None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"expected world_size >= 1 and 0 <= rank < world_size, found {rank} of {world_size}")
        claim = _claim_of_arguments(rank, world_size, local_rank, local_world_size)
    else:
        claim, warnings = _choose(environ)
    if claim is None:
        return RankInfo(master_addr=master_addr, master_port=master_port, warnings=tuple(warnings))
    claim = _complete(claim, environ, mpi_world)
    addr = master_addr or environ.get("MASTER_ADDR")
    port = master_port if master_port is not None else _number(environ, "MASTER_PORT")
    info = _rank_info(claim, addr, warnings)
    info = replace(info, master_addr=addr, master_port=port)
    match claim.launcher.name:
        case "torchrun":
            agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
            restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            return replace(info, agent_store=agent, job=f"{environ['TORCHELASTIC_RUN_ID']}/{restart}")
        case "launch":
            fd = _number(environ, "COLLECTIVES_STORE_FD") if info.rank == 0 else None
            return replace(info, store_fd=fd)
        case "slurm":
            return _with_step_address(info, environ)
        case _ if info.mpi and (step := _read(SLURM, environ)) is not None and not step.contradicts(claim):
            return _with_step_address(info, environ)  # should MPI not load
        case _:
            return info


def _claim_of_arguments(rank: int, size: int, local_rank: int | None, local_size: int | None) -> _Claim:
    used = {"rank": rank, "world_size": size, "local_rank": local_rank, "local_world_size": local_size}
    given = {name: str(value) for name, value in used.items() if value is not None}
    return _Claim(Launcher("arguments", (), ()), given, rank, size, local_rank, local_size, None)


def _choose(environ: Mapping[str, str]) -> tuple[_Claim | None, list[str]]:
    """The claim that counts, see [Note: which launcher counts], and warnings about those that lose."""
    claims = [claim for launcher in LAUNCHERS if (claim := _read(launcher, environ)) is not None]
    plain = _read(PLAIN, environ)
    if not claims:
        if plain is None or (plain.rank is None and plain.size == 1):  # which says the same as nothing
            return None, slurm.batch_script_warning(environ)
        return _checked(plain, environ), []
    chosen = _checked(claims[0], environ)
    if chosen.launcher.nested:
        return chosen, []
    daemons = next((c for c in claims if c.launcher is SLURM and slurm.one_task_per_node(environ)), None)
    for other in claims[1:]:
        inherited = daemons is not None and not other.contradicts(daemons)
        if chosen.contradicts(other) and not inherited:
            raise RendezvousError(
                f"two launchers contradict each other: {chosen} and {other}; unset the variables of the one that did "
                "not start this process, or pass rank and world_size to init()"
            )
    if plain is not None and plain.contradicts(chosen):
        return chosen, [f"{plain} is ignored, because {chosen} started this process"]
    return chosen, []


def _read(launcher: Launcher, environ: Mapping[str, str]) -> _Claim | None:
    """What ``launcher`` says, or None where it did not start this process. Values that make no sense count as none."""
    if launcher.marker and not any(name in environ for name in launcher.marker):
        return None
    if not any(name in environ for name in (*launcher.rank, *launcher.size)):
        return None
    if launcher is SLURM and not slurm.in_step(environ):
        return None
    names = {part: next((n for n in getattr(launcher, part) if n in environ), None) for part in _PARTS}
    read = [name for name in (*launcher.marker, *names.values()) if name is not None]
    used = {name: environ[name] for name in read}
    values = {part: int(used[name]) if name and used[name].isdigit() else None for part, name in names.items()}
    return _Claim(launcher, used, **values)


def _checked(claim: _Claim, environ: Mapping[str, str]) -> _Claim:
    """The claim, or ``RendezvousError`` where its variables are incomplete or make no sense."""
    launcher = claim.launcher
    for name in claim.used:
        if name not in launcher.marker:
            _number(environ, name)
    if claim.rank is None or (claim.size is None and launcher.size):
        missing = (launcher.rank if claim.rank is None else launcher.size)[0]
        raise RendezvousError(f"{claim} lacks {missing}: set both, or neither")
    if claim.size is not None and not 0 <= claim.rank < claim.size:
        raise RendezvousError(f"{claim} makes no sense: expected a size of 1 or more and 0 <= rank < size")
    return claim


def _complete(claim: _Claim, environ: Mapping[str, str], mpi_world: MpiWorld | None) -> _Claim:
    """Fill in what the chosen launcher leaves open: from a Slurm step that agrees with it, then from MPI itself."""
    step = _read(SLURM, environ)
    if step is not None and step.size is not None and not claim.launcher.nested and not step.contradicts(claim):
        here = slurm.tasks_here(environ, step.node or 0, step.size)
        found = {"size": step.size, "local_rank": step.local_rank, "local_size": here, "node": step.node}
        missing: dict[str, Any] = {part: value for part, value in found.items() if getattr(claim, part) is None}
        if missing:
            claim = replace(claim, used={**claim.used, **step.used}, **missing)
    if claim.launcher.mpi and None in (claim.size, claim.local_rank, claim.local_size):
        world = mpi_world() if mpi_world is not None else None
        if world is not None and world[0] == claim.rank and claim.size in (None, world[1]):
            _, size, local_rank, local_size = world
            told = {"MPI_COMM_WORLD": f"rank {claim.rank} of {size}, {local_rank} of {local_size} on this host"}
            return replace(claim, used={**claim.used, **told}, size=size, local_rank=local_rank, local_size=local_size)
        if claim.size is None:
            raise RendezvousError(
                f"{claim} gives a rank but no world size, and "
                + (f"MPI's world says rank {world[0]} of {world[1]}" if world else "there is no MPI to ask for it")
                + ": install mpi4py for this site's MPI, or pass rank and world_size to init()"
            )
    return claim


def _rank_info(claim: _Claim, addr: str | None, warnings: list[str]) -> RankInfo:
    """Settle what nobody said, and check that it fits together."""
    rank, size = claim.rank or 0, claim.size or 1
    local_rank, local_size = claim.local_rank, claim.local_size
    if local_size is None:
        # Rank 0 on a loopback address (or none given) can only be met by ranks of its own host. Otherwise assume the
        # fewest, so that no loopback address is handed to another host.
        one_host = claim.launcher.mpi or claim.launcher.name == "launch" or addr is None or is_loopback(addr)
        local_size = size if one_host else (local_rank or 0) + 1
    if local_rank is None:
        local_rank = rank % local_size
    if not 0 <= local_rank < local_size <= size:
        raise RendezvousError(
            f"{claim} makes no sense: expected 0 <= local rank < local size <= size, "
            f"found local rank {local_rank} of {local_size} in a world of {size}"
        )
    return RankInfo(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node=claim.node if claim.node is not None else rank // local_size,
        launcher=claim.launcher.name,
        variables=dict(claim.used),
        mpi=claim.launcher.mpi or "PMIX_RANK" in claim.used,
        warnings=tuple(warnings),
    )


def _with_step_address(info: RankInfo, environ: Mapping[str, str]) -> RankInfo:
    """Rank 0 of a step is on its first host; the port follows from job and step, alike on all ranks."""
    job = _number(environ, "SLURM_JOB_ID", "SLURM_JOBID") or 0
    step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID") or 0
    addr, port, used = info.master_addr, info.master_port, dict(info.variables)
    if addr is None and info.local_world_size == info.world_size:
        addr = "127.0.0.1"
    elif addr is None:
        addr = slurm.first_host(environ)
    else:
        used["MASTER_ADDR"] = addr
    if port is None:
        port = slurm.step_port(job, step)
    else:
        used["MASTER_PORT"] = str(port)
    return replace(info, master_addr=addr, master_port=port, variables=used, job=f"{job}.{step}")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of ``names`` that is set, as a number."""
    for name in names:
        if name in environ:
            text = environ[name].strip()
            if not text.isdigit():
                raise RendezvousError(f"{name}={environ[name]!r}: expected a whole number, 0 or more")
            return int(text)
    return None
