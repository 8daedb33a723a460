"""Checkpoints: what one set of ranks saves, any other loads, and training goes on as if nothing had happened."""

from __future__ import annotations

import ctypes
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fsdp
from collectives import Communicator
from tests.fsdp.models import OddBlock, OddNet, adamw, difference, filled, full_state, loss_of, sgd, words, wrapped
from tests.ranks import grid, run_ranks

BATCHES = 12  # of a step, over all ranks: a number that 1 to 4 ranks divide
FORMS = ["ddp", 0, 1, 2, 3]
Strategy = str | int


def build(comm: Communicator, strategy: Strategy, optimizer: Any = adamw, seed: int = 0) -> tuple[Any, Any]:
    units = [OddBlock] if strategy == 3 else None
    model = wrapped(filled(OddNet(2), seed), comm, strategy, units)
    return model, optimizer(model.parameters())


def step_of(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step on a global batch that does not depend on the number of ranks."""
    optimizer.zero_grad()
    mine = range(comm.rank * BATCHES // comm.world_size, (comm.rank + 1) * BATCHES // comm.world_size)
    batch = torch.cat([words(part, step, rows=1) for part in mine])
    loss_of(model, batch).backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    state = full_state(model)
    for index, values in fsdp.full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"].items():
        state.update({f"{index}.{key}": value for key, value in values.items() if isinstance(value, torch.Tensor)})
    return state


def train_and_save(comm: Communicator, strategy: Strategy, path: str, steps: int, more: int, opt: Any = adamw) -> Any:
    model, optimizer = build(comm, strategy, opt)
    for step in range(steps):
        step_of(comm, model, optimizer, step)
    fsdp.save(path, model, optimizer, step=steps)
    for step in range(steps, steps + more):
        step_of(comm, model, optimizer, step)
    return state_of(model, optimizer, comm)


def load_and_train(comm: Communicator, strategy: Strategy, path: str, steps: int, more: int, opt: Any = adamw) -> Any:
    model, optimizer = build(comm, strategy, opt, seed=5)
    extra = fsdp.load(path, model, optimizer)
    assert (extra.step, extra.missing, extra.unexpected, dict(extra)) == (steps, [], [], {})
    for step in range(steps, steps + more):
        step_of(comm, model, optimizer, step)
    return state_of(model, optimizer, comm)


PLAIN = [((3, 3), (1, 0)), ((2, "ddp"), (3, 3)), ((1, 3), (2, 2)), ((3, 1), (2, 3))]
SAVED = [(4, 3), (2, "ddp"), (1, 2), (3, 1)]
LOADED = [(1, 0), (3, 3), (2, 2), (4, 1)]
EVERY = list(itertools.product([1, 2, 3, 4], FORMS))


def tier(saved: tuple[int, Strategy], loaded: tuple[int, Strategy]) -> Any:
    if (saved, loaded) in PLAIN:
        return ()
    return pytest.mark.full if saved in SAVED and loaded in LOADED else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(a, b, marks=tier(a, b), id=f"{a}-to-{b}") for a, b in itertools.product(EVERY, EVERY)],
)
def test_any_world_size_and_stage_to_any_other(saved: Any, loaded: Any, tmp_path: Path) -> None:
    expected = run_ranks(train_and_save, saved[1], str(tmp_path), 2, 2, world_size=saved[0])[0]
    for state in run_ranks(load_and_train, loaded[1], str(tmp_path), 2, 2, world_size=loaded[0]):
        assert difference(state, expected) < 1e-10


@pytest.mark.parametrize(
    ("world_size", "strategy", "optimizer"),
    [
        (2, 3, adamw),
        (3, 1, sgd),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [(1, 0, sgd), (3, 3, adamw)]),
    ],
)
def test_at_the_same_layout_bit_by_bit(world_size: int, strategy: Strategy, optimizer: Any, tmp_path: Path) -> None:
    expected = run_ranks(train_and_save, strategy, str(tmp_path), 2, 2, optimizer, world_size=world_size)[0]
    for state in run_ranks(load_and_train, strategy, str(tmp_path), 2, 2, optimizer, world_size=world_size):
        assert difference(state, expected) == 0


def test_blocks_and_their_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp.checkpoint import checksum, manifest, tensor_file

    for module in (checksum, manifest, tensor_file):
        monkeypatch.setattr(module, "BLOCK", 100)
    monkeypatch.setattr(tensor_file, "DIRECT", 250)
    expected = run_ranks(train_and_save, 3, str(tmp_path), 1, 1, world_size=3)[0]
    for state in run_ranks(load_and_train, 3, str(tmp_path), 1, 1, world_size=2):
        assert difference(state, expected) < 1e-10


class ThreeShapes(nn.Module):
    """Shapes that leave most of four ranks with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.five, self.grid, self.one = (
            nn.Parameter(torch.ones(5)),
            nn.Parameter(torch.ones(3, 2)),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.grid).sum() + self.five.square().sum() * x.sum()) * self.one


