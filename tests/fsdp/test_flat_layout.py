"""The laws of the layout, for any parameters and world sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp.flat_layout import ALIGNMENT, FlatLayout, aligned

NUMELS = st.lists(st.integers(0, 100), min_size=1, max_size=8)
WORLD = st.integers(1, 9)


@given(NUMELS, WORLD)
def test_parameters_and_cuts_are_aligned_and_shards_equal(numels: list[int], world_size: int) -> None:
    layout = FlatLayout.even(numels, world_size)
    assert len(layout.cuts) == world_size + 1
    assert all(n % ALIGNMENT == 0 for n in (*layout.offsets, *layout.cuts))
    assert layout.is_even
    assert layout.numel - sum(map(aligned, numels)) < world_size * ALIGNMENT
    for (begin, numel), following in zip(
        zip(layout.offsets, numels, strict=True), (*layout.offsets[1:], layout.numel), strict=True
    ):
        assert begin + numel <= following


@given(NUMELS, WORLD, st.data())
def test_pieces_rebuild_every_parameter(numels: list[int], world_size: int, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.booleans(), min_size=len(numels), max_size=len(numels)))
    whole = FlatLayout.even(numels, world_size)
    for layout in (whole, whole.subset(wanted)):
        for i, numel in enumerate(layout.numels):
            pieces = [layout.pieces(rank)[i] for rank in range(world_size)]
            held = [element for p in pieces for element in range(p.start, p.start + p.numel)]
            assert held == list(range(numel))
            for rank, piece in enumerate(pieces):
                assert 0 <= piece.offset <= piece.offset + piece.numel <= layout.sizes[rank]
                if piece.numel:
                    assert layout.cuts[rank] + piece.offset == layout.offsets[i] + piece.start


@given(NUMELS, WORLD, st.data())
def test_a_subset_keeps_who_holds_what(numels: list[int], world_size: int, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.booleans(), min_size=len(numels), max_size=len(numels)))
    layout = FlatLayout.even(numels, world_size)
    subset = layout.subset(wanted)
    for rank in range(world_size):
        before = [(p.start, p.numel) for p, want in zip(layout.pieces(rank), wanted, strict=True) if want and p.numel]
        after = [(p.start, p.numel) for p in subset.pieces(rank) if p.numel]
        assert before == after


@given(NUMELS, WORLD)
def test_spans_split_a_buffer_into_parameters(numels: list[int], world_size: int) -> None:
    layout = FlatLayout.even(numels, world_size)
    buffer = torch.arange(layout.numel)
    for part, offset, numel in zip(torch.split(buffer, layout.spans())[::2], layout.offsets, numels, strict=True):
        assert part.tolist() == list(range(offset, offset + numel))
    for rank in range(world_size):
        shard = buffer[layout.cuts[rank] : layout.cuts[rank + 1]]
        parts = torch.split(shard, layout.shard_spans(rank))[::2]
        for part, piece, offset in zip(parts, layout.pieces(rank), layout.offsets, strict=True):
            assert part.tolist() == list(range(offset + piece.start, offset + piece.start + piece.numel))


@pytest.mark.parametrize("world_size", [1, 4])
def test_by_hand(world_size: int) -> None:
    layout = FlatLayout.even([17, 3], world_size)
    assert layout.offsets == (0, 32)
    assert layout.cuts == {1: (0, 48), 4: (0, 16, 32, 48, 64)}[world_size]
    if world_size == 4:
        assert [layout.pieces(r)[0].numel for r in range(4)] == [16, 1, 0, 0]
        assert [layout.pieces(r)[1].numel for r in range(4)] == [0, 0, 3, 0]
        assert layout.subset([False, True]).sizes == (0, 0, 16, 0)
