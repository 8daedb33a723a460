"""What is refused raises by name, and the README lists it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import collectives
from collectives import Communicator
from collectives.errors import CommError, UnsupportedError
from fsdp import DistributedDataParallel, fully_shard, summon_full_params
from tests.fsdp.models import OddBlock

README = Path(__file__).resolve().parents[2] / "README.md"
Refusal = Callable[[Communicator], Any]


def run(fn: Any, *args: Any, n: int = 2) -> list[Any]:
    return collectives.run(fn, *args, n=n, algorithm="direct", timeout=30.0)


class Tail(nn.Linear):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def linear() -> nn.Module:
    return nn.Linear(4, 4, bias=False)


def sharded(comm: Communicator, module: nn.Module | None = None, stage: int = 3, **options: Any) -> Any:
    return fully_shard(module or nn.Sequential(linear(), Tail(4, 4, bias=False)), comm, stage=stage, **options)


def with_gradients(comm: Communicator) -> Any:
    model = sharded(comm)
    model(torch.ones(4)).sum().backward()
    return model


def stepped(comm: Communicator, optimizer: Any) -> None:
    model = with_gradients(comm)
    optimizer(model.parameters()).step(lambda: 0.0)


def differentiated_twice(comm: Communicator) -> None:
    x = torch.ones(4, requires_grad=True)
    torch.autograd.grad(sharded(comm)(x).square().sum(), x, create_graph=True)


def summoned(comm: Communicator) -> None:
    model = sharded(comm)
    with summon_full_params(model):
        model(torch.ones(4))


def tied_outside(comm: Communicator) -> None:
    first, second = linear(), linear()
    second.weight = first.weight
    sharded(comm, first)
    sharded(comm, second)(torch.ones(4))


def on_meta(comm: Communicator) -> None:
    with torch.device("meta"):
        model = OddBlock()
    sharded(comm, model)


REFUSALS: dict[str, list[Refusal]] = {
    "`replicate_comm`": [lambda c: sharded(c, replicate_comm=c)],
    "`owner`": [lambda c: sharded(c, owner="balanced")],
    "`create_graph=True` at stages 1 to 3": [differentiated_twice],
    "`model.state_dict()` of shards": [lambda c: sharded(c).state_dict()],
    "`torch.nn.utils.clip_grad_norm_`, norms of shards": [
        lambda c: nn.utils.clip_grad_norm_(with_gradients(c).parameters(), 1.0),
        lambda c: nn.utils.clip_grad_norm_(with_gradients(c).parameters(), 1.0, foreach=False),
        lambda c: [p.grad.norm() for p in with_gradients(c).parameters()],
    ],
    "`Muon`, `Adafactor`, `LBFGS` on shards": [
        lambda c: stepped(c, torch.optim.Muon),
        lambda c: stepped(c, torch.optim.Adafactor),
        lambda c: stepped(c, torch.optim.LBFGS),
    ],
    "`copy.deepcopy(model)`, `torch.save(model)`": [
        lambda c: copy.deepcopy(sharded(c)),
        lambda c: copy.deepcopy(DistributedDataParallel(linear(), c)),
    ],
    "a module inside of a unit, or a method other than `forward`": [
        lambda c: sharded(c)[1](torch.ones(4)),
        lambda c: sharded(c, Tail(4, 4)).features(torch.ones(4)),
    ],
    "a forward with gradients inside `summon_full_params`": [summoned],
    "a weight tied to a unit of another model": [tied_outside],
    "a module on `meta` without `reset_parameters`": [on_meta],
    "`set_requires_all_reduce(False)`": [lambda c: sharded(c).set_requires_all_reduce(False)],
    "`set_requires_gradient_sync(..., recurse=False)`": [
        lambda c: sharded(c).set_requires_gradient_sync(True, recurse=False)
    ],
    "`process_group`, `init_sync`, `mixed_precision`, `delay_all_reduce_named_params` of torch's DDP": [
        lambda c: DistributedDataParallel(linear(), c, process_group="group"),
        lambda c: DistributedDataParallel(linear(), c, init_sync=False),
        lambda c: DistributedDataParallel(linear(), c, mixed_precision=object()),
        lambda c: DistributedDataParallel(linear(), c, delay_all_reduce_named_params=[]),
    ],
}
NAMES = {  # words of the message
    "`replicate_comm`": "replicate_comm",
    "`owner`": "owner",
    "`create_graph=True` at stages 1 to 3": "create_graph",
    "`model.state_dict()` of shards": "full_state_dict",
    "`torch.nn.utils.clip_grad_norm_`, norms of shards": "clip_grad_norm_",
    "`Muon`, `Adafactor`, `LBFGS` on shards": "muon|adafactor|lbfgs",
    "`copy.deepcopy(model)`, `torch.save(model)`": r"full_state_dict|\.module",
    "a module inside of a unit, or a method other than `forward`": "register_fsdp_forward_method",
    "a forward with gradients inside `summon_full_params`": "no_grad",
    "a weight tied to a unit of another model": "tied to a parameter",
    "a module on `meta` without `reset_parameters`": "param_init_fn",
    "`set_requires_all_reduce(False)`": "set_requires_all_reduce",
    "`set_requires_gradient_sync(..., recurse=False)`": "recurse",
    "`process_group`, `init_sync`, `mixed_precision`, `delay_all_reduce_named_params` of torch's DDP": (
        "process_group|init_sync|mixed_precision|delay_all_reduce_named_params"
    ),
}


def listed() -> dict[str, str]:
    """The README's table: what is refused, and what to do instead."""
    text = README.read_text().partition("<!-- refused -->")[2].partition("<!-- /refused -->")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    return dict(rows[1:])


