"""Optimizer state from and to other tools: by number, by name, in files and in torch's distributed checkpoints."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from collectives import Communicator
from fsdp.bench import torch_parts
from tests.fsdp.models import (
    OddBlock,
    OddNet,
    adamw,
    difference,
    filled,
    full_state,
    loss_of,
    same_bits,
    words,
    wrapped,
    write_dcp,
)
from tests.ranks import run_ranks


def optimizer_round_trip(comm: Communicator, stage: int) -> float:
    """A plain torch.optim state into shards, a step, and back; against one process."""
    plain = filled(OddNet(1), dtype=torch.float32)
    reference = adamw(plain.parameters())
    model = wrapped(filled(OddNet(1), dtype=torch.float32), comm, stage, [OddBlock])
    optimizer = adamw(model.parameters())
    loss_of(plain, words(0, 0)).backward()
    reference.step()
    fsdp.load_full_state_dict(model, plain.state_dict())
    fsdp.load_full_optimizer_state_dict(model, optimizer, reference.state_dict())
    for module, optim in ((plain, reference), (model, optimizer)):
        optim.zero_grad()
        loss_of(module, words(0, 1)).backward()
        optim.step()
    found = fsdp.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    expected = reference.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    worst = 0.0
    for index, values in expected["state"].items():
        assert found["state"][index].keys() == values.keys()
        worst = max(worst, difference(found["state"][index], {k: values[k] for k in found["state"][index]}))
    return worst


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (3, 3), (2, 1)])
def test_optimizer_state_from_and_to_one_process(world_size: int, stage: int) -> None:
    assert max(run_ranks(optimizer_round_trip, stage, world_size=world_size)) < 1e-6


class Layers(nn.Module):
    """Two layers whose rows two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def grouped(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    layers = list(model.children())
    return torch.optim.AdamW([{"params": layers[0].parameters(), "lr": lr}, {"params": layers[1].parameters()}])


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps on data that is the same on every rank."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def alone() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = filled(Layers(), dtype=torch.float32)
    optimizer = grouped(model)
    stepped(model, optimizer, 2)
    return model, optimizer


def take_over(comm: Communicator, source: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights, where there are some, and optimizer state from ``source``; what came of it, whole."""
    model = fsdp.fully_shard(filled(Layers(), 5, torch.float32), comm, units=[nn.Linear])
    optimizer = grouped(model, lr=0.5)
    if isinstance(source, str) and not source.endswith(".pt"):
        fsdp.load_full_state_dict(model, source)
    fsdp.load_full_optimizer_state_dict(model, optimizer, source)
    return full_state(model), fsdp.full_optimizer_state_dict(model, optimizer, rank0_only=False)


def check_optimizer(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert found["state"][index].keys() == values.keys()
        assert difference(found["state"][index], values) < 1e-6


@pytest.mark.parametrize("flat", [False, True])
def test_optimizer_state_in_a_torch_distributed_checkpoint(flat: bool, tmp_path: Path) -> None:
    functions = importlib.import_module("torch.distributed.checkpoint.state_dict")
    model, optimizer = alone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = functions.StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, state = functions.get_state_dict(model, optimizer, options=options)
    write_dcp({"app": {"model": weights, "optim": state}, "step": 2}, tmp_path / "dcp")
    for weights, found in run_ranks(take_over, str(tmp_path / "dcp"), world_size=2):
        assert same_bits(weights, model.state_dict())
        check_optimizer(found, optimizer.state_dict())
    fsdp.export(tmp_path / "dcp", tmp_path / "out", optimizer=True)
    if not flat:  # where options are those of each parameter, groups are not known
        plain = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
        check_optimizer(plain, optimizer.state_dict())


def train_with_fsdp2(comm: Communicator, folder: str) -> None:
    with torch_parts.process_group(comm.rank, comm.world_size, f"{folder}/meeting"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = filled(Layers(), dtype=torch.float32)
        torch_parts.fsdp2(model, list(model.children()))
        optimizer = grouped(model)
        stepped(model, optimizer, 2)
        torch_parts.save_distributed(model, optimizer, Path(folder) / "dcp")


@pytest.mark.full
def test_what_torch_fsdp2_wrote(tmp_path: Path) -> None:
    run_ranks(train_with_fsdp2, str(tmp_path), world_size=2, backend="gloo")
    model, optimizer = alone()
    for world_size in (1, 3):
        for weights, found in run_ranks(take_over, str(tmp_path / "dcp"), world_size=world_size):
            assert difference(weights, dict(model.state_dict())) < 1e-6
            check_optimizer(found, optimizer.state_dict())


def named_forms(folder: Path) -> Iterator[Any]:
    """One optimizer's state by number, by number with names in another order, by name, in a file, in a checkpoint."""
    model, optimizer = alone()
    yield optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    groups, count = [], 0
    for group in state["param_groups"]:
        groups.append({**group, "params": names[count : count + len(group["params"])]})
        count += len(group["params"])
    yield {"state": {names[number]: values for number, values in state["state"].items()}, "param_groups": groups}
    numbers = [{**g, "params": [names.index(n) for n in g["params"]], "param_names": g["params"]} for g in groups[::-1]]
    yield {"state": state["state"], "param_groups": numbers}
    torch.save({"epoch": 3, "optimizer": state}, folder / "training.pt")
    yield str(folder / "training.pt")
    fsdp.save(folder / "run", model, optimizer, step=2)
    yield str(folder / "run")


def test_optimizer_state_by_number_and_by_name(tmp_path: Path) -> None:
    _, optimizer = alone()
    for source in named_forms(tmp_path):
        for _, found in run_ranks(take_over, source, world_size=2):
            check_optimizer(found, optimizer.state_dict())


def refused_state(comm: Communicator, source: Any) -> str:
    model = fsdp.fully_shard(filled(Layers(), 5, torch.float32), comm, units=[nn.Linear])
    optimizer = grouped(model)
    stepped(model, optimizer, 1)
    before = fsdp.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    with pytest.raises(fsdp.CheckpointError) as caught:
        fsdp.load_full_optimizer_state_dict(model, optimizer, source)
    check_optimizer(fsdp.full_optimizer_state_dict(model, optimizer, rank0_only=False), before)
    return str(caught.value)


def test_other_optimizer_state_is_refused(tmp_path: Path) -> None:
    state = alone()[1].state_dict()
    wide = {**state["state"], 1: {"exp_avg": torch.ones(7, 2)}}
    write_dcp(dict(alone()[0].state_dict()), tmp_path / "weights")
    for source, found in (
        ({**state, "param_groups": state["param_groups"][:1]}, "expected groups of [2, 2] parameters, found [2]"),
        ({**state, "state": wide}, "'exp_avg' of 'first.bias': expected shape (7,), found (7, 2)"),
        ({"state": {}, "param_groups": [{"params": ["a", "b"]}]}, "found others: a, b"),
        (state["state"], "expected a dict with 'state' and 'param_groups'"),
        (str(tmp_path / "weights"), "expected the state of an optimizer, found none"),
    ):
        first, second = run_ranks(refused_state, source, world_size=2)
        assert first == second
        assert found in first
