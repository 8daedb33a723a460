"""``load``: nothing of the model is touched before every rank has read, and verified, all that it wants."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint import directory, optimizer_state
from fsdp.checkpoint import manifest as manifests
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.extras import RANK, Extra, LikeParameters, OtherRanks, unmark
from fsdp.checkpoint.holdings import Holding, Holdings
from fsdp.checkpoint.manifest import Family, Manifest
from fsdp.checkpoint.ranks import Ranks
from fsdp.checkpoint.reader import Reader
from fsdp.checkpoint.saving import wait_for_pending
from fsdp.checkpoint.values import Placeholder, decode


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> Extra:
    """Put a checkpoint into ``model`` and ``optimizer``, in place. Collective.

    It may have been saved at any world size and stage. Each rank reads the bytes that it needs: first to verify them,
    then, when all have, straight into the model and the state that the optimizer has. Only what is cast, or goes to
    another device, is in memory twice.

    Args:
        path: a checkpoint, or the folder of a run, whose newest complete one is meant.
        model: wrapped by ``fully_shard`` or ``DistributedDataParallel``; or not at all, in a process alone.
        optimizer: over parameters of ``model``. Parameters that were never stepped start fresh. None loads none.
        strict: the names of model and checkpoint must be the same, and an optimizer must have been saved. Otherwise
            what both have is loaded, and the result says what was ``missing`` and ``unexpected``. A shape that differs
            is an error either way. Values are cast to the dtypes that the model has.

    Returns:
        The ``extra`` that was saved, a dict, with the ``step``.

    Raises:
        CheckpointError: on every rank; model and optimizer are as they were.
    """
    holdings = Holdings(model)
    ranks = Ranks(holdings.comm)
    wait_for_pending(model, ranks)
    asked = ranks.gather((os.fspath(path), strict, optimizer is None))
    if len(set(asked)) > 1:
        raise ValueError(f"load: expected the same path, strict and optimizer of all ranks, found {asked}")
    checkpoint, manifest = ranks.on_rank_0(lambda: _open(Path(path)))
    found = ranks.together(lambda: _Found(checkpoint, manifest, holdings, optimizer, strict, ranks))
    needs = found.reader.needs()
    everyone = ranks.gather(needs)
    unread = [
        (number, block)
        for number, file in enumerate(manifest.files)
        for block in range(len(file.blocks))
        if not any(block in needed[number] for needed in everyone)
    ]
    mine: list[list[int]] = [[] for _ in manifest.files]
    for number, block in unread[ranks.rank :: ranks.world_size]:
        mine[number].append(block)
    ranks.together(lambda: found.reader.verify(mine))
    holdings.open_shards()
    ranks.together(found.fill)
    found.install()
    return found.extra()


def _open(path: Path) -> tuple[Path, Manifest]:
    checkpoint = directory.resolve(path)
    return checkpoint, directory.read_manifest(checkpoint)


class _Found:
    """What this rank takes from a checkpoint: asked of a reader, then installed."""

    def __init__(
        self,
        checkpoint: Path,
        manifest: Manifest,
        holdings: Holdings,
        optimizer: torch.optim.Optimizer | None,
        strict: bool,
        ranks: Ranks,
    ) -> None:
        self.reader = Reader(checkpoint, manifest)
        self._manifest, self._holdings, self._optimizer, self._ranks = manifest, holdings, optimizer, ranks
        self._compare(checkpoint, strict)
        stored = manifest.family(manifests.MODEL)
        self._values = {
            name: self._slice(stored, known, holding, holding.tensor)
            for name, holding in holdings.tensors.items()
            if (known := self._find(name)) is not None
        }
        self._objects = {
            name: decode(value, self._fetch) for name, value in manifest.objects.items() if name in holdings.objects
        }
        self._alike: dict[str, dict[str, torch.Tensor]] = {}
        self._beside: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        if optimizer is not None and manifest.optimizer is not None:
            self._want_optimizer(optimizer, manifest.optimizer)
        self._per_rank = self._want_per_rank()
        self._extra: Mapping[str, Any] = decode(manifest.extra or {}, self._fetch)
        self._averages = {
            family.removeprefix(manifests.LIKE): {
                name: self._slice(members, known, holding).view(holding.tensor.shape)
                for name, holding in holdings.tensors.items()
                if (known := self._find(name)) in members
            }
            for family, members in manifest.tensors.items()
            if family.startswith(manifests.LIKE)
        }

    def _find(self, name: str) -> str | None:
        """The name under which the checkpoint has the model's tensor ``name``."""
        known = self._manifest.tied.get(name, name)
        return known if known in self._manifest.family(manifests.MODEL) else None

    def _slice(
        self, family: Family, known: str | None, holding: Holding, place: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What this rank has of a tensor, to be read into ``place`` if that can be."""
        assert known is not None
        return self.reader.want(family[known], holding.start, holding.tensor.numel(), place)

    def _fetch(self, key: str) -> torch.Tensor:
        stored = self._manifest.family(manifests.VALUES).get(key)
        if stored is None:
            raise CheckpointError(f"expected a tensor called {key!r} among the values of the manifest, found none")
        return self.reader.want(stored).view(stored.shape)

    def _compare(self, checkpoint: Path, strict: bool) -> None:
        manifest, holdings = self._manifest, self._holdings
        stored = manifest.family(manifests.MODEL)
        there = {*stored, *manifest.tied, *manifest.objects}
        self.missing = [name for name in holdings.order if name not in there]
        known = set(holdings.order)
        self.unexpected = [name for name in manifest.order if name not in known]
        troubles = [
            f"shape of {name!r}: expected {holding.shape}, found {stored[source].shape}"
            for name, holding in holdings.tensors.items()
            if (source := self._find(name)) is not None and stored[source].shape != holding.shape
        ]
        if strict:
            for what, names in (("missing", self.missing), ("unexpected", self.unexpected)):
                if names:
                    troubles.append(f"{what}: {', '.join(names)}")
            if self._optimizer is not None and manifest.optimizer is None:
                troubles.append("an optimizer was asked for, but none was saved")
        if troubles:
            raise CheckpointError(
                f"{checkpoint}: expected a checkpoint of this model, found others; {'; '.join(troubles)}. Load it into "
                "the model that it was saved from, or with strict=False what both have"
            )

    def _want_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        names = optimizer_state.parameter_names(optimizer, self._holdings)
        for family, members in self._manifest.tensors.items():
            if family.startswith(manifests.OPTIMIZER):
                key = family.removeprefix(manifests.OPTIMIZER)
                own = self._alike.setdefault(key, {})
                for name in names.values():
                    known = self._find(name)
                    if known in members:
                        holding = self._holdings.tensors[name]
                        has = optimizer.state[holding.tensor].get(key) if holding.tensor in optimizer.state else None
                        place = has if isinstance(has, torch.Tensor) and has.shape == holding.tensor.shape else None
                        own[known] = self._slice(members, known, holding, place).view(holding.tensor.shape)
        wanted = {self._find(name) for name in names.values()}
        self._beside = {n: decode(values, self._fetch) for n, values in saved["state"].items() if n in wanted}
        for group in saved["groups"]:
            self._groups.append({**decode(group["options"], self._fetch), "params": group["params"]})

    def _want_per_rank(self) -> list[dict[str, Any]]:
        """Of this rank; at another world size of all."""
        rows = self._manifest.rank_extra
        if len(rows) == self._ranks.world_size:
            rows = (rows[self._ranks.rank],)
        return [{at: decode(value, self._fetch) for at, value in row.items()} for row in rows]

    def fill(self) -> None:
        """Read. From here on the model changes."""
        try:
            self.reader.fill()
        except (CheckpointError, OSError) as error:
            raise CheckpointError(
                f"{error}; it was whole a moment ago, and the model has a part of it: load another checkpoint before "
                "you go on"
            ) from error

    def install(self) -> None:
        """Have the model and the optimizer take what was not read into them."""
        holdings = self._holdings
        with torch.no_grad():
            for name, value in self._values.items():
                tensor = holdings.tensors[name].tensor
                if value.data_ptr() != tensor.data_ptr():
                    tensor.copy_(value.view(tensor.shape))
        self._values.clear()
        holdings.restore_objects(self._objects)
        if self._optimizer is not None and self._manifest.optimizer is not None:
            optimizer_state.install(self._optimizer, holdings, self._alike, self._beside, self._groups, self._find)

    def extra(self) -> Extra:
        def find(placeholder: Placeholder) -> Any:
            if placeholder.kind != RANK:
                return LikeParameters(self._averages.get(placeholder.at, {}))
            if len(self._manifest.rank_extra) == self._ranks.world_size:
                return self._per_rank[0].get(placeholder.at)
            return OtherRanks(tuple(row.get(placeholder.at) for row in self._per_rank))

        values = {key: unmark(value, find) for key, value in self._extra.items()}
        return Extra(values, self._manifest.step, self.missing, self.unexpected)
