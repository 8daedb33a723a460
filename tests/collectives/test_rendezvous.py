"""Who a process is, by the variables of every launcher; what to believe when they disagree; where the ranks meet."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import collectives
from collectives import hosts, meeting, rendezvous, slurm
from collectives.errors import RendezvousError, UnsupportedError
from collectives.launchers import resolve
from collectives.types import RankInfo


def torch_style(rank: int, size: int, local_rank: int | None = None, local_size: int | None = None) -> dict[str, str]:
    local = {"LOCAL_RANK": rank if local_rank is None else local_rank, "LOCAL_WORLD_SIZE": local_size or size}
    return {name: str(value) for name, value in {"RANK": rank, "WORLD_SIZE": size, **local}.items()}


def launch(rank: int, size: int) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321"}
    fd = {"COLLECTIVES_STORE_FD": "7"} if rank == 0 else {}
    return {"COLLECTIVES_LAUNCH": "1", **torch_style(rank, size), **place, **fd}


def torchrun(rank: int, size: int, restart: int = 0) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **torch_style(rank, size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29400",
    }


def openmpi(rank: int, size: int, local_rank: int | None = None, local_size: int | None = None) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size or size),
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-host-1@1",
    }


def mvapich2(rank: int, size: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"MV2_COMM_WORLD_{name}": str(value) for name, value in names.items()} | pmi(rank, size)


def pmi(rank: int, size: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size)}


def hydra(rank: int, size: int) -> dict[str, str]:
    return pmi(rank, size) | {"MPI_LOCALRANKID": str(rank % 2), "MPI_LOCALNRANKS": str(min(2, size))}


def cray(rank: int, size: int) -> dict[str, str]:
    return pmi(rank, size) | {"PMI_LOCAL_RANK": str(rank % 4), "PMI_LOCAL_SIZE": "4"}


def step(
    rank: int,
    size: int,
    *,
    nodes: int = 1,
    nodelist: str = "n1",
    counts: str | None = None,
    job: int = 42,
    step: int = 3,
) -> dict[str, str]:
    here = size // nodes
    values: dict[str, Any] = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": step,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank % here,
        "SLURM_NODEID": rank // here,
        "SLURM_NTASKS": size,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_TASKS_PER_NODE": counts or (f"{here}(x{nodes})" if nodes > 1 else here),
    }
    return {name: str(value) for name, value in values.items()}


BATCH_SCRIPT = {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
INTERACTIVE_STEP = BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}

# environment -> rank, world_size, local_rank, local_world_size, node, launcher
IDENTITIES: dict[str, tuple[Mapping[str, str], tuple[int, int, int, int, int, str]]] = {
    "nothing": ({}, (0, 1, 0, 1, 0, "single")),
    "empty values": ({"RANK": "", "WORLD_SIZE": " "}, (0, 1, 0, 1, 0, "single")),
    "stray WORLD_SIZE=1": ({"WORLD_SIZE": "1"}, (0, 1, 0, 1, 0, "single")),
    "launch": (launch(1, 3), (1, 3, 1, 3, 0, "launch")),
    "torchrun": (torchrun(2, 4), (2, 4, 2, 4, 0, "torchrun")),
    "torchrun on a second host": (
        torchrun(2, 4) | torch_style(2, 4, 0, 2) | {"GROUP_RANK": "1", "MASTER_ADDR": "n1"},
        (2, 4, 0, 2, 1, "torchrun"),
    ),
    "openmpi": (openmpi(1, 2), (1, 2, 1, 2, 0, "openmpi")),
    "openmpi on a second host": (openmpi(3, 4, 1, 2), (3, 4, 1, 2, 1, "openmpi")),
    "mvapich2": (mvapich2(1, 2), (1, 2, 1, 2, 0, "mvapich2")),
    "hydra": (hydra(3, 4), (3, 4, 1, 2, 1, "pmi")),
    "cray pmi": (cray(5, 8), (5, 8, 1, 4, 1, "pmi")),
    "bare pmi": (pmi(1, 2), (1, 2, 1, 2, 0, "pmi")),
    "pmi2 in a step": (pmi(3, 4) | step(3, 4, nodes=2, nodelist="n[1-2]"), (3, 4, 1, 2, 1, "pmi")),
    "pals with pmi": (
        cray(5, 8) | {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_NODEID": "1"},
        (5, 8, 1, 4, 1, "pmi"),
    ),
    "pmix in a step": ({"PMIX_RANK": "1"} | step(1, 2), (1, 2, 1, 2, 0, "pmix")),
    "slurm": (step(1, 2), (1, 2, 1, 2, 0, "slurm")),
    "slurm, two hosts": (step(2, 4, nodes=2, nodelist="n[1-2]"), (2, 4, 0, 2, 1, "slurm")),
    "slurm, uneven": (
        step(2, 3, nodelist="n[1-2]", counts="2,1") | {"SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
        (2, 3, 0, 1, 1, "slurm"),
    ),
    "slurm without a step id": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
        (0, 2, 0, 2, 0, "slurm"),
    ),
    "slurm batch script": (BATCH_SCRIPT, (0, 1, 0, 1, 0, "single")),
    "slurm interactive shell": (INTERACTIVE_STEP, (0, 1, 0, 1, 0, "single")),
    "plain": ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, 2, 0, "environment")),
    "plain, another host": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "9"},
        (1, 2, 0, 1, 1, "environment"),
    ),
    # One launcher inside another.
    "torchrun in mpirun": (openmpi(0, 2) | torchrun(3, 4), (3, 4, 3, 4, 0, "torchrun")),
    "torchrun in a step": (step(1, 2, nodes=2, nodelist="n[1-2]") | torchrun(3, 4), (3, 4, 3, 4, 0, "torchrun")),
    "launch in mpirun": (openmpi(1, 2) | launch(0, 4), (0, 4, 0, 4, 0, "launch")),
    "torchrun in launch": (launch(0, 2) | torchrun(1, 4), (1, 4, 1, 4, 0, "torchrun")),
    "mpirun in a batch script": (BATCH_SCRIPT | openmpi(3, 4), (3, 4, 3, 4, 0, "openmpi")),
    "mpirun over hosts of a step": (
        step(1, 2, nodes=2, nodelist="n[1-2]") | openmpi(3, 4, 1, 2),
        (3, 4, 1, 2, 1, "openmpi"),
    ),
    "mpirun in a shell of srun": (step(0, 1) | pmi(0, 1) | openmpi(1, 2), (1, 2, 1, 2, 0, "openmpi")),
    "openmpi over stale plain": (openmpi(1, 2) | {"RANK": "0", "WORLD_SIZE": "1"}, (1, 2, 1, 2, 0, "openmpi")),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity(name: str) -> None:
    environ, expected = IDENTITIES[name]
    info = resolve(environ)
    found = (info.rank, info.world_size, info.local_rank, info.local_world_size, info.node, info.launcher)
    assert found == expected
    assert all(environ.get(variable) == value for variable, value in info.variables.items())


@pytest.mark.parametrize("make", [launch, torchrun, openmpi, mvapich2, hydra, pmi, step])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_is_itself(make: Callable[[int, int], dict[str, str]], size: int) -> None:
    infos = [resolve(make(rank, size)) for rank in range(size)]
    assert [(info.rank, info.world_size) for info in infos] == [(rank, size) for rank in range(size)]


@pytest.mark.parametrize(
    "stale", [{"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "8"}, {"RANK": "x", "WORLD_SIZE": "1"}]
)
@pytest.mark.parametrize("make", [openmpi, mvapich2, pmi, step])
def test_plain_variables_lose_with_a_warning(make: Any, stale: dict[str, str]) -> None:
    info = resolve(make(1, 2) | stale)
    assert (info.rank, info.world_size) == (1, 2)
    [warning] = info.warnings
    assert "ignored" in warning
    assert all(f"{name}={value}" in warning for name, value in stale.items())


def test_plain_variables_that_agree_are_no_matter() -> None:
    assert resolve(openmpi(1, 2) | {"RANK": "1", "WORLD_SIZE": "2"}).warnings == ()


def test_a_batch_script_is_told_to_use_srun() -> None:
    [warning] = resolve(BATCH_SCRIPT).warnings
    assert "srun" in warning


CONTRADICTIONS = {
    ("openmpi", "slurm"): openmpi(1, 2) | step(0, 4),
    ("openmpi", "pmi"): openmpi(1, 2) | pmi(0, 2),
    ("openmpi", "mvapich2"): openmpi(1, 2) | {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "3"},
    ("pmi", "slurm"): pmi(1, 2) | step(1, 3),
    ("pmi", "pmix"): pmi(1, 2) | {"PMIX_RANK": "0"},
}


@pytest.mark.parametrize("pair", CONTRADICTIONS)
def test_launchers_that_contradict_are_both_named(pair: tuple[str, str]) -> None:
    with pytest.raises(RendezvousError, match="contradict") as caught:
        resolve(CONTRADICTIONS[pair])
    assert all(name in str(caught.value) for name in pair)


NONSENSE = {
    "size 0": openmpi(0, 2) | {"OMPI_COMM_WORLD_SIZE": "0"},
    "plain size 0": {"RANK": "0", "WORLD_SIZE": "0"},
    "rank beyond": {"RANK": "2", "WORLD_SIZE": "2"},
    "no number": openmpi(0, 2) | {"OMPI_COMM_WORLD_RANK": "zero"},
    "negative": {"RANK": "-1", "WORLD_SIZE": "2"},
    "size missing": {"RANK": "0"},
    "rank missing": {"WORLD_SIZE": "2"},
    "openmpi size missing": {"OMPI_COMM_WORLD_RANK": "0"},
    "local rank beyond": openmpi(1, 4, 3, 2),
    "local size beyond": openmpi(1, 2, 1, 3),
    "port": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"},
    "pmix alone": {"PMIX_RANK": "1"},
    "pals alone": {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
    "step on hosts unknown": {
        name: value for name, value in step(1, 2, nodes=2).items() if name != "SLURM_STEP_NODELIST"
    },
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_raises(name: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        resolve(NONSENSE[name])
    assert any(variable in str(caught.value) for variable in [*NONSENSE[name], "SLURM_STEP_NODELIST"])


@pytest.mark.parametrize("inside", [{}, openmpi(0, 4), torchrun(0, 4), step(0, 4)])
def test_arguments_outrank_every_variable(inside: dict[str, str]) -> None:
    info = resolve(inside, rank=2, world_size=3, local_rank=0, local_world_size=1, master_addr="n7", master_port=99)
    assert info == RankInfo(
        rank=2,
        world_size=3,
        local_rank=0,
        local_world_size=1,
        node=2,
        launcher="arguments",
        variables={"rank": "2", "world_size": "3", "local_rank": "0", "local_world_size": "1"},
        master_addr="n7",
        master_port=99,
    )


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": 0, "world_size": 0}]
)
def test_wrong_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="rank"):
        resolve({}, **wrong)  # type: ignore[arg-type]


def test_mpi_is_asked_only_for_what_the_variables_leave_open() -> None:
    def never() -> tuple[int, int, int, int]:
        raise AssertionError("asked")

    for environ in (openmpi(1, 2), hydra(1, 2), pmi(1, 2) | step(1, 2), launch(0, 2), step(0, 2), {}):
        resolve(environ, mpi_world=never)
    info = resolve({"PMIX_RANK": "3"}, mpi_world=lambda: (3, 4, 1, 2))
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (3, 4, 1, 2)
    assert info.launcher == "pmix"
    assert resolve(pmi(1, 2), mpi_world=lambda: None).local_world_size == 2
    assert resolve(pmi(1, 2), mpi_world=lambda: (0, 1, 0, 1)).world_size == 2  # an MPI that does not speak this PMI
    with pytest.raises(RendezvousError, match="MPI's world says rank 0 of 1"):
        resolve({"PMIX_RANK": "1"}, mpi_world=lambda: (0, 1, 0, 1))


def test_which_launchers_start_mpi_worlds() -> None:
    mpi = {name: resolve(environ).mpi for name, (environ, _) in IDENTITIES.items()}
    assert mpi["openmpi"]
    assert mpi["hydra"]
    assert mpi["pmix in a step"]
    assert not any(mpi[name] for name in ("nothing", "launch", "torchrun", "torchrun in mpirun", "slurm", "plain"))


def test_store_of_launch_belongs_to_rank_0() -> None:
    assert [resolve(launch(rank, 2)).store_fd for rank in range(2)] == [7, None]
    info = resolve(launch(1, 2))
    assert (info.master_addr, info.master_port) == ("127.0.0.1", 4321)


def test_torchrun_serves_the_store_and_tells_restarts_apart() -> None:
    infos = [resolve(torchrun(1, 2, restart=n)) for n in (0, 1)]
    assert all(info.agent_store for info in infos)
    assert [info.job for info in infos] == ["run/0", "run/1"]
    own = resolve(torchrun(1, 2) | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not own.agent_store


# Slurm


def test_a_step_meets_on_its_first_host() -> None:
    several = resolve(step(3, 4, nodes=2, nodelist="gpu[08-09]"))
    assert several.master_addr == "gpu08"
    assert resolve(step(0, 2)).master_addr == "127.0.0.1"
    overridden = resolve(step(3, 4, nodes=2) | {"MASTER_ADDR": "n9", "MASTER_PORT": "1234"})
    assert (overridden.master_addr, overridden.master_port) == ("n9", 1234)


def test_ports_of_a_step_follow_from_its_numbers() -> None:
    ports = {
        (job, number): resolve(step(0, 2, job=job, step=number)).master_port for job in range(5) for number in range(5)
    }
    assert len(set(ports.values())) == len(ports)
    assert ports[4, 2] == resolve(step(1, 2, job=4, step=2)).master_port
    assert all(1024 < slurm.step_port(job, 0) < 32768 for job in (0, 1, 10**6, 2**31))


NODELISTS = {
    "n1": ["n1"],
    "a,b": ["a", "b"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[08-11]": ["n08", "n09", "n10", "n11"],
    "n[1,3-4,007]": ["n1", "n3", "n4", "n007"],
    "a[1-2],b,c[5]": ["a1", "a2", "b", "c5"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "rack-3-node[9-10],login": ["rack-3-node9", "rack-3-node10", "login"],
    "": [],
}


@pytest.mark.parametrize("text", NODELISTS)
def test_node_lists(text: str) -> None:
    assert slurm.expand_nodelist(text) == NODELISTS[text]


@pytest.mark.parametrize("text", ["n[1-2", "n1-2]", "n[[1]]", "n[2-1]", "n[a-b]", "n[]", "n[1-]"])
def test_bad_node_lists(text: str) -> None:
    with pytest.raises(RendezvousError, match="node list"):
        slurm.expand_nodelist(text)


def test_task_counts() -> None:
    assert slurm.expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert slurm.expand_counts("4") == [4]
    with pytest.raises(RendezvousError, match="tasks per node"):
        slurm.expand_counts("2(y3)")


# What init decides


def test_default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch.cuda.is_available() or rendezvous.plan({}).backend == "nccl"
    cpu = {"device": "cpu"}
    assert rendezvous.plan({}, **cpu).backend == "gloo"
    assert rendezvous.plan(torchrun(0, 2), **cpu).backend == "shm+gloo"
    assert rendezvous.plan({"COLLECTIVES_BACKEND": "ring+gloo"}, **cpu).stack == (("ring",), "gloo")
    assert rendezvous.plan({"COLLECTIVES_BACKEND": "mpi"}, "gloo", **cpu).backend == "gloo"

    monkeypatch.setattr(rendezvous, "load_mpi", lambda environ: FakeMpi((1, 2, 1, 2)))
    chosen = rendezvous.plan(openmpi(1, 2), **cpu)
    assert (chosen.backend, chosen.info.rank) == ("shm+mpi", 1)

    def missing(environ: Mapping[str, str]) -> Any:
        raise UnsupportedError("no libmpi")

    monkeypatch.setattr(rendezvous, "load_mpi", missing)
    chosen = rendezvous.plan(openmpi(1, 2), **cpu)
    assert chosen.backend == "shm+gloo"
    assert "no libmpi" in chosen.why
    with pytest.raises(UnsupportedError, match="no libmpi"):
        rendezvous.plan(openmpi(1, 2), "mpi", **cpu)


class FakeMpi:
    def __init__(self, world: tuple[int, int, int, int]) -> None:
        self.world = world

    def mpi_world(self) -> tuple[int, int, int, int]:
        return self.world

    def library_version(self) -> tuple[str, str]:
        return "/lib/libmpi.so.40", "Open MPI v5"


def test_an_mpi_world_of_one_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "load_mpi", lambda environ: FakeMpi((0, 1, 0, 1)))
    for environ in (step(1, 2), launch(1, 2), openmpi(1, 2), pmi(1, 2)):
        with pytest.raises(RendezvousError, match=r"of 2 .* world has rank 0 of 1.*libmpi.*mpirun.*srun"):
            rendezvous.plan(environ, "mpi")
    assert rendezvous.plan({}, "mpi").info.world_size == 1
    monkeypatch.setattr(rendezvous, "load_mpi", lambda environ: FakeMpi((2, 4, 0, 2)))
    info = rendezvous.plan({}, "ring+mpi").info  # a launcher nobody has heard of
    assert (info.rank, info.world_size, info.local_rank, info.node, info.launcher) == (2, 4, 0, 1, "mpi")


@pytest.mark.parametrize("name", ["nope", "ring+nope", "nope+gloo", "", "gloo+ring"])
def test_unknown_backend_lists_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown backend.*gloo.*mpi"):
        rendezvous.plan({}, name)
    with pytest.raises(ValueError, match=r"unknown backend.*gloo.*mpi"):
        collectives.init(name)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = [str(rendezvous.plan(torchrun(rank, 4), "nccl").device) for rank in range(4)]
    assert devices == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert str(rendezvous.plan(torchrun(3, 4), "gloo").device) == "cpu"
    assert str(rendezvous.plan(torchrun(3, 4), "gloo", device="cuda").device) == "cuda:1"
    assert str(rendezvous.plan(torchrun(3, 4), "nccl", device="cuda:0").device) == "cuda:0"
    assert rendezvous.plan(torchrun(3, 4)).backend == "nccl"
    with pytest.raises(ValueError, match=r"cuda:2.*2 CUDA devices"):
        rendezvous.plan({}, "gloo", device="cuda:2")
    with pytest.raises(ValueError, match="nccl moves CUDA tensors"):
        rendezvous.plan({}, "nccl", device="cpu")


def test_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend, device in (("nccl", None), ("gloo", "cuda"), ("gloo", "cuda:0")):
        with pytest.raises(UnsupportedError, match=r"none is visible.*gloo"):
            rendezvous.plan({}, backend, device=device)


class MemoryStore(dict[str, bytes]):
    """A store that already knows what the other ranks wrote."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


