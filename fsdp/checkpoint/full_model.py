"""Weights from a file into a wrapped model: each rank reads its slices, or rank 0 reads for all."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.holdings import Holdings
from fsdp.checkpoint.ranks import Ranks
from fsdp.checkpoint.saving import wait_for_pending
from fsdp.checkpoint.sources import DictSource, Source, open_source
from fsdp.checkpoint.tensor_file import NAMES


class LoadResult(NamedTuple):
    """Names of the model that the file does not have, and the other way round; both empty with ``strict``."""

    missing: list[str]
    unexpected: list[str]


def load_full_state_dict(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    *,
    strict: bool = True,
    broadcast: bool = False,
    trust_pickle: bool = False,
) -> LoadResult:
    """Put whole tensors under original names into a wrapped model, in place. Collective.

    Args:
        source: a state dict; or the path of a safetensors file, of a folder of them with an index, of what torch.save
            wrote (DeepSpeed's consolidated weights too), of a torch distributed checkpoint, or of a checkpoint.
        strict: names must be the same. A shape that differs is an error either way; dtypes are cast.
        broadcast: only rank 0 needs ``source``, and sends it tensor by tensor. Otherwise every rank reads its slices.
        trust_pickle: allow files that hold more than tensors and plain values. They may run any code.

    Raises:
        CheckpointError: on every rank; all names and shapes that differ in one message, and the model is as it was. A
            file that cannot be read on the way leaves what was read before.
    """
    holdings = Holdings(model)
    ranks = Ranks(holdings.comm)
    wait_for_pending(model, ranks)

    def open_() -> Source:
        return DictSource(source) if isinstance(source, Mapping) else open_source(source, trust_pickle)

    reader: Source | None = None
    if broadcast:
        opened: list[Source] = []

        def on_rank_0() -> dict[str, tuple[str, tuple[int, ...]]]:
            opened.append(open_())
            return {name: (NAMES[tensor.dtype], tensor.shape) for name, tensor in opened[0].tensors.items()}

        shapes = {name: shape for name, (_, shape) in ranks.on_rank_0(on_rank_0).items()}
        reader = opened[0] if opened else None
    else:
        reader = ranks.together(open_)
        shapes = {name: tensor.shape for name, tensor in reader.tensors.items()}
    result = _compare(holdings, shapes, strict)
    holdings.open_shards()
    with torch.no_grad():
        for name, holding in holdings.tensors.items():
            names = [name, *(other for other, first in holdings.tied.items() if first == name)]
            known = next((n for n in names if n in shapes), None)
            if known is None:
                continue
            start, numel = (holding.start, holding.tensor.numel()) if not broadcast else (0, math.prod(holding.shape))
            part = ranks.together(lambda n=known, s=start, c=numel: _part(reader, n, s, c))  # type: ignore[misc]
            if broadcast:
                part = ranks.broadcast(part)[holding.start : holding.start + holding.tensor.numel()]
            holding.tensor.copy_(part.view(holding.tensor.shape))
    return result


def _part(reader: Source | None, name: str, start: int, numel: int) -> torch.Tensor:
    return torch.empty(0) if reader is None else reader.read(name, start, numel)


def _compare(holdings: Holdings, shapes: Mapping[str, tuple[int, ...]], strict: bool) -> LoadResult:
    aliases: dict[str, list[str]] = {}
    for other, first in holdings.tied.items():
        aliases.setdefault(first, [first]).append(other)
    expected = {name: holding.shape for name, holding in holdings.tensors.items()}
    expected.update({other: expected[first] for other, first in holdings.tied.items()})
    found = set(shapes)
    # A tied parameter is there under any of its names: files of other tools keep one.
    there = {name for names in aliases.values() if found.intersection(names) for name in names}
    missing = [name for name in expected if name not in found and name not in there]
    unexpected = [name for name in shapes if name not in expected and name not in holdings.objects]
    troubles = [
        f"shape of {name!r}: expected {tuple(expected[name])}, found {tuple(shape)}"
        for name, shape in shapes.items()
        if name in expected and tuple(shape) != tuple(expected[name])
    ]
    if strict:
        troubles += [f"missing: {', '.join(missing)}"] if missing else []
        troubles += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
    if troubles:
        raise CheckpointError(f"expected the weights of this model, found others; {'; '.join(troubles)}")
    return LoadResult(missing, unexpected)