def small(comm: Communicator, path: str, save: bool, stage: int) -> dict[str, torch.Tensor]:
    model = fsdp.fully_shard(filled(ThreeShapes(), 1, torch.float32), comm, stage=stage)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        rows = torch.randn(BATCHES, 3, generator=torch.Generator().manual_seed(number)).chunk(comm.world_size)
        (model(rows[comm.rank]) * comm.world_size / BATCHES).backward()
        optimizer.step()

    if save:
        step(0)
        fsdp.save(path, model, optimizer, step=1)
    else:
        fsdp.load(path, model, optimizer)
    step(1)
    step(2)
    return state_of(model, optimizer, comm)


@pytest.mark.parametrize(
    ("before", "after", "stage"), [(4, 1, 3), (4, 2, 3), (4, 3, 3), (1, 4, 1), (2, 4, 0), (3, 4, 3)]
)
def test_small_shapes_at_another_world_size(before: int, after: int, stage: int, tmp_path: Path) -> None:
    expected = run_ranks(small, str(tmp_path), True, stage, world_size=before)[0]
    for found in run_ranks(small, str(tmp_path), False, 3, world_size=after):
        assert found.keys() == expected.keys()
        assert difference(found, {name: expected[name] for name in found}) < 1e-6


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(2**18, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * x


def save_flat(comm: Communicator, path: str, stage: int) -> None:
    model = fsdp.fully_shard(Flat(), comm, stage=stage)
    fsdp.save(path, model, step=1)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_writes_its_own_bytes_only(stage: int, tmp_path: Path) -> None:
    run_ranks(save_flat, str(tmp_path), stage, world_size=4)
    sizes = [file.stat().st_size for file in tmp_path.glob("step-*/*.safetensors")]
    assert len(sizes) == 4
    assert all(2**18 <= size < 2**18 + 512 for size in sizes)


def frozen_and_fresh(comm: Communicator, path: str, stage: int) -> list[bool]:
    """p0 is trained, then frozen; p1 never stepped; p2 unfrozen later; momentum or none."""
    found = []
    for momentum in (0.9, 0.0):
        model = fsdp.fully_shard(ThreeShapes(), comm, stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        model.five.grad = torch.full_like(model.five, 2.0)  # type: ignore[union-attr]
        optimizer.step()
        model.five.requires_grad_(False)
        fsdp.save(f"{path}/{momentum}", model, optimizer, step=1)
        again = fsdp.fully_shard(ThreeShapes(), comm, stage=stage)
        later = torch.optim.SGD(again.parameters(), lr=0.5, momentum=momentum)
        fsdp.load(f"{path}/{momentum}", again, later)
        assert later.param_groups[0]["lr"] == 0.1
        own = later.state[again.five]
        buffer = own.get("momentum_buffer")
        found.append(bool((buffer == 2.0).all()) if momentum else buffer is None)
        found.append(again.grid not in later.state or later.state[again.grid].get("momentum_buffer") is None)
        some = torch.optim.SGD([again.grid, again.one], lr=0.5, momentum=momentum)
        fsdp.load(f"{path}/{momentum}", again, some)
        found.append(again.five not in some.state)
        again.one.grad = torch.ones_like(again.one)  # type: ignore[union-attr]
        some.step()
    return found


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 3), (2, 0)])
def test_state_of_frozen_and_fresh_parameters(world_size: int, stage: int, tmp_path: Path) -> None:
    for found in run_ranks(frozen_and_fresh, str(tmp_path), stage, world_size=world_size):
        assert all(found)


