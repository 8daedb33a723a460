"""When units are gathered and freed, as users set it: ahead of time, for fewer ranks, together, or hardly ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collectives import Communicator
from collectives.errors import CommError, UnsupportedError
from fsdp import MixedPrecisionPolicy, fully_shard, summon_full_params, synced_forwards
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
    same_bits,
    train,
    words,
    wrapped,
)  # fmt: skip
from tests.ranks import Run, grid, run_ranks, world_sizes

some_backends = grid(threads=(), full=lambda backend, n: backend != "threads" or n != 3)
more_than_one = grid(world_sizes=(2, 3, 4), threads=(), full=lambda backend, n: backend != "threads" or n != 2)
units_ahead = pytest.mark.parametrize(
    "ahead", [-1, pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 2]
)
stages = pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.full), 3])


def calls(comm: Communicator, name: str = "all_gather") -> int:
    found = comm.stats().operations.get(name)
    return found.calls if found else 0


def one_step(comm: Communicator, model: nn.Module, step: int = 0) -> int:
    """The gathers of a forward and backward."""
    before = calls(comm)
    loss_of(model, words(comm.rank, step)).backward()
    return calls(comm) - before


def trains(comm: Communicator, model: nn.Module, plain: nn.Module) -> float:
    """How far three steps are from those of one process."""
    model.zero_grad()
    return difference(train(comm, model, 3, adamw)[0], reference(plain, comm.world_size, 3, adamw)[0])


# Reshard after forward


def on_fewer_ranks(comm: Communicator, size: int) -> tuple[float, int, int, int]:
    model = fully_shard(filled(OddNet(3), comm.rank), comm, units=[OddBlock], reshard_after_forward=size)
    gathers = [one_step(comm, model) for _ in range(2)][1]
    shards = [g.post_forward for g in unit_of(model).runtime.groups if g.post_forward is not None]
    near = calls(shards[0].comm) if shards else 0
    loss = loss_of(model, words(comm.rank, 0))
    held = sum(
        g.post_forward.tensor.numel()
        for g in unit_of(model).runtime.groups
        if g.post_forward is not None and g.post_forward.tensor is not None
    )
    loss.backward()
    with torch.no_grad():
        model(words(comm.rank, 1))
    assert all(g.storage is Storage.FREED for g in unit_of(model).runtime.groups)
    assert all(g.post_forward is None or g.post_forward.tensor is None for g in unit_of(model).runtime.groups)
    return trains(comm, model, filled(OddNet(3))), gathers, near, held


@grid(world_sizes=(4,), threads=(), full=lambda backend, n: backend != "threads")
def test_reshard_after_forward_on_two_of_four_ranks(backend: str, world_size: int) -> None:
    for worst, gathers, near, held in run_ranks(on_fewer_ranks, 2, world_size=world_size, backend=backend):
        assert worst < 1e-10
        assert gathers == 4  # all four in forward; in backward only neighbours
        assert near == 2 * 4
        whole = sum(p.numel() for p in OddNet(3).parameters())
        assert whole / 2 <= held <= whole / 2 + 17 * 16 + 4 * 4 * 16  # aligned starts and cuts


@pytest.mark.parametrize(("size", "gathers"), [(1, 4), (3, 8)])
def test_reshard_after_forward_on_one_or_all_ranks_is_false_or_true(run: Run, size: int, gathers: int) -> None:
    for worst, found, near, _ in run(on_fewer_ranks, size, n=3):
        assert worst < 1e-10
        assert (found, near) == (gathers, 0)


def not_a_divisor(comm: Communicator) -> None:
    for size in (0, 2, 4, -1):
        with pytest.raises(ValueError, match=rf"divides the world size 3, got {size}"):
            fully_shard(nn.Linear(3, 3), comm, reshard_after_forward=size)
    model = fully_shard(nn.Linear(3, 3), comm)
    with pytest.raises(ValueError, match="reshard_after_forward"):
        model.set_reshard_after_forward(2)  # type: ignore[operator]


def test_reshard_after_forward_refuses_what_does_not_divide(run: Run) -> None:
    run(not_a_divisor, n=3)


def several_forwards(comm: Communicator, size: int) -> float:
    """Two graphs at once, checkpointing, and a backward through one graph twice."""
    model = fully_shard(filled(OddNet(2), comm.rank), comm, units=[OddBlock], reshard_after_forward=size)
    plain = filled(OddNet(2))
    first, second = (loss_of(model, words(comm.rank, step)) for step in (0, 1))
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    for rank in range(comm.world_size):
        for step in (0, 0, 1):
            (loss_of(plain, words(rank, step)) / comm.world_size).backward()
    with summon_full_params(model, with_grads=True):
        grads = zip(model.parameters(), plain.parameters(), strict=True)
        return max(float((p.grad - q.grad).abs().max()) for p, q in grads)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_repeated_forward_before_backward_on_fewer_ranks(run: Run, size: int) -> None:
    assert max(run(several_forwards, size, n=4)) < 1e-12


# Prefetch


def gathered(model: nn.Module) -> list[bool]:
    return [unit_of(b).own_groups[0].storage is not Storage.FREED for b in model.blocks]  # type: ignore[union-attr]


class Looks(OddBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look("forward")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.look("backward"))
        return y * 1.0

    look: Any = staticmethod(lambda when: None)


def prefetches(comm: Communicator, forward: int, backward: int, limit: int | None) -> dict[str, Any]:
    """Which blocks are gathered while each of four computes, with lists of so many units ahead (-1: no list)."""
    inner = filled(OddNet(0), comm.rank)
    inner.blocks.extend(Looks() for _ in range(4))
    model = fully_shard(filled(inner, comm.rank), comm, units=[Looks], max_live_parameters=limit)
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        if forward >= 0:
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + forward])
        if backward >= 0:
            block.set_modules_to_backward_prefetch(blocks[max(0, i - backward) : i][::-1])
    seen: dict[str, Any] = {"forward": [], "backward": []}
    for block in blocks:
        block.look = lambda when: seen[when].append(gathered(model))

    def watch(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: seen.update(head=gathered(model)))  # after ours, when the head's backward comes

    model.register_forward_hook(watch)
    for step in range(2):
        seen = {"forward": [], "backward": []}
        loss_of(model, words(comm.rank, step)).backward()
    found: dict[str, Any] = {name: list(rows) for name, rows in seen.items()}
    assert found["head"] == [False, False, False, limit != 0]
    found["gathers"] = one_step(comm, model)
    found["worst"] = trains(comm, model, filled(OddNet(4)))
    return found


def window(ahead: int, backward: bool) -> list[list[bool]]:
    """What is gathered, from the first unit that computes to the last, with ``ahead`` more after it."""
    rows = [[i <= j <= i + ahead for j in range(4)] for i in range(4)]
    return [row[::-1] for row in rows] if backward else rows


@more_than_one
@units_ahead
def test_forward_prefetch(backend: str, world_size: int, ahead: int) -> None:
    for found in run_ranks(prefetches, ahead, -1, None, world_size=world_size, backend=backend):
        assert found["forward"] == window(abs(ahead), False)
        assert found["backward"] == window(1, True)
        assert found["gathers"] == 9
        assert found["worst"] < 1e-10


@more_than_one
@units_ahead
def test_backward_prefetch(backend: str, world_size: int, ahead: int) -> None:
    for found in run_ranks(prefetches, -1, ahead, None, world_size=world_size, backend=backend):
        assert found["backward"] == window(abs(ahead), True)
        assert found["forward"] == window(1, False)
        assert found["gathers"] == 9
        assert found["worst"] < 1e-10


@pytest.mark.parametrize(("limit", "ahead"), [(0, 0), (10**6, 2)])
@world_sizes(3)
def test_memory_rate_limit_max_live_parameters(run: Run, world_size: int, limit: int, ahead: int) -> None:
    for found in run(prefetches, 2, 2, limit, n=world_size):
        assert found["forward"] == window(ahead, False)
        assert found["backward"] == window(ahead, True)
        assert found["worst"] < 1e-10


def stays_gathered(comm: Communicator, stage: int) -> float:
    """What backward leaves gathered is not what the optimizer has made of it: the next forward gathers again."""
    model = fully_shard(filled(OddNet(2), comm.rank), comm, stage=stage, units=[OddBlock])
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    return trains(comm, model, filled(OddNet(2)))


@stages
@world_sizes(2)
def test_optimizer_and_all_gather_ordering(run: Run, world_size: int, stage: int) -> None:
    assert max(run(stays_gathered, stage, n=world_size)) < 1e-10


def buffers(comm: Communicator, count: int) -> tuple[int, float]:
    model = fully_shard(filled(OddNet(4), comm.rank), comm, units=[OddBlock])
    model.set_reduce_scatter_max_input_buffers(count)  # type: ignore[operator]
    reducer = unit_of(model).runtime.reducer
    most = 0
    start = reducer.start

    def counted(group: Any) -> None:
        nonlocal most
        start(group)
        most = max(most, len(reducer._running))

    reducer.start = counted  # type: ignore[method-assign]
    loss_of(model, words(comm.rank, 0)).backward()
    return most, trains(comm, model, filled(OddNet(4)))


@pytest.mark.parametrize("count", [1, 3])
@world_sizes(2)
def test_memory_rate_limit_set_reduce_scatter_max_input_buffers(run: Run, world_size: int, count: int) -> None:
    assert all(most == count and worst < 1e-10 for most, worst in run(buffers, count, n=world_size))


# Small parameters


def resident(comm: Communicator, threshold: int, units: bool) -> tuple[float, int, int, list[str]]:
    model = fully_shard(
        filled(OddNet(3), comm.rank), comm, units=[OddBlock] if units else None, persistence_threshold=threshold
    )
    state = full_state(model)
    assert difference(state, dict(filled(OddNet(3)).state_dict())) == 0
    before = calls(comm, "reduce_scatter")
    gathers = [one_step(comm, model) for _ in range(2)][1]
    reductions = (calls(comm, "reduce_scatter") - before) // 2
    small = [m.name for g in unit_of(model).runtime.groups if not g.strategy.frees_after_forward for m in g.managed]
    with torch.no_grad():
        model(words(comm.rank, 0))
    assert all(g.storage is Storage.FREED for g in unit_of(model).runtime.groups)
    with pytest.raises(UnsupportedError, match="state_dict"):
        model.state_dict()
    with summon_full_params(model):
        assert all(p.shape == p.full_shape for p in model.parameters())  # type: ignore[attr-defined]
    return trains(comm, model, filled(OddNet(3))), gathers, reductions, small


@some_backends
def test_small_params_resident_persistence_threshold(backend: str, world_size: int) -> None:
    names = sorted(f"blocks.{i}.{name}" for i in range(3) for name in ("bias", "row", "scale"))
    for worst, gathers, reductions, small in run_ranks(resident, 7, True, world_size=world_size, backend=backend):
        assert worst < 1e-10
        assert sorted(small) == names
        assert gathers == 3 + 3 + 1 + 1  # blocks twice; the root, and all small ones, once
        assert reductions == 3 + 1 + 1


@pytest.mark.parametrize(("threshold", "gathers"), [(7, 2), (10**6, 1)])
@world_sizes(3)
def test_small_params_resident_of_one_unit(run: Run, world_size: int, threshold: int, gathers: int) -> None:
    for worst, found, reductions, _ in run(resident, threshold, False, n=world_size):
        assert worst < 1e-10
        assert found == reductions == gathers


def all_resident(comm: Communicator) -> tuple[float, int]:
    """Units that are left with nothing of their own still guard, train and tie."""
    model = filled(OddNet(2), comm.rank)
    fully_shard(model, comm, units=[OddBlock], persistence_threshold=10**6)
    return trains(comm, model, filled(OddNet(2))), one_step(comm, model)


@world_sizes(3)
def test_small_params_resident_that_are_all_there_is(run: Run, world_size: int) -> None:
    assert all(worst < 1e-10 and gathers == 1 for worst, gathers in run(all_resident, n=world_size))


# Several modules in one unit


class Layered(nn.Module):
    """The last norm and the head are small and run one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.skips_head = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.linear(x, x.new_ones(WORDS, WIDTH)) if self.skips_head else self.head(x)