def test_ranks_that_share_a_device_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(device: torch.device) -> Any:
        return type("Properties", (), {"uuid": "GPU-a"})()

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    host = socket.gethostname()
    info, device = resolve(torchrun(0, 2)), torch.device("cuda:0")
    meeting.require_own_devices(MemoryStore({"device/1": f"{host} GPU-b".encode()}), info, device)
    with pytest.raises(UnsupportedError, match=r"ranks 0 and 1 share one CUDA device.*gloo"):
        meeting.require_own_devices(MemoryStore({"device/1": f"{host} GPU-a".encode()}), info, device)


def test_more_ranks_than_cores_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    many = hosts.host_cores() + 1
    for rank in range(many):
        rendezvous._warn(resolve(openmpi(rank, many)))
    [record] = caplog.records
    assert f"{many} ranks share" in record.message
    caplog.clear()
    rendezvous._warn(resolve(openmpi(0, 1)))
    assert caplog.records == []


def test_arguments_of_init() -> None:
    with pytest.raises(ValueError, match="positive seconds"):
        collectives.init("gloo", timeout=0)
    with pytest.raises(ValueError, match="positive seconds"):
        collectives.init("gloo", setup_timeout=-1)


# Where ranks meet


def test_one_rank_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*torch_style(0, 1), "MASTER_ADDR", "MASTER_PORT", "COLLECTIVES_LAUNCH", "COLLECTIVES_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        with collectives.init("ring+gloo", device="cpu") as comm:
            tensor = torch.arange(3.0)
            comm.all_reduce(tensor)
            assert tensor.tolist() == [0, 1, 2]
            assert (comm.rank, comm.world_size, comm.local_rank, comm.node) == (0, 1, 0, 0)


