"""Saving and loading: ours, plain safetensors files of the same bytes, torch's distributed checkpoints, DeepSpeed's.

Every process writes and reads what it owns of one model with AdamW: 12 bytes a parameter over all ranks. Plain files
are written by ``safetensors.torch.save_file``, each process its shards, and loaded into the same tensors; once as they
are, once brought to the disk as a checkpoint has to be. Files are read from the page cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.table import Table
from safetensors.torch import load_file, save_file

import fsdp
from collectives import Communicator
from fsdp.bench import deepspeed_parts, torch_parts
from fsdp.bench.contenders import Field, stepper
from fsdp.bench.measure import batch
from fsdp.bench.models import GPT, SHAPES, Block

OURS, PLAIN, SYNCED, DCP, DEEPSPEED = "ours", "safetensors", "safetensors, fsync", "torch DCP", "deepspeed-3"


class Times(NamedTuple):
    """Seconds of the slowest rank, the median of several rounds; ``nbytes`` of all files together."""

    contender: str
    save: float
    load: float
    nbytes: int


class Behind(NamedTuple):
    """Seconds of a step alone, and of one while a background save goes on; medians over the slowest rank's."""

    alone: float
    saving: float
    steps: int


class _Contender(NamedTuple):
    name: str
    save: Callable[[Path], object]
    load: Callable[[Path], object]


def run(model: str, backend: str, field: Field, sync: Communicator, rounds: int) -> tuple[list[Times], Behind]:
    """Both operations of each contender, in turn. The same results on every rank. Collective."""
    shape = SHAPES[model]
    torch.manual_seed(0)
    net = GPT(shape)
    fsdp.fully_shard(net, field.communicator(backend), units=[Block])
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    step = stepper(net, optimizer)
    step(batch(shape, sync.rank, 0))
    own = {f"{i}.{key}": t for i, p in enumerate(net.parameters()) for key, t in _tensors(p, optimizer).items()}
    contenders = [
        _Contender(
            OURS,
            lambda path: fsdp.save(path, net, optimizer, step=1),
            lambda path: fsdp.load(path, net, optimizer),
        ),
        _Contender(
            PLAIN, lambda path: _save_plain(path, own, sync.rank, False), lambda path: _load(path, own, sync.rank)
        ),
        _Contender(
            SYNCED, lambda path: _save_plain(path, own, sync.rank, True), lambda path: _load(path, own, sync.rank)
        ),
    ]
    field.group(sync)
    theirs = GPT(shape)
    torch_parts.fsdp2(theirs, list(theirs.blocks))
    their_optimizer = torch.optim.AdamW(theirs.parameters(), fused=True)
    stepper(theirs, their_optimizer)(batch(shape, sync.rank, 0))
    contenders.append(
        _Contender(
            DCP,
            lambda path: torch_parts.save_distributed(theirs, their_optimizer, path),
            lambda path: torch_parts.load_distributed(theirs, their_optimizer, path),
        )
    )
    if deepspeed_parts.installed():
        torch.manual_seed(0)
        zero = deepspeed_parts.engine(GPT(shape), 3, shape.rows, sync.world_size)
        zero.step(batch(shape, sync.rank, 0))
        contenders.append(_Contender(DEEPSPEED, zero.save, zero.load))
    with _folder(sync) as folder:
        times = [_measure(contender, folder, sync, rounds) for contender in contenders]
        behind = _behind(lambda n: step(batch(shape, sync.rank, n)), net, optimizer, folder, sync, rounds)
    return times, behind


def _tensors(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state[parameter]
    return {"p": parameter.detach(), "m": state["exp_avg"], "v": state["exp_avg_sq"]}


def _save_plain(path: Path, own: dict[str, torch.Tensor], rank: int, synced: bool) -> None:
    path.mkdir(parents=True, exist_ok=True)
    file = path / f"{rank}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in own.items()}, file)
    if synced:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


def _load(path: Path, own: dict[str, torch.Tensor], rank: int) -> None:
    for name, tensor in load_file(path / f"{rank}.safetensors").items():
        own[name].copy_(tensor)


def _measure(contender: _Contender, folder: Path, sync: Communicator, rounds: int) -> Times:
    saves, loads, nbytes = [], [], 0
    for number in range(rounds + 1):
        path = folder / f"{contender.name.replace(', ', '-')}-{number}"
        saves.append(_slowest(partial(contender.save, path), sync))
        loads.append(_slowest(partial(contender.load, path), sync))
        nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        sync.barrier()
        if sync.rank == 0:
            shutil.rmtree(path)
            os.sync()  # nobody pays for what others have left to be written
    return Times(contender.name, median(saves[1:]), median(loads[1:]), nbytes)


def _slowest(action: Callable[[], object], sync: Communicator) -> float:
    sync.barrier()
    started = time.perf_counter()
    action()
    return max(sync.all_gather_object(time.perf_counter() - started))


def _behind(
    step: Callable[[int], object],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    sync: Communicator,
    rounds: int,
) -> Behind:
    alone, saving = [], []
    for number in range(1, rounds + 1):
        alone += [_slowest(partial(step, n), sync) for n in range(3)]
        under_way = fsdp.save(folder / "behind", model, optimizer, step=number, keep=1, async_save=True)
        while any(sync.all_gather_object(under_way.writes)):
            saving.append(_slowest(partial(step, number), sync))
        under_way.wait()
    return Behind(median(alone), median(saving) if saving else 0.0, len(saving))


@contextlib.contextmanager
def _folder(sync: Communicator) -> Iterator[Path]:
    """A folder of rank 0's on the disk of the working directory, among what programs write there."""
    with contextlib.ExitStack() as stack:
        mine = None
        if sync.rank == 0:
            Path("outputs").mkdir(exist_ok=True)
            mine = stack.enter_context(tempfile.TemporaryDirectory(dir="outputs", prefix="checkpoint-bench-"))
        yield Path(sync.broadcast_object(mine, 0))
        sync.barrier()


def table(model: str, world_size: int, found: Sequence[Times], behind: Behind) -> Table:
    """One model's figures; speeds are of all ranks together."""
    first = found[0]
    drawn = Table(
        title=f"checkpoint of {model} parameters with AdamW, {world_size} ranks: a step takes "
        f"{behind.alone * 1e3:.0f} ms, {behind.saving * 1e3:.0f} ms while one is saved behind it",
        title_justify="left",
    )
    drawn.add_column("contender", no_wrap=True)
    for head in ("bytes", "save", "GB/s", "ours over it", "load", "GB/s", "ours over it"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for row in found:
        cells = [f"{row.nbytes / 1e6:,.0f} MB"]
        for mine, seconds in ((first.save, row.save), (first.load, row.load)):
            cells += [f"{seconds * 1e3:,.0f} ms", f"{row.nbytes / seconds / 1e9:.2f}", f"{seconds / mine:.2f}"]
        drawn.add_row(row.contender, *cells)
    return drawn
