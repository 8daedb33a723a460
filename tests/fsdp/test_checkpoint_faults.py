"""Checkpoints under damage and failure: noticed on all ranks before anything is touched, and the last is never lost."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fsdp
from collectives import Communicator
from fsdp.checkpoint import complete
from fsdp.checkpoint.checksum import Bytes, checksum, tables
from fsdp.checkpoint.manifest import VERSION, parse, seal
from fsdp.checkpoint.reader import Reader
from tests.fsdp.models import OddBlock, OddNet, adamw, filled, full_state, loss_of, same_bits, words, wrapped
from tests.ranks import run_ranks


def build(comm: Communicator, stage: int = 3, blocks: int = 1, seed: int = 0) -> tuple[Any, Any]:
    model = wrapped(filled(OddNet(blocks), seed), comm, stage, [OddBlock])
    return model, adamw(model.parameters())


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, words(comm.rank, step)).backward()
    optimizer.step()


def saved(comm: Communicator, path: str, steps: int = 1) -> dict[str, torch.Tensor]:
    model, optimizer = build(comm)
    for step in range(1, steps + 1):
        step_of(model, optimizer, comm, step)
        fsdp.save(path, model, optimizer, step=step)
    return full_state(model)


def refused(comm: Communicator, path: str, **options: Any) -> str:
    """The message of a ``load`` that must leave model and optimizer as they were."""
    model, optimizer = build(comm, seed=4)
    step_of(model, optimizer, comm, 9)
    before = full_state(model)
    moments = [values["exp_avg"].clone() for values in optimizer.state_dict()["state"].values()]
    with pytest.raises(fsdp.CheckpointError) as caught:
        fsdp.load(path, model, optimizer, **options)
    assert same_bits(full_state(model), before)
    now = [values["exp_avg"] for values in optimizer.state_dict()["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, now, strict=True))
    step_of(model, optimizer, comm, 10)
    return str(caught.value).splitlines()[0]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(place: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(place * len(data)), len(data) - 1)] ^= 4
        path.write_bytes(data)

    return change


def rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """The manifest with a change that its checksum knows of."""

    def rewrite(path: Path) -> None:
        manifest = json.loads(path.read_text())
        del manifest["sha256"]
        change(manifest)
        path.write_text(seal(json.dumps(manifest)))

    return rewrite


def edit(**fields: Any) -> Callable[[Path], None]:
    return rewritten(lambda manifest: manifest.update(fields))


def edit_file(**fields: Any) -> Callable[[Path], None]:
    return rewritten(lambda manifest: manifest["files"][1].update(fields))


def move_part(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["model"]["embedding"]["parts"][0][1] = 10**12


def drop_part(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["model"]["embedding"]["parts"].pop()


FILE, MANIFEST = "rank-00001.safetensors", "manifest.json"


@pytest.mark.parametrize(
    ("name", "damage", "found"),
    [
        pytest.param(FILE, cut, "bytes, found", id="cut"),
        *(pytest.param(FILE, flip(place), "as they were written", id=f"flip-{place}") for place in (0, 0.01, 0.5, 1)),
        pytest.param(FILE, Path.unlink, "found no such file", id="missing"),
        pytest.param(MANIFEST, Path.unlink, "found no such file", id="no-manifest"),
        pytest.param(MANIFEST, cut, "expected JSON", id="cut-manifest"),
        *(pytest.param(MANIFEST, flip(place), "expected", id=f"flip-manifest-{place}") for place in (0.3, 0.6, 1)),
        pytest.param(MANIFEST, edit(version=VERSION + 1), f"of version {VERSION}, found {VERSION + 1}", id="newer"),
        pytest.param(MANIFEST, edit(format="other"), '"format"', id="other-format"),
        pytest.param(MANIFEST, edit(tensors=3), "all fields", id="no-tensors"),
        pytest.param(MANIFEST, edit_file(name="../evil"), "plain name in its folder, found '../evil'", id="outside"),
        pytest.param(MANIFEST, edit_file(name="/etc/passwd"), "plain name", id="absolute"),
        pytest.param(MANIFEST, edit_file(nbytes=-5), "a size", id="negative"),
        pytest.param(MANIFEST, rewritten(move_part), "inside of a file", id="offset"),
        pytest.param(MANIFEST, rewritten(drop_part), "elements of model 'embedding'", id="part"),
    ],
)
def test_damage_is_found_before_the_model_is_touched(
    name: str, damage: Callable[[Path], None], found: str, tmp_path: Path
) -> None:
    run_ranks(saved, str(tmp_path), world_size=2)
    [checkpoint] = complete(tmp_path)
    damage(checkpoint / name)
    first, second = run_ranks(refused, str(checkpoint), world_size=2)
    assert first == second
    assert str(checkpoint / name) in first
    assert found in first


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    run_ranks(saved, str(tmp_path), world_size=2)
    text = (complete(tmp_path)[0] / MANIFEST).read_text()
    parse(text, tmp_path)
    for place in range(0, len(text), 5):
        for bit in (1, 4):
            with pytest.raises(fsdp.CheckpointError):
                parse(text[:place] + chr(ord(text[place]) ^ bit) + text[place + 1 :], tmp_path)


@pytest.mark.parametrize("size", [0, 1, 7, 4080, 4097, 3 * 4096 + 5, 2**18 + 12])
def test_every_byte_of_a_block_counts(size: int) -> None:
    def of(block: Bytes) -> str:
        return checksum(block.size, tables(block))

    block = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    known = {of(block), of(np.append(block, np.uint8(0))), of(block[:-1]) if size else ""}
    places = range(0, size, max(97, size // 50))
    for place in places:
        changed = block.copy()
        changed[place] ^= 1 << place % 8
        known.add(of(changed))
        if place + 8 < size:  # and in the same bit of the next word
            changed[place + 8] ^= 1 << place % 8
            known.add(of(changed))
    for unit in (8, 64, 4096):  # words and rows that change places
        moved = block[: size // unit * unit].reshape(-1, unit)[::-1].reshape(-1)
        if size >= 2 * unit:
            known.add(of(np.append(moved, block[moved.size :])))
    swaps = sum(size >= 2 * unit for unit in (8, 64, 4096))
    assert len(known) == 3 + len(places) + sum(place + 8 < size for place in places) + swaps


def loaded_while_it_is_cut(comm: Communicator, path: str) -> str:
    model, optimizer = build(comm, seed=4)
    step_of(model, optimizer, comm, 9)
    fill = Reader.fill

    def late(reader: Reader) -> None:
        if comm.rank == 1:
            cut(complete(path)[0] / FILE)
        fill(reader)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Reader, "fill", late)
        with pytest.raises(fsdp.CheckpointError) as caught:
            fsdp.load(path, model, optimizer)
    return str(caught.value).splitlines()[0]


def test_a_file_that_changes_while_it_is_loaded_is_said_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(saved, str(tmp_path), world_size=2, backend="gloo")
    first, second = run_ranks(loaded_while_it_is_cut, str(tmp_path), world_size=2, backend="gloo")
    assert first == second
    assert FILE in first
    assert "the model has a part of it" in first


def loaded_into_a_graph(comm: Communicator, path: str) -> None:
    model, optimizer = build(comm, stage=0, seed=4)
    loss = loss_of(model, words(comm.rank, 1))
    fsdp.load(path, model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_from_before_is_refused(tmp_path: Path) -> None:
    run_ranks(saved, str(tmp_path), world_size=1)
    run_ranks(loaded_into_a_graph, str(tmp_path), world_size=1)


def resumed(comm: Communicator, path: str) -> tuple[int, dict[str, torch.Tensor]]:
    model, optimizer = build(comm, seed=4)
    return fsdp.load(path, model, optimizer).step, full_state(model)


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_run_resumes_from_the_newest_that_is_whole(damage: Callable[[Path], None], tmp_path: Path) -> None:
    run_ranks(saved, str(tmp_path), 2, world_size=2)
    newest, older = complete(tmp_path)
    damage(newest / FILE)
    assert fsdp.latest(tmp_path) == older
    assert fsdp.latest(newest) is None
    assert [step for step, _ in run_ranks(resumed, str(tmp_path), world_size=2)] == [1, 1]


def test_a_folder_without_any_is_said(tmp_path: Path) -> None:
    assert fsdp.latest(tmp_path / "none") is None
    first, second = run_ranks(refused, str(tmp_path), world_size=2)
    assert first == second == f"{tmp_path}: expected a checkpoint, or a folder with a complete one; found none"


class Other(OddNet):
    def __init__(self) -> None:
        super().__init__(1)
        self.extra = nn.Parameter(torch.zeros(3))
        self.head = nn.Parameter(torch.zeros(4, 15))
        del self.embedding
        self.embedded = nn.Parameter(torch.zeros(11, 15))


def another_model(comm: Communicator, path: str) -> list[str]:
    model = wrapped(filled(Other()), comm, 3)
    before = full_state(model)
    messages = []
    for strict in (True, False):
        with pytest.raises(fsdp.CheckpointError) as caught:
            fsdp.load(path, model, strict=strict)
        messages.append(str(caught.value).splitlines()[0])
    assert same_bits(full_state(model), before)
    return messages


def test_another_model_is_refused_in_one_message(tmp_path: Path) -> None:
    run_ranks(saved, str(tmp_path), world_size=2)
    first, second = run_ranks(another_model, str(tmp_path), world_size=2)
    assert first == second
    strict, lenient = first
    shape = "shape of 'head': expected (4, 15), found (11, 15)"
    for found in (shape, "missing: extra, embedded", "unexpected: embedding"):
        assert found in strict
    assert shape in lenient


def what_both_have(comm: Communicator, path: str) -> Any:
    model = wrapped(filled(OddNet(2), seed=4), comm, 3, [OddBlock])
    before = full_state(model)
    extra = fsdp.load(path, model, adamw(model.parameters()), strict=False)
    return extra.missing, extra.unexpected, before, full_state(model)


def test_lenient_loading_returns_both_lists(tmp_path: Path) -> None:
    state = run_ranks(saved, str(tmp_path), world_size=2)[0]
    for missing, unexpected, before, after in run_ranks(what_both_have, str(tmp_path), world_size=2):
        assert (set(missing), unexpected) == ({name for name in after if name.startswith("blocks.1")}, [])
        assert all(torch.equal(after[name], state.get(name, before[name])) for name in after)


def failing_save(comm: Communicator, path: str, faults: dict[str, Any]) -> list[str]:
    """A good save, one that fails, training, and a good one again. The messages of the failure."""
    model, optimizer = build(comm)
    fsdp.save(path, model, optimizer, step=1)
    comm.barrier()
    if comm.rank == 0:
        faults["on"] = True
    comm.barrier()
    messages = []
    for background in (False, True):
        step_of(model, optimizer, comm, 2)
        with pytest.raises(fsdp.CheckpointError) as caught:
            fsdp.save(path, model, optimizer, step=2, async_save=background).wait()
        messages.append(str(caught.value).splitlines()[0])
        if comm.rank == 0:
            assert [entry.name for entry in Path(path).iterdir()] == ["step-0000000001"]
        comm.barrier()
    if comm.rank == 0:
        faults["on"] = False
    comm.barrier()
    fsdp.save(path, model, optimizer, step=3)
    return messages


@pytest.mark.parametrize(
    ("call", "name", "error", "after"),
    [
        ("write", "rank-00001.safetensors", errno.ENOSPC, 2),  # calls of it that still succeed
        ("write", "rank-00000.safetensors", errno.EDQUOT, 0),
        ("fsync", "rank-00001.safetensors", errno.EIO, 0),
        ("open", "rank-00001.safetensors", errno.EACCES, 0),
        ("rename", "step-0000000002", errno.EACCES, 0),
        ("mkdir", "step-0000000002", errno.ENOSPC, 0),
    ],
)
def test_a_failed_save_is_everybodys_and_training_goes_on(
    call: str, name: str, error: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: dict[str, Any] = {"on": False}
    real = getattr(os, call)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        by_number = isinstance(args[0], int)
        what = os.readlink(f"/proc/self/fd/{args[0]}") if by_number else os.fspath(args[1 if call == "rename" else 0])
        if faults["on"] and name in what and ".deleted" not in what:
            faults[what] = faults.get(what, 0) + 1
            if faults[what] > after:
                raise OSError(error, os.strerror(error), None if by_number else what)
            if call == "write":  # the disk fills up in the middle of a file
                return real(args[0], args[1][:100])
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, faulty)
    first, second = run_ranks(failing_save, str(tmp_path), faults, world_size=2)
    assert first == second
    for message in first:
        assert name in message
        assert os.strerror(error) in message
    assert fsdp.latest(tmp_path) == tmp_path / "step-0000000003"
    assert [step for step, _ in run_ranks(resumed, str(tmp_path), world_size=2)] == [3, 3]


def save_some(comm: Communicator, path: str, steps: list[int], keep: int | None) -> dict[str, torch.Tensor]:
    model, optimizer = build(comm)
    for step in steps:
        step_of(model, optimizer, comm, step)
        if comm.rank == 1:
            time.sleep(0.05)
        fsdp.save(path, model, optimizer, step=step, keep=keep)
    return full_state(model)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_old_ones_are_deleted_by_one_rank_never_the_last(tmp_path: Path) -> None:
    run_ranks(save_some, str(tmp_path), [1, 2, 3], 1, world_size=4)
    assert names(tmp_path) == ["step-0000000003"]
    run_ranks(save_some, str(tmp_path), [4, 5, 6], 2, world_size=2)
    assert names(tmp_path) == ["step-0000000005", "step-0000000006"]
    # The newest is incomplete, and a job that was restarted from an older one saves before it.
    cut(tmp_path / "step-0000000006" / FILE)
    run_ranks(save_some, str(tmp_path), [5], 1, world_size=2)
    assert names(tmp_path) == ["step-0000000005.1", "step-0000000006"]
    assert fsdp.latest(tmp_path) == tmp_path / "step-0000000005.1"


@pytest.mark.parametrize(
    ("name", "then"), [(".partial-step-0000000002-00000000", ""), ("step-0000000002", ".1"), (".deleted-x", "")]
)
def test_leftovers_are_replaced(name: str, then: str, tmp_path: Path) -> None:
    half = tmp_path / name
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(b"half")
    run_ranks(save_some, str(tmp_path), [2], None, world_size=2)
    assert names(tmp_path) == [f"step-0000000002{then}"]


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    run_ranks(save_some, str(tmp_path), [2], None, world_size=2)
    state = run_ranks(save_some, str(tmp_path), [2, 2], None, world_size=2)[0]
    assert names(tmp_path) == ["step-0000000002.2"]
    assert all(same_bits(found, state) for _, found in run_ranks(resumed, str(tmp_path), world_size=2))


def asks_differently(comm: Communicator, path: str) -> str:
    model, optimizer = build(comm)
    with pytest.raises(ValueError, match="the same arguments of all ranks") as caught:
        fsdp.save(path, model, optimizer, step=comm.rank)
    return str(caught.value).splitlines()[0]


def test_ranks_that_ask_for_different_things_are_told(tmp_path: Path) -> None:
    assert len(set(run_ranks(asks_differently, str(tmp_path), world_size=2))) == 1
    model = filled(OddNet(1))
    for wrong in ({"step": -1}, {"step": 1.5}, {"step": 1, "keep": 0}):
        with pytest.raises(ValueError, match="expected"):
            fsdp.save(tmp_path, model, **wrong)  # type: ignore[arg-type]