def test_nowhere_to_meet() -> None:
    with pytest.raises(RendezvousError, match="MASTER_ADDR is not set and MASTER_PORT is not set"):
        collectives.init("gloo", rank=0, world_size=2, setup_timeout=5)


def test_loopback_between_hosts_raises() -> None:
    info = RankInfo(rank=1, world_size=4, local_rank=1, local_world_size=2, master_addr="127.0.1.1", master_port=9)
    with pytest.raises(RendezvousError, match=r"127\.0\.1\.1 is a loopback"):
        meeting.meet(info, {}, 1.0, fixed=False)
    with pytest.raises(RendezvousError, match="etc/hosts"):
        meeting.address_between_hosts(info, {}, lambda: "localhost")


def test_the_interface_that_routes_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    info = RankInfo(rank=1, world_size=4, local_rank=1, local_world_size=2)
    monkeypatch.setattr(hosts, "routed_address", lambda target: {"10.1.0.1": "10.1.0.2"}[target])
    assert meeting.address_between_hosts(info, {}, lambda: "10.1.0.1") == "10.1.0.2"
    assert hosts.interface_address("lo") == "127.0.0.1"
    assert hosts.interface_name("127.0.0.1") == "lo"
    assert meeting.address_between_hosts(info, {"GLOO_SOCKET_IFNAME": "lo"}, lambda: "10.1.0.1") == "127.0.0.1"
    with pytest.raises(RendezvousError, match=r"no interface 'nope0'.*lo"):
        hosts.interface_address("nope0")
    with pytest.raises(RendezvousError, match=r"cannot be resolved.*MASTER_ADDR"):
        hosts.resolve_host("no-such-host.invalid")


def test_a_busy_port_is_named_at_once() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"127\.0\.0\.1:{port}.*choose another port"):
            collectives.init("gloo", rank=0, world_size=2, master_addr="127.0.0.1", master_port=port, setup_timeout=60)


def test_an_absent_rank_0_is_named() -> None:
    with socket.socket() as holder:  # bound, so that nobody else listens there
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"127\.0\.0\.1:{port}.*rank 0"):
            collectives.init("gloo", rank=1, world_size=2, master_addr="127.0.0.1", master_port=port, setup_timeout=1)


def test_cgroup_quota(tmp_path: Any) -> None:
    assert hosts.cgroup_cores(tmp_path) == float("inf")
    for text, cores in (("max 100000", float("inf")), ("150000 100000", 1.5), ("20000 100000", 1.0)):
        (tmp_path / "cpu.max").write_text(text)
        assert hosts.cgroup_cores(tmp_path) == cores
    assert 1 <= hosts.allowed_cores() <= hosts.host_cores()
