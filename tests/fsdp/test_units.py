"""What models look like: tied weights, strange outputs, strange dtypes, unused units, failures, copies."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp import DistributedDataParallel, FSDPModule, fully_shard
from fsdp.param_group import Storage
from fsdp.unit import unit_of
from tests.fsdp.models import (
    WIDTH,
    WORDS,
    OddBlock,
    OddNet,
    adamw,
    difference,
    filled,
    full_state,
    loss_of,
    parameter,
    reference,
    sgd,
    train,
    words,
    wrapped,
)  # fmt: skip
from tests.ranks import PROCESSES, Run, world_sizes

# Without accumulation stage 0 does what DDP does, in place, and stage 2 what stage 1 does.
every_strategy = pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full), 3]
)


# Shapes, names and identity


def identity(comm: Communicator, stage: int) -> None:
    model = filled(OddNet(2), comm.rank)
    before = dict(model.named_parameters())
    optim_before = adamw(model.parameters())
    fully_shard(model, comm, stage=stage, units=[OddBlock])
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    expected = dict(filled(OddNet(2)).named_parameters())
    for name, p in after.items():
        assert p.full_shape == expected[name].shape  # type: ignore[attr-defined]
        assert p.dtype == torch.float64
        if p.full_shape:  # type: ignore[attr-defined]
            assert p.shape == (p.numel(),) + (1,) * (expected[name].ndim - 1)
    loss = loss_of(model, words(comm.rank, 0))
    assert all(before[name] is p for name, p in model.named_parameters())
    loss.backward()
    assert all(before[name] is p and p.grad is not None and p.grad.shape == p.shape
               for name, p in model.named_parameters())  # fmt: skip
    optim_before.step()
    assert isinstance(model, OddNet)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.blocks[0], OddBlock)


@pytest.mark.parametrize("stage", [1, 2, 3])
@world_sizes(1, 2, 3, 8)
def test_uneven_shapes_and_names_unchanged(run: Run, world_size: int, stage: int) -> None:
    run(identity, stage, n=world_size)


def optimizer_before(comm: Communicator, strategy: str | int) -> float:
    model = filled(OddNet(2), comm.rank)
    optim = sgd(model.parameters())
    model = wrapped(model, comm, strategy, [OddBlock])
    for step in range(3):
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    return difference(full_state(model), reference(filled(OddNet(2)), comm.world_size, 3, sgd)[0])


@every_strategy
@world_sizes(3)
def test_an_optimizer_built_before_wrapping(run: Run, world_size: int, strategy: str | int) -> None:
    assert max(run(optimizer_before, strategy, n=world_size)) < 1e-10


def bottom_up(comm: Communicator, stage: int) -> float:
    model = filled(OddNet(3), comm.rank)
    for block in model.blocks:
        fully_shard(block, comm, stage=stage)
    fully_shard(model, comm, stage=stage)
    return difference(train(comm, model, 3, adamw)[0], reference(filled(OddNet(3)), comm.world_size, 3, adamw)[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world_sizes(2)
def test_manual_units_bottom_up(run: Run, world_size: int, stage: int) -> None:
    assert max(run(bottom_up, stage, n=world_size)) < 1e-10


class Tied(OddNet):
    def __init__(self) -> None:
        super().__init__(2)
        self.embedding = self.head


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WORDS, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.embedding(batch, self.weight)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WORDS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class TiedAcross(nn.Module):
    """Like GPT-2, but with the embedding and the head as units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.head = Head()
        self.head.weight = self.embed.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedToRoot(TiedAcross):
    """The head is no unit: the root borrows the weight of the embedding's unit."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.head.weight)


def tied(comm: Communicator, strategy: str | int, cls: Any, units: Any) -> tuple[float, bool]:
    model = wrapped(filled(cls(), comm.rank), comm, strategy, units)
    state, _ = train(comm, model, 3, adamw)
    inner = model.module if strategy == "ddp" else model
    names = [n for n, _ in inner.named_parameters(remove_duplicate=False)]
    still = len(names) == 1 + len(dict(inner.named_parameters()))
    return difference(state, reference(filled(cls()), comm.world_size, 3, adamw)[0]), still


@every_strategy
@pytest.mark.parametrize(
    ("cls", "units"),
    [(Tied, None), (Tied, [OddBlock]), (TiedAcross, [Embed, OddBlock, Head]), (TiedToRoot, [Embed, OddBlock])],
)
@world_sizes(2)
def test_tied_params(run: Run, world_size: int, strategy: str | int, cls: Any, units: Any) -> None:
    for worst, still_tied in run(tied, strategy, cls, units, n=world_size):
        assert worst < 1e-10
        assert still_tied


# State that starts as rank 0's


class Mixed(nn.Module):
    """0-dim, integer, and narrow parameters; buffers of three dtypes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0 + rank))
        self.index = nn.Parameter(torch.tensor([1, 2, 3]) + rank, requires_grad=False)
        self.code = nn.Parameter(torch.tensor([7 + rank], dtype=torch.uint8), requires_grad=False)
        self.narrow = nn.Parameter(torch.full((5,), 1.0 + rank, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.full((3,), float(rank)))
        self.register_buffer("count", torch.tensor(rank, dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale * self.index * self.code).sum() + self.narrow.float().sum() * self.mean.sum()


def mixed(comm: Communicator, strategy: str | int) -> None:
    model = wrapped(Mixed(comm.rank), comm, strategy)
    assert difference(full_state(model), dict(Mixed(0).state_dict())) == 0
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(3)).backward()
    optim.step()
    state = full_state(model)
    assert float(state["scale"]) == 2.0 - 0.5 * 6 * 7
    assert state["scale"].shape == ()
    assert state["index"].tolist() == [1, 2, 3]
    assert state["code"].dtype == torch.uint8


@every_strategy
@world_sizes(1, 2, 4)
def test_d19_f1_f11_all_dtypes_start_as_on_rank_0(run: Run, strategy: str | int, world_size: int) -> None:
    run(mixed, strategy, n=world_size)


class TwoDtypes(nn.Module):
    """A part of a unit whose parameters are in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(5))
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.wide + self.narrow.float()


def two_dtypes(comm: Communicator, strategy: str | int) -> None:
    inner = nn.Sequential(TwoDtypes(), TwoDtypes())
    model = wrapped(inner, comm, strategy)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.full((5,), comm.rank + 1.0)).sum().backward()
    if strategy not in ("ddp", 0):
        with pytest.raises(UnsupportedError, match="at rest"):
            inner[0](torch.ones(5))
    optim.step()
    state = {name: value.tolist() for name, value in full_state(model).items()}
    mean = (comm.world_size + 1) / 2
    assert state == {
        "0.wide": [1 - mean] * 5, "0.narrow": [0.0] * 5, "1.wide": [1 - (mean + 1)] * 5, "1.narrow": [0.0] * 5
    }  # fmt: skip


@every_strategy
@world_sizes(1, 3)
def test_mixed_orig_dtypes_in_a_bucket(run: Run, strategy: str | int, world_size: int) -> None:
    run(two_dtypes, strategy, n=world_size)


def different_shapes(comm: Communicator, strategy: str | int, what: str) -> str:
    model = filled(OddNet(1), dtype=torch.float32)
    if comm.rank == 1:
        if what == "shape":
            model.blocks[0].row = parameter(1, 8)
        elif what == "dtype":
            model.blocks[0].row.data = model.blocks[0].row.data.bfloat16()
        else:
            del model.head
    try:
        wrapped(model, comm, strategy)
    except ValueError as error:
        comm.barrier()  # the communicator stays usable
        return str(error)
    return ""


@every_strategy
@pytest.mark.parametrize(("what", "name"), [("shape", "row"), ("dtype", "row"), ("missing", "head")])
def test_init_sync_and_shape_check_raise_on_all_ranks(run: Run, strategy: str | int, what: str, name: str) -> None:
    messages = run(different_shapes, strategy, what, n=3)
    assert len(set(messages)) == 1
    assert name in messages[0]
    assert "rank 1" in messages[0]


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("buf", torch.zeros(1))
        self.step = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.buf.clone()
        self.buf = self.buf + self.step
        return self.w * x


def reassigned_buffer(comm: Communicator, strategy: str | int) -> float:
    inner = Counter()
    inner.step = comm.rank + 1.0
    model = wrapped(inner, comm, strategy)
    model(torch.ones(1))
    model(torch.ones(1))
    return float(inner.seen)


@every_strategy
@world_sizes(2)
def test_d7_buffers_that_are_reassigned_are_still_rank_0s(run: Run, world_size: int, strategy: str | int) -> None:
    assert run(reassigned_buffer, strategy, n=world_size) == [1.0] * world_size


def random_stream(comm: Communicator, strategy: str | int) -> bool:
    torch.manual_seed(comm.rank)
    nn.Linear(3, 3)
    expected = torch.rand(4)
    torch.manual_seed(comm.rank)
    wrapped(nn.Linear(3, 3), comm, strategy)
    return torch.equal(torch.rand(4), expected)


@every_strategy
@PROCESSES
@world_sizes(2)
def test_d17_wrapping_draws_no_random_numbers(run: Run, world_size: int, strategy: str | int) -> None:
    assert run(random_stream, strategy, n=world_size) == [True] * world_size


# Outputs, and units that are not used

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    note: str = ""


class Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


CONTAINERS: dict[str, Any] = {
    "tuple": lambda t: (None, t),
    "dict": lambda t: {"x": t, "n": 3},
    "list": lambda t: [t],
    "namedtuple": lambda t: Pair(t, None),
    "dataclass": lambda t: Record(t),
    "nested": lambda t: {"a": [(None, Record(t))]},
    "object": lambda t: Plain(t),
}


def dig(value: Any) -> torch.Tensor:
    """The tensor inside."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        return next(dig(v) for v in value.values() if not isinstance(v, int))
    if isinstance(value, (tuple, list)):
        return next(dig(v) for v in value if v is not None)
    return value.value


class Packs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = OddBlock()
        self.kind = kind

    def forward(self, *, packed: Any, flag: bool) -> Any:
        assert flag
        return CONTAINERS[self.kind](self.block(dig(packed)))


class Chain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = Packs(kind)
        self.second = Packs(kind)
        self.head = parameter(WORDS, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x: Any = F.embedding(batch, self.head)
        for unit in (self.first, self.second):
            x = unit(packed=x, flag=True)
        y = dig(x)
        y += 1  # a change in place of what a unit returned
        return F.linear(y, self.head)


def contained(comm: Communicator, kind: str, stage: int) -> float:
    model = fully_shard(filled(Chain(kind), comm.rank), comm, stage=stage, units=[Packs])
    state, _ = train(comm, model, 2, adamw)
    return difference(state, reference(filled(Chain(kind)), comm.world_size, 2, adamw)[0])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", CONTAINERS)
@world_sizes(2)
def test_f13_outputs_of_any_container(run: Run, world_size: int, kind: str, stage: int) -> None:
    assert max(run(contained, kind, stage, n=world_size)) < 1e-10


class Alternating(nn.Module):
    """Encoder a in even steps, encoder b in odd ones; the other's output may be computed and left out."""

    def __init__(self, computes_both: bool) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([OddBlock(), OddBlock()])
        self.empty = nn.Identity()
        self.head = parameter(WORDS, WIDTH)
        self.computes_both = computes_both
        self.turn = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.empty(F.embedding(batch, self.head))
        if self.computes_both:
            self.encoders[1 - self.turn % 2](x)
        x = self.encoders[self.turn % 2](x)
        return F.linear(x, self.head)


def alternate(comm: Communicator | None, strategy: str | int, ranks: int, both: bool, to_none: bool) -> Any:
    model: Any = filled(Alternating(both), 0 if comm is None else comm.rank)
    inner = model
    if comm is not None:
        model = wrapped(model, comm, strategy, [OddBlock, nn.Identity])
    optim = sgd(model.parameters())
    missing = []
    for step in range(4):
        optim.zero_grad(set_to_none=to_none)
        for rank in [comm.rank] if comm is not None else range(ranks):
            inner.turn = step
            loss = loss_of(model, words(rank, step))
            (loss if comm is not None else loss / ranks).backward()
        missing.append([p.grad is None for p in inner.parameters()])
        optim.step()
        if comm is not None and strategy not in ("ddp", 0):
            assert all(g.storage is Storage.FREED for g in unit_of(model).runtime.groups)
    return (full_state(model) if comm is not None else model.state_dict()), missing


@every_strategy
@pytest.mark.parametrize("both", [False, True], ids=["skipped", "left out"])
@pytest.mark.parametrize("to_none", [True, False])
@world_sizes(2)
def test_f15_units_that_alternate(run: Run, world_size: int, strategy: str | int, both: bool, to_none: bool) -> None:
    expected, expected_missing = alternate(None, strategy, world_size, both, to_none)
    for state, missing in run(alternate, strategy, world_size, both, to_none, n=world_size):
        assert difference(state, expected) < 1e-10
        assert missing == expected_missing


# Modes, failures, life


def modes(comm: Communicator, strategy: str | int) -> float:
    """Forwards without backward, in any order, change nothing, and see every optimizer step."""
    model = wrapped(filled(OddNet(2), comm.rank), comm, strategy, [OddBlock])
    plain = filled(OddNet(2))
    optim = sgd(model.parameters())
    worst = 0.0
    for step in range(4):
        with torch.inference_mode() if step % 2 else torch.no_grad():
            model.eval()
            plain.load_state_dict(full_state(model))
            worst = max(worst, float((model(words(0, 9)) - plain(words(0, 9))).abs().max()))
            model.train()
        model(words(comm.rank, 7))  # a graph that nobody uses
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    return max(worst, difference(full_state(model), reference(filled(OddNet(2)), comm.world_size, 4, sgd)[0]))


@every_strategy
@world_sizes(2)
def test_eval_inference_mode_and_train_in_any_order(run: Run, world_size: int, strategy: str | int) -> None:
    assert max(run(modes, strategy, n=world_size)) < 1e-10


class Fails(OddNet):
    where = ""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        y = super().forward(batch)
        if self.where == "forward":
            raise KeyError("in forward")
        if self.where == "backward":
            y.register_hook(lambda g: self.fail(g))
        if self.where == "deep in backward":
            x = self.blocks[0](F.embedding(batch, self.embedding))
            x.register_hook(lambda g: self.fail(g))
            y = y + F.linear(self.blocks[1](x), self.head)
        return y

    def fail(self, _: torch.Tensor) -> None:
        raise KeyError("in backward")


def failing(comm: Communicator, strategy: str | int, where: str) -> float:
    inner = filled(Fails(2), comm.rank)
    model = wrapped(inner, comm, strategy, [OddBlock])
    optim = sgd(model.parameters())
    for step in range(2):
        inner.where = where
        with pytest.raises(KeyError):
            loss_of(model, words(comm.rank, 5)).backward()
        inner.where = ""
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    return difference(full_state(model), reference(filled(OddNet(2)), comm.world_size, 2, sgd)[0])


@every_strategy
@pytest.mark.parametrize("where", ["forward", "backward", "deep in backward"])
@world_sizes(2)
def test_training_goes_on_after_an_exception(run: Run, world_size: int, strategy: str | int, where: str) -> None:
    assert max(run(failing, strategy, where, n=world_size)) < 1e-10


def edited(comm: Communicator, stage: int, how: str) -> Any:
    model = fully_shard(filled(OddNet(1), comm.rank), comm, stage=stage)
    optim = sgd(model.parameters())
    p = model.embedding
    if how == "in place":
        with torch.no_grad():
            p.fill_(2.0)
    elif how == "data":
        p.data = torch.full_like(p, 2.0)
    elif how == "assign":
        model.embedding = nn.Parameter(torch.full_like(p, 2.0))
    elif how == "dtype":
        model.float()
    else:
        model.embedding = nn.Parameter(torch.full((WORDS + 1, WIDTH), 2.0))
    try:
        loss_of(model, words(comm.rank, 0)).backward()
    except ValueError as error:
        return str(error)
    assert model.embedding is p
    assert torch.equal(full_state(model)["embedding"], torch.full((WORDS, WIDTH), 2.0, dtype=torch.float64))
    optim.step()
    return not torch.equal(full_state(model)["embedding"], torch.full((WORDS, WIDTH), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["in place", "data", "assign"])
def test_edited_shards_count(run: Run, stage: int, how: str) -> None:
    assert run(edited, stage, how) == [True, True]


@pytest.mark.parametrize("how", ["dtype", "shape"])
def test_replaced_parameters_raise_by_name(run: Run, how: str) -> None:
    for message in run(edited, 3, how):
        assert "embedding" in message or "row" in message or "'" in message


def replaced(comm: Communicator, strategy: str | int) -> None:
    """A whole parameter in place of one that was wrapped: raises on every rank, and the model can be mended."""
    inner = filled(OddNet(1), comm.rank)
    model = wrapped(inner, comm, strategy, [OddBlock])
    before = inner.blocks[0].narrow
    inner.blocks[0].narrow = nn.Parameter(torch.ones(7, WIDTH, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'blocks\.0\.narrow' was replaced after wrapping"):
        model(words(comm.rank, 0))
    inner.blocks[0].narrow = before
    if strategy in ("ddp", 0):
        expected, _ = reference(filled(OddNet(1)), comm.world_size, 2, adamw)
        assert difference(train(comm, model, 2, adamw)[0], expected) < 1e-10


@every_strategy
@world_sizes(2)
def test_d5_a_replaced_parameter_raises_by_name(run: Run, world_size: int, strategy: str | int) -> None:
    run(replaced, strategy, n=world_size)


def put_whole(comm: Communicator, stage: int, name: str, by_data: bool) -> str:
    """A whole parameter put in place of a shard: what the next forward said."""
    model = fully_shard(filled(OddNet(1), comm.rank), comm, stage=stage)
    p = model.get_parameter(name)
    whole = torch.full(p.full_shape, 2.0, dtype=torch.float64)
    if by_data:
        p.data = whole
    else:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(whole))
    try:
        model(words(comm.rank, 0))
    except ValueError as error:
        return str(error)
    assert model.get_parameter(name) is p
    assert torch.equal(full_state(model)[name], whole)
    return "taken"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["embedding", "blocks.0.bias", "blocks.0.scale"])
@world_sizes(1, 2, 3)
def test_d5_ranks_agree_on_a_parameter_that_was_replaced(run: Run, world_size: int, stage: int, name: str) -> None:
    """Also where one of them holds all of it, and cannot tell the whole from its shard."""
    assert run(put_whole, stage, name, True, n=world_size) == ["taken"] * world_size
    for found in run(put_whole, stage, name, False, n=world_size):
        if world_size == 1 and name != "embedding":
            assert found == "taken"
        else:
            assert f"{name!r} was replaced after wrapping" in found


def own_buffers(comm: Communicator) -> float:
    inner = Counter()
    inner.step = comm.rank + 1.0
    model = DistributedDataParallel(inner, comm, broadcast_buffers=False, device_ids=[0])
    model(torch.ones(1))
    model(torch.ones(1))
    return float(inner.seen)


def test_buffers_stay_each_ranks_own_without_broadcast_buffers(run: Run) -> None:
    assert run(own_buffers) == [1.0, 2.0]


def copied(comm: Communicator, strategy: str | int) -> None:
    model = wrapped(filled(OddNet(1)), comm, strategy)
    loss_of(model, words(comm.rank, 0)).backward()
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match=r"full_state_dict|\.module"):
            copying(model)
    if strategy == "ddp":
        twin = copy.deepcopy(model.module)
        assert difference(dict(twin.state_dict()), full_state(model)) == 0
        loss_of(twin, words(comm.rank, 1)).backward()


@every_strategy
@world_sizes(2)
def test_d15_copies_raise_and_say_what_to_copy(run: Run, world_size: int, strategy: str | int) -> None:
    run(copied, strategy, n=world_size)


def trained(comm: Communicator, strategy: str | int) -> list[weakref.ref[Any]]:
    model = wrapped(filled(OddNet(1)), comm, strategy, [OddBlock])
    optim = adamw(model.parameters())
    for step in range(2):
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    full_state(model)
    return [weakref.ref(model), weakref.ref(unit_of(model).runtime), weakref.ref(next(model.parameters()))]


def deleted(comm: Communicator, strategy: str | int) -> list[bool]:
    watched = trained(comm, strategy)
    for turn in range(comm.world_size):  # a collection does nothing while another thread is at one
        comm.barrier()
        if turn == comm.rank:
            gc.collect()
    comm.barrier()
    return [ref() is None for ref in watched]


@every_strategy
@world_sizes(2)
def test_f29_a_deleted_model_is_gone(run: Run, world_size: int, strategy: str | int) -> None:
    assert run(deleted, strategy, n=world_size) == [[True] * 3] * world_size