def everything(rank: int) -> dict[str, Any]:
    return {
        "scheduler": {"last_epoch": 3, "milestones": Counter({2: 1}), "betas": (0.9, 0.95), "lr": float("inf")},
        "nested": [{1: "one", "x": None}, {"$odd": True}, {2, 3}, b"\x00\xff", 2**70, 1.5 + 2j, "text"],
        "scaler": {"scale": 65536.0, "growth_tracker": np.int64(7)},
        "array": np.arange(40, dtype=np.float32).reshape(5, 8),
        "tensor": torch.arange(30, dtype=torch.bfloat16).view(2, 15),
        "tiny": torch.tensor([float("nan"), 1.0, -0.0]),
        "own": fsdp.PerRank({"position": 10 + rank, "noise": torch.full((20,), float(rank))}),
        "deep": {"inside": [fsdp.PerRank(rank)]},
    }


def save_extra(comm: Communicator, path: str) -> None:
    model, optimizer = build(comm, 3)
    step_of(comm, model, optimizer, 0)
    average = {name: p.detach() * 2 for name, p in model.named_parameters()}
    fsdp.save(path, model, optimizer, step=4, extra={**everything(comm.rank), "ema": fsdp.LikeParameters(average)})


def load_extra(comm: Communicator, path: str) -> Any:
    model, optimizer = build(comm, 3, seed=3)
    extra = fsdp.load(path, model, optimizer)
    average = extra.pop("ema").tensors
    assert all(torch.equal(average[name], p.detach() * 2) for name, p in model.named_parameters())
    return dict(extra)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, (torch.Tensor, np.ndarray)):
        x, y = torch.as_tensor(a), torch.as_tensor(b)
        return type(a) is type(b) and x.dtype == y.dtype and torch.equal(x.nan_to_num(), y.nan_to_num())
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    run_ranks(save_extra, str(tmp_path), world_size=2)
    for rank, extra in enumerate(run_ranks(load_extra, str(tmp_path), world_size=2)):
        expected = everything(rank)
        expected["own"], expected["deep"] = expected["own"].value, {"inside": [rank]}
        assert alike(extra, expected)
    for extra in run_ranks(load_extra, str(tmp_path), world_size=3):
        assert [value["position"] for value in extra["own"].values] == [10, 11]
        assert extra["deep"]["inside"][0] == fsdp.OtherRanks((0, 1))


def test_extra_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    model = filled(OddNet(1))
    with pytest.raises(fsdp.CheckpointError, match=r"extra.scheduler.hook: expected plain values"):
        fsdp.save(tmp_path, model, step=1, extra={"scheduler": {"hook": print}})
    assert fsdp.latest(tmp_path) is None


def draw(comm: Communicator, path: str) -> Any:
    """Dropout's next mask and the other generators' next numbers, after the state was saved and put back."""
    torch.manual_seed(comm.rank)
    np.random.seed(comm.rank)
    random.seed(comm.rank)
    model = fsdp.fully_shard(Flat(), comm)
    if comm.rank == 1:
        torch.rand(3)

    def numbers() -> Any:
        return torch.nn.functional.dropout(torch.ones(64)), np.random.rand(), random.random()

    fsdp.save(path, model, step=1, extra={"rng": fsdp.rng_state()})
    expected = numbers()
    numbers()
    assert fsdp.set_rng_state(fsdp.load(path, model)["rng"])
    found = numbers()
    return bool((found[0] == expected[0]).all()) and found[1:] == expected[1:], found[1]