def listed(comm: Communicator, stage: int) -> tuple[float, int, int, int]:
    model = filled(Layered(), comm.rank)
    fully_shard(model.embed, comm, stage=stage)
    fully_shard(model.blocks[0], comm, stage=stage)
    pair = [model.blocks[1], model.blocks[2]]
    assert fully_shard(pair, comm, stage=stage) is pair
    fully_shard([model.norm, model.head], comm, stage=stage)
    fully_shard(model, comm, stage=stage)
    before = calls(comm, "reduce_scatter")
    one_step(comm, model)
    gathers = one_step(comm, model)
    reductions = (calls(comm, "reduce_scatter") - before) // 2
    model.skips_head = True
    loss_of(model, words(comm.rank, 0)).backward()
    model.skips_head = False
    if stage:
        assert all(g.storage is Storage.FREED for g in unit_of(model).runtime.groups)
        with pytest.raises(UnsupportedError, match="state_dict"):
            model.head.state_dict()
    model.zero_grad()
    return trains(comm, model, filled(Layered())), gathers, reductions, len(full_state(model))


@some_backends
@stages
def test_manual_units_of_several_modules(backend: str, world_size: int, stage: int) -> None:
    for worst, gathers, reductions, names in run_ranks(listed, stage, world_size=world_size, backend=backend):
        assert worst < 1e-10
        assert names == len(Layered().state_dict())
        if stage:
            assert gathers == (8 if stage == 3 else 4)  # the root has nothing of its own
            assert reductions == 4