def refused(comm: Communicator, what: str) -> None:
    for attempt in REFUSALS[what]:
        with pytest.raises(UnsupportedError, match=NAMES[what]):
            attempt(comm)
        comm.barrier()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_refused_raises_by_name(what: str, world_size: int) -> None:
    run(refused, what, n=world_size)


def test_the_readme_lists_what_is_refused() -> None:
    assert listed().keys() == REFUSALS.keys() == NAMES.keys()
    assert all(listed().values())
    assert issubclass(UnsupportedError, CommError)


def wrong(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="stage"):
        fully_shard(linear(), comm, stage=4)
    with pytest.raises(ValueError, match="max_live_parameters"):
        fully_shard(linear(), comm, max_live_parameters=-1)
    with pytest.raises(ValueError, match="chose nothing"):
        fully_shard(linear(), comm, units=[OddBlock])
    with pytest.raises(ValueError, match="no forward"):
        fully_shard(nn.ModuleList([linear()]), comm)
    with pytest.raises(ValueError, match="wrapped already"):
        fully_shard(fully_shard(linear(), comm), comm)
    with pytest.raises(TypeError, match="comm"):
        fully_shard(linear(), "gloo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        DistributedDataParallel(linear(), comm, bucket_cap_mb=0)
    with pytest.raises(TypeError, match="bucket_cap"):
        DistributedDataParallel(linear(), comm, bucket_cap=1)
    model: Any = fully_shard(linear(), comm)
    for count in (0, -1, True):
        with pytest.raises(ValueError, match="max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(count)
    with pytest.raises(ValueError, match="factor"):
        model.set_gradient_divide_factor(0.0)
    with pytest.raises(ValueError, match="wrapped by fully_shard"):
        model.set_modules_to_forward_prefetch([linear()])
    model.set_is_last_backward(False)
    model.set_requires_all_reduce(True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_arguments_raise_by_name(world_size: int) -> None:
    run(wrong, n=world_size)


class Opaque(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        super().forward(x)
        return iter([x])


def opaque(comm: Communicator) -> None:
    with pytest.raises(TypeError, match="expected tensors, tuples"):
        sharded(comm, Opaque(4, 4))(torch.ones(4))


def test_f13_an_output_that_hides_its_tensors_raises() -> None:
    run(opaque)
