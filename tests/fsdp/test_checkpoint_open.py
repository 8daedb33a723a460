"""Checkpoints and other tools: what they write and read, without ranks where none are needed."""

from __future__ import annotations

import importlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import fsdp
from collectives import Communicator
from fsdp.checkpoint.__main__ import main
from fsdp.checkpoint.sources import open_source
from tests.fsdp.models import (
    adamw,
    filled,
    full_state,
    loss_of,
    same_bits,
    words,
    wrapped,
    write_dcp,
)
from tests.ranks import run_ranks


class Tied(nn.Module):
    """Tied weights, a buffer, a parameter of each kind of shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.arange(5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.scale * torch.tanh(self.inner(self.embedding(ids))), self.head.weight)


def tied(seed: int = 0) -> nn.Module:
    return filled(Tied(), seed, torch.float32)


def saved(comm: Communicator, path: str, stage: int = 3) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """One step, saved; the whole state, and the optimizer's."""
    model = wrapped(tied(), comm, stage, [nn.Linear])
    optimizer = adamw(model.parameters())
    loss_of(model, words(comm.rank, 0)).backward()
    optimizer.step()
    fsdp.save(path, model, optimizer, step=1)
    return full_state(model), fsdp.full_optimizer_state_dict(model, optimizer, rank0_only=False)


@pytest.mark.parametrize("limit", [10**9, 200])
def test_an_export_is_what_other_tools_open(limit: int, tmp_path: Path) -> None:
    state, optimizer_state = run_ranks(saved, str(tmp_path / "run"), world_size=2)[0]
    files = fsdp.export(tmp_path / "run", tmp_path / "out", max_shard_size=limit, optimizer=True)
    weights = [file for file in files if file.suffix == ".safetensors"]
    assert (len(weights) > 1) is (limit == 200)
    found: dict[str, torch.Tensor] = {}
    for file in weights:
        found.update(safetensors.torch.load_file(file))
    assert same_bits({name: found[name] for name in state}, state)
    assert found.keys() == state.keys()
    if limit == 200:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == state.keys()
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    plain = tied(seed=3)
    plain.load_state_dict(found, strict=True)
    again = adamw(plain.parameters())
    again.load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True))
    own = again.state_dict()
    assert own["param_groups"] == optimizer_state["param_groups"]
    for index_, values in optimizer_state["state"].items():
        assert all(torch.equal(own["state"][index_][key], value) for key, value in values.items())


@pytest.mark.full
def test_transformers_opens_an_export(tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    settings = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=16)

    def rank(comm: Communicator) -> Any:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(settings)
        fsdp.fully_shard(model, comm, units=[transformers.models.gpt2.modeling_gpt2.GPT2Block])
        fsdp.save(tmp_path / "run", model, step=3)
        return full_state(model)

    state = run_ranks(rank, world_size=2)[0]
    fsdp.export(tmp_path / "run", tmp_path / "out")
    settings.save_pretrained(tmp_path / "out")
    model, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def load_whole(comm: Communicator, source: Any, stage: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = wrapped(tied(seed=comm.rank + 7), comm, stage, [nn.Linear])
    assert fsdp.load_full_state_dict(model, source, **options) == ([], [])
    return full_state(model)


KINDS = ["safetensors", "folder", "pt", "nested", "bin", "dict", "checkpoint"]


def write(kind: str, state: dict[str, torch.Tensor], folder: Path) -> Any:
    folder.mkdir()
    if kind == "safetensors":  # as transformers writes them: one name of a tied weight
        safetensors.torch.save_file(
            {name: value for name, value in state.items() if name != "head.weight"}, folder / "w.safetensors"
        )
        return str(folder / "w.safetensors")
    if kind == "folder":
        safetensors.torch.save_file({n: v.clone() for n, v in state.items()}, folder / "model.safetensors")
    elif kind in ("pt", "nested"):
        torch.save({"module": state, "epoch": 3} if kind == "nested" else state, folder / "w.pt")
        return str(folder / "w.pt")
    elif kind == "bin":  # the consolidated weights that DeepSpeed's zero_to_fp32.py writes
        names = list(state)
        parts = {"pytorch_model-00001-of-00002.bin": names[:2], "pytorch_model-00002-of-00002.bin": names[2:]}
        for name, members in parts.items():
            torch.save({member: state[member] for member in members}, folder / name)
        weight_map = {member: name for name, members in parts.items() for member in members}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    elif kind == "checkpoint":
        model = tied()
        model.load_state_dict(state)
        fsdp.save(folder, model, step=1)
    else:
        return state
    return str(folder)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_weights_into_shards(kind: str, broadcast: bool, tmp_path: Path) -> None:
    state = {name: value.detach() for name, value in tied(seed=1).state_dict().items()}
    source = write(kind, state, tmp_path / "weights")
    for stage, world_size in ((3, 2), (0, 1)):
        for found in run_ranks(load_whole, source, stage, {"broadcast": broadcast}, world_size=world_size):
            assert same_bits(found, state)


@pytest.mark.parametrize("prefix", ["", "model"])
def test_a_torch_distributed_checkpoint_without_torch_distributed(prefix: str, tmp_path: Path) -> None:
    state = {name: value.detach() for name, value in tied(seed=1).state_dict().items()}
    write_dcp({prefix: state, "step": 3, "optim": {"x": torch.ones(2)}} if prefix else state, tmp_path / "dcp")
    for found in run_ranks(load_whole, str(tmp_path / "dcp"), 3, {}, world_size=2):
        assert same_bits(found, state)
    [file] = fsdp.export(tmp_path / "dcp", tmp_path / "out")
    assert same_bits({n: safetensors.torch.load_file(file)[n] for n in state}, state)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("it ran",))