@pytest.mark.parametrize(("world_size", "backend"), [(1, "threads"), pytest.param(2, "gloo", marks=pytest.mark.full)])
def test_every_rank_gets_its_own_random_numbers_back(world_size: int, backend: str, tmp_path: Path) -> None:
    rows = run_ranks(draw, str(tmp_path), world_size=world_size, backend=backend)
    assert all(right for right, _ in rows)
    assert len({number for _, number in rows}) == world_size
    assert not fsdp.set_rng_state(fsdp.OtherRanks((1, 2)))


class Noted(nn.Module):
    """A buffer, a tied weight, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.notes: Any = {"seen": (1, 2)}

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).sum()


def save_noted(comm: Communicator, path: str) -> Any:
    model = fsdp.fully_shard(filled(Noted(), dtype=torch.float32), comm)
    model(torch.randn(6, 4, generator=torch.Generator().manual_seed(comm.rank)))
    fsdp.save(path, model, step=1)
    return {name: value for name, value in full_state(model).items() if isinstance(value, torch.Tensor)}


def load_noted(comm: Communicator, path: str) -> Any:
    model = fsdp.DistributedDataParallel(filled(Noted(), 3, torch.float32), comm)
    model.module.notes = None
    fsdp.load(path, model)
    state = {name: value for name, value in full_state(model).items() if isinstance(value, torch.Tensor)}
    return state, model.module.notes


def test_buffers_ties_and_other_state(tmp_path: Path) -> None:
    expected = run_ranks(save_noted, str(tmp_path), world_size=2)[0]
    for state, notes in run_ranks(load_noted, str(tmp_path), world_size=1):
        assert notes == {"seen": (1, 2)}
        assert difference(state, expected) == 0
    [manifest] = tmp_path.glob("step-*/manifest.json")
    contents = json.loads(manifest.read_text())
    assert contents["tied"] == {"second.weight": "first.weight"}
    assert "second.weight" not in contents["tensors"]["model"]


def save_behind(comm: Communicator, path: str, steps: int) -> dict[str, torch.Tensor]:
    """Every step saved in the background while the next ones go on; the state of the last one."""
    model, optimizer = build(comm, 3)
    saving = None
    state: dict[str, torch.Tensor] = {}
    for step in range(1, steps + 1):
        step_of(comm, model, optimizer, step)
        saving = fsdp.save(path, model, optimizer, step=step, keep=2, async_save=True)
        state = state_of(model, optimizer, comm)
    step_of(comm, model, optimizer, steps + 1)
    assert saving is not None
    assert saving.wait().name == f"step-{steps:010d}"
    return state


def test_saving_in_the_background_keeps_what_was_there(tmp_path: Path) -> None:
    expected = run_ranks(save_behind, str(tmp_path), 3, world_size=2)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000002", "step-0000000003"]
    for found in run_ranks(load_and_train, 3, str(tmp_path), 3, 0, world_size=3):
        assert difference(found, expected) < 1e-12


def odd_forms(comm: Communicator, path: str, save: bool) -> Any:
    half = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = (
        {"mp_policy": half} if save else {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)}
    )
    net = filled(OddNet(2), 0 if save else 3, torch.float32)
    model = fsdp.fully_shard(net, comm, units=[OddBlock], persistence_threshold=8 if save else 0, **options)
    optimizer = adamw(model.parameters())
    if save:
        step_of(comm, model, optimizer, 0)
        fsdp.save(path, model, optimizer, step=1)
    else:
        fsdp.load(path, model, optimizer)
    return state_of(model, optimizer, comm)


def test_mixed_precision_and_offload(tmp_path: Path) -> None:
    expected = run_ranks(odd_forms, str(tmp_path), True, world_size=2)[0]
    assert all(value.dtype == torch.float32 for value in expected.values())
    for found in run_ranks(odd_forms, str(tmp_path), False, world_size=3):
        assert difference(found, expected) == 0


def lower_precision(comm: Communicator, path: str) -> bool:
    model = fsdp.fully_shard(filled(OddNet(2), 3, torch.bfloat16), comm)
    optimizer = adamw(model.parameters())
    fsdp.load(path, model, optimizer)
    return all(
        v["exp_avg"].dtype == torch.bfloat16 and v["step"].dtype == torch.float32 for v in optimizer.state.values()
    )


def test_values_are_cast_to_what_the_model_has(tmp_path: Path) -> None:
    run_ranks(odd_forms, str(tmp_path), True, world_size=2)
    assert all(run_ranks(lower_precision, str(tmp_path), world_size=2))


PROCESSES = ["gloo", "mpi", "shm+gloo", "shm+mpi"]


@pytest.mark.full
@grid(PROCESSES, [2], threads=[], full=lambda *_: True)
def test_ranks_that_are_processes(backend: str, world_size: int, tmp_path: Path) -> None:
    ranks: dict[str, Any] = {"world_size": world_size, "backend": backend}
    expected = run_ranks(train_and_save, 3, str(tmp_path), 2, 2, **ranks)[0]
    for state in run_ranks(load_and_train, 3, str(tmp_path), 2, 2, **ranks):
        assert difference(state, expected) == 0
    background = run_ranks(save_behind, str(tmp_path / "behind"), 2, **ranks)[0]
    for state in run_ranks(load_and_train, 1, str(tmp_path / "behind"), 2, 0, **ranks):
        assert difference(state, background) < 1e-12


def huge(comm: Communicator, path: str, save: bool) -> tuple[int, int, int]:
    """Bytes of this rank's state, and by how much loading raised the most memory that the process ever had: with a new
    optimizer, and once more into all that is there."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    fsdp.fully_shard(model, comm, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if save:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        fsdp.save(path, model, optimizer, step=1)
        return 0, 0, 0
    peaks = []
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # the most that was ever resident starts anew
        before = resident("VmRSS")
        fsdp.load(path, model, optimizer)
        peaks.append(resident("VmHWM") - before)
    shard = 2 * sum(p.nbytes for p in model.parameters())
    return shard, peaks[0], peaks[1]


def resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def stream(comm: Communicator) -> tuple[int, int, int]:
    """Bytes of the whole model, of its largest unit, and by how much ``full_state_dict`` raised the most memory."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    whole = sum(p.nbytes for p in model.parameters())
    fsdp.fully_shard(model, comm, units=[nn.Linear])
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    fsdp.full_state_dict(model)  # what the backend keeps for messages is there afterwards
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    state = fsdp.full_state_dict(model)
    peak = resident("VmHWM") - before
    assert sum(value.nbytes for value in state.values()) == (whole if comm.rank == 0 else 0)
    return whole, whole // 8, peak


@pytest.mark.full
def test_a_whole_state_needs_one_unit_more() -> None:
    rows = run_ranks(stream, world_size=2, backend="shm+gloo")
    for rank, (whole, unit, peak) in enumerate(rows):
        assert peak <= (whole if rank == 0 else 0) + unit + 4 * 2**20


@pytest.mark.full
def test_loading_needs_a_shard_and_little_more(tmp_path: Path) -> None:
    run_ranks(huge, str(tmp_path), True, world_size=2, backend="gloo")
    for shard, new, again in run_ranks(huge, str(tmp_path), False, world_size=2, backend="gloo"):
        assert shard > 60 * 2**20
        assert new <= shard + 64 * 2**20
        assert again <= 16 * 2**20