def refused_lists(comm: Communicator) -> None:
    block = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="none holds another"):
        fully_shard([block, block[0]], comm)
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([], comm)
    with pytest.raises(ValueError, match="units"):
        fully_shard([block, nn.Linear(3, 3)], comm, units=[nn.Linear])
    with pytest.raises(ValueError, match="no forward"):
        fully_shard([block, nn.ModuleList()], comm)


@world_sizes(2)
def test_manual_units_refuse_lists_that_overlap(run: Run, world_size: int) -> None:
    run(refused_lists, n=world_size)


# Different numbers of forwards


class BorrowingRoot(nn.Module):
    """The root shares the weight of a unit inside, so that unit stays gathered while the root runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = OddBlock()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.last = parameter(WORDS)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(batch))) + self.last


def own_number(comm: Communicator, kind: str) -> None:
    plain: Any = filled(BorrowingRoot() if kind == "tied" else Layered())
    model: Any = filled(BorrowingRoot() if kind == "tied" else Layered(), comm.rank)
    if kind == "tied":
        fully_shard(model, comm, units=[nn.Embedding, OddBlock])
    else:
        fully_shard([model.norm, model.head], comm)
        fully_shard(model, comm, units=[OddBlock], persistence_threshold=5)
    with synced_forwards(model), torch.no_grad():
        for step in range(1 + 2 * comm.rank):
            assert torch.equal(model(words(comm.rank, step)), plain(words(comm.rank, step)))
    assert trains(comm, model, plain) < 1e-10


@pytest.mark.parametrize("kind", ["tied", "list"])
@world_sizes(3)
def test_f23_ranks_that_are_done_gather_what_the_others_do(run: Run, world_size: int, kind: str) -> None:
    run(own_number, kind, n=world_size)


def too_many(comm: Communicator, stage: int) -> str:
    """Rank 0 runs three forwards, the others five, and nothing syncs them."""
    group = comm.split(0)
    assert group is not None
    model = fully_shard(filled(OddNet(2), comm.rank), group, stage=stage, units=[OddBlock])
    group.timeout = 1.0
    message = ""
    try:
        with torch.no_grad():
            for step in range(3 if comm.rank == 0 else 5):
                model(words(comm.rank, step))
    except CommError as error:
        message = str(error)
    comm.barrier()
    group.close()
    return message


@stages
@world_sizes(2)
def test_f23_without_syncing_a_forward_that_others_do_not_run_names_the_unit(
    run: Run, world_size: int, stage: int
) -> None:
    first, *others = run(too_many, stage, n=world_size)
    assert not first
    assert all("'embedding'" in message if stage else not message for message in others)


# Together


def options_together(comm: Communicator, size: int, threshold: int, kept: bool) -> None:
    """Small parameters, fewer ranks, two units ahead, two buffers and quiet micro-steps, all at once; low and wide."""
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)]
    for policy in policies:
        lowered = policy.param_dtype is not None
        models: list[Any] = [filled(Layered(), comm.rank, torch.float32 if lowered else torch.float64) for _ in "ab"]
        model, plain = models
        fully_shard(plain, comm, stage=2, mp_policy=policy)
        shared: dict[str, Any] = {
            "reshard_after_forward": size, "persistence_threshold": threshold, "mp_policy": policy,
        }  # fmt: skip
        fully_shard([model.norm, model.head], comm, **shared)
        fully_shard(model, comm, units=[OddBlock], **shared)
        blocks = list(model.blocks)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch([*blocks[i + 1 :], model.head][:2])
            block.set_modules_to_backward_prefetch(blocks[:i][::-1])
        model.set_reduce_scatter_max_input_buffers(2)
        model.set_reshard_after_backward(not kept)
        optims = [adamw(m.parameters()) for m in models]
        for step in range(3):
            losses = []
            for m, optim in zip(models, optims, strict=True):
                for micro in range(3):
                    m.set_requires_gradient_sync(micro == 2)
                    loss = loss_of(m, words(comm.rank, 3 * step + micro))
                    loss.backward()
                    losses.append(float(loss.detach()))
                optim.step()
                optim.zero_grad()
            assert losses[:3] == losses[3:], (policy, step)
        states = [full_state(m) for m in models]
        assert same_bits(*states)
        assert all(g.storage is Storage.FREED or kept for g in unit_of(model).runtime.groups)


@pytest.mark.parametrize("kept", [False, True], ids=["freed", "kept"])
@grid(threads=(), full=lambda backend, n: backend != "threads" or n not in (1, 2))
def test_options_together_give_the_bits_of_stage_2(backend: str, world_size: int, kept: bool) -> None:
    size = 2 if world_size == 4 else 1 if kept else world_size
    run_ranks(options_together, size, 7, kept, world_size=world_size, backend=backend)


class Slices(nn.Module):
    """Returns a view of its input, and a sum with the other half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = parameter(WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :3], x[:, 3:] + self.scale


class ChangesViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = parameter(WORDS, WIDTH)
        self.units = nn.ModuleList(Slices() for _ in range(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = F.embedding(batch, self.embedding)
        for unit in self.units:
            left, right = unit(x)
            left.mul_(2.0)
            right.view(-1).add_(1.0)
            x = torch.cat([left, right], 1)
        return F.linear(x, self.embedding)


def changed_views(comm: Communicator, strategy: str | int) -> float:
    model = wrapped(filled(ChangesViews(), comm.rank), comm, strategy, [Slices])
    state, _ = train(comm, model, 3, adamw)
    return difference(state, reference(filled(ChangesViews()), comm.world_size, 3, adamw)[0])


@pytest.mark.parametrize("strategy", ["ddp", 1, 3])
@world_sizes(2)
def test_outputs_that_are_views_may_be_changed_in_place(run: Run, world_size: int, strategy: str | int) -> None:
    assert max(run(changed_views, strategy, n=world_size)) < 1e-10
