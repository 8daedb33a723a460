"""``save``: every rank writes its part beside, all agree that it is whole, rank 0 makes it a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint import directory
from fsdp.checkpoint.background import Background
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.holdings import Holdings
from fsdp.checkpoint.ranks import Ranks
from fsdp.checkpoint.snapshot import Snapshot, join

_PENDING = "_fsdp_saving"


class Saving:
    """A checkpoint under way, or done."""

    def __init__(self, ranks: Ranks, result: Background | Path | CheckpointError) -> None:
        self._ranks = ranks
        self._result = result

    def wait(self) -> Path:
        """The checkpoint's folder, once it is there. Collective.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        if isinstance(self._result, Background):
            try:
                self._result = self._result.finish(self._ranks)
            except CheckpointError as error:
                self._result = error
        if isinstance(self._result, CheckpointError):
            raise self._result
        return self._result

    @property
    def writes(self) -> bool:
        """Whether this rank's thread is at work."""
        return isinstance(self._result, Background) and self._result.writes

    @property
    def under_way(self) -> bool:
        """Whether nobody has waited for it yet."""
        return isinstance(self._result, Background)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    async_save: bool = False,
) -> Saving:
    """Save a checkpoint of ``step`` to a folder of its own in the folder ``path``. Collective.

    Each rank writes what it owns to one safetensors file, in a folder that nobody takes for a checkpoint; when every
    rank's file is on the disk, rank 0 renames that. Whoever is killed, and whenever: the checkpoints that were there
    before stay until then. Between steps, not inside of a forward or backward.

    Args:
        path: a folder that all ranks see.
        model: wrapped by ``fully_shard`` or ``DistributedDataParallel``; or not at all, in a process alone.
        optimizer: over parameters of ``model``. None saves none.
        step: at least 0; ``latest`` is the highest.
        extra: whatever else is to come back: plain values, tensors, arrays, and containers of these. Rank 0's counts,
            but for what ``PerRank`` and ``LikeParameters`` mark.
        keep: delete all but so many of the newest checkpoints, when this one is complete.
        async_save: return when everything has been copied to host memory. A thread writes it while training goes on;
            the next ``save`` or ``load`` of this model, or ``wait``, waits for it and raises what went wrong.

    Returns:
        A ``Saving``, whose ``wait()`` is the new folder.

    Raises:
        CheckpointError: it could not be written. The same on every rank; nothing is left behind, earlier checkpoints
            are there, and training may go on.
        ValueError: ranks differ in what they ask for.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step: expected a number from 0 on, found {step!r}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep: expected None or at least 1, found {keep!r}")
    holdings = Holdings(model)
    ranks = Ranks(holdings.comm)
    wait_for_pending(model, ranks)
    asked = ranks.gather((os.fspath(path), step, keep, async_save, optimizer is None))
    if len(set(asked)) > 1:
        raise ValueError(f"save: expected the same arguments of all ranks, found {asked}")
    run = Path(path)

    def taken() -> Snapshot:
        snapshot = Snapshot(holdings, optimizer, extra or {}, ranks.rank)
        if async_save:
            snapshot.copy()
        return snapshot

    snapshot = ranks.together(taken)
    partial = ranks.on_rank_0(lambda: directory.begin(run, step))
    if async_save:
        saving = Saving(ranks, Background(snapshot, partial, step, keep, ranks))
        _holder(model, ranks)[_PENDING] = saving
        return saving
    try:
        parts = ranks.collect(lambda: snapshot.write(partial))
        final = ranks.on_rank_0(lambda: directory.publish(partial, step, join(step, parts)))
    except CheckpointError:
        if ranks.rank == 0:
            directory.remove(partial)
        raise
    if ranks.rank == 0:
        directory.tidy(final, keep)
    return Saving(ranks, final)


def wait_for_pending(model: nn.Module, ranks: Ranks) -> None:
    """Finish what an earlier ``save`` began. Raises what went wrong there, once."""
    saving: Saving | None = _holder(model, ranks).pop(_PENDING, None)
    if saving is not None and saving.under_way:
        saving.wait()


def _holder(model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    return vars(model if ranks.comm is None else ranks.comm)