def test_pickles_that_hold_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3), "hook": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(fsdp.CheckpointError, match=r"evil.pt: expected tensors and plain values only"):
        open_source(tmp_path / "evil.pt")
    assert main(["inspect", str(tmp_path / "evil.pt")]) == 1
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(fsdp.CheckpointError, match=r"builtins.print, which is refused"):
        open_source(tmp_path / "dcp")
    assert main(["inspect", str(tmp_path / "dcp")]) == 1
    captured = capsys.readouterr()
    assert "it ran" not in captured.out
    assert captured.err.count("--trust-pickle") == 2
    for name, code in (("evil.pt", 0), ("dcp", 1)):  # what it leaves there is no index
        assert main(["inspect", "--trust-pickle", str(tmp_path / name)]) == code
        assert "it ran" in capsys.readouterr().out


def refused(comm: Communicator, source: Any) -> str:
    model = wrapped(tied(), comm, 3, [nn.Linear])
    before = full_state(model)
    with pytest.raises(fsdp.CheckpointError) as caught:
        fsdp.load_full_state_dict(model, source)
    assert same_bits(full_state(model), before)
    return str(caught.value)


def test_other_weights_are_refused_in_one_message(tmp_path: Path) -> None:
    state = {name: value.detach().clone() for name, value in tied().state_dict().items()}
    state["inner.weight"] = torch.ones(6, 5)
    state["stray"] = torch.ones(1)
    del state["scale"]
    first, second = run_ranks(refused, state, world_size=2)
    assert first == second
    for words_ in ("missing: scale", "unexpected: stray", "shape of 'inner.weight': expected (6, 6), found (6, 5)"):
        assert words_ in first


@pytest.mark.parametrize("within", ["", "global_step10"])
def test_what_deepspeed_left_must_be_consolidated_first(within: str, tmp_path: Path) -> None:
    (tmp_path / "zero_to_fp32.py").touch()
    (tmp_path / "global_step10").mkdir()
    with pytest.raises(fsdp.CheckpointError, match=f"python {tmp_path}/zero_to_fp32.py {tmp_path} weights"):
        open_source(tmp_path / within)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(saved, str(tmp_path / "run"), world_size=2)
    run = str(tmp_path / "run")
    assert main(["inspect", run]) == 0
    shown = capsys.readouterr().out
    assert "step 1, saved by 2 ranks" in shown
    assert "head.weight is embedding.weight" in shown
    assert "optimizer.exp_avg: 4 tensors of 109 elements" in shown
    assert main(["verify", run]) == 0
    assert main(["export", run, str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")["scale"].dtype == torch.bfloat16
    capsys.readouterr()
    assert main(["export", run, str(tmp_path / "same")]) == 0
    assert main(["diff", run, str(tmp_path / "same")]) == 0
    assert "all equal" in capsys.readouterr().out
    other = safetensors.torch.load_file(tmp_path / "same" / "model.safetensors")
    other["inner.bias"][2] += 0.5
    del other["scale"]
    safetensors.torch.save_file(other, tmp_path / "other.safetensors")
    assert main(["diff", run, str(tmp_path / "other.safetensors")]) == 1
    shown = capsys.readouterr().out
    assert "- scale" in shown
    assert "~ inner.bias: 1 of 6 elements differ, by at most 0.5" in shown
    [file] = list((tmp_path / "run").glob("step-*/rank-00001.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["verify", run]) == 1
    assert f"{file}: expected bytes 0 to {len(data)}" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
