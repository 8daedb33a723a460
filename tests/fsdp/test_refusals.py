"""What is refused raises by name, and the README lists it."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CommError, UnsupportedError
from fsdp import CPUOffloadPolicy, DistributedDataParallel, fully_shard, summon_full_params
from tests.fsdp.models import OddBlock
from tests.ranks import Run, world_sizes

README = Path(__file__).resolve().parents[2] / "README.md"
Refusal = Callable[[Communicator], Any]


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


def wrapped_twice(comm: Communicator) -> None:
    inner = linear()
    first = DistributedDataParallel(inner, comm)
    DistributedDataParallel(inner, comm)
    first(torch.ones(4))


def offloaded_whole(comm: Communicator) -> None:
    """As on a GPU, as far as the check sees."""
    elsewhere = copy.copy(comm)
    elsewhere.__dict__["device"] = torch.device("cuda")
    sharded(elsewhere, stage=0, offload_policy=CPUOffloadPolicy())


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
        lambda c: pickle.dumps(sharded(c)),
        lambda c: pickle.dumps(DistributedDataParallel(linear(), c)),
    ],
    "a module inside of a unit, or a method other than `forward`": [
        lambda c: sharded(c)[1](torch.ones(4)),
        lambda c: sharded(c, Tail(4, 4)).features(torch.ones(4)),
    ],
    "a forward with gradients inside `summon_full_params`": [summoned],
    "a weight tied to a unit of another model": [tied_outside],
    "a module on `meta` without `reset_parameters`": [on_meta],
    "a forward of a `DistributedDataParallel` whose module was wrapped once more": [wrapped_twice],
    "`offload_policy` at stage 0 on a GPU": [offloaded_whole],
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
    "a forward of a `DistributedDataParallel` whose module was wrapped once more": "wrapped once more",
    "`offload_policy` at stage 0 on a GPU": "offload_policy",
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


def refused(comm: Communicator, what: str) -> list[tuple[str, int]]:
    """Where in the package each attempt was refused: file and line."""
    places = []
    for attempt in REFUSALS[what]:
        with pytest.raises(UnsupportedError, match=NAMES[what]) as caught:
            attempt(comm)
        last = traceback.extract_tb(caught.value.__traceback__)[-1]
        places.append((Path(last.filename).name, last.lineno or 0))
        comm.barrier()
    return places


@pytest.mark.parametrize("what", REFUSALS)
@world_sizes(1, 2)
def test_what_is_refused_raises_by_name(run: Run, what: str, world_size: int) -> None:
    run(refused, what, n=world_size)


def test_the_readme_lists_what_is_refused() -> None:
    assert listed().keys() == REFUSALS.keys() == NAMES.keys()
    assert all(listed().values())
    assert issubclass(UnsupportedError, CommError)


def refusals_of(source: Path) -> list[tuple[str, int, int]]:
    """Where a file of the package raises ``UnsupportedError``: its name, first and last line."""
    raises = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Raise)]
    return [
        (source.name, node.lineno, node.end_lineno or node.lineno)
        for node in raises
        if "UnsupportedError" in ast.unparse(node)
    ]


def test_whatever_raises_unsupported_is_listed(run: Run) -> None:
    reached = {place for what in REFUSALS for places in run(refused, what) for place in places}
    sources = [path for path in (README.parent / "fsdp").glob("*.py") if refusals_of(path)]
    assert len(sources) > 5
    for source in sources:
        for name, first, last in refusals_of(source):
            assert any(name == file and first <= line <= last for file, line in reached), (name, first)


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


@world_sizes(1, 2)
def test_wrong_arguments_raise_by_name(run: Run, world_size: int) -> None:
    run(wrong, n=world_size)


class Opaque(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        super().forward(x)
        return iter([x])


def opaque(comm: Communicator) -> None:
    with pytest.raises(TypeError, match="expected tensors, tuples"):
        sharded(comm, Opaque(4, 4))(torch.ones(4))


@world_sizes(2)
def test_f13_an_output_that_hides_its_tensors_raises(run: Run, world_size: int) -> None:
    run(opaque, n=world_size)
