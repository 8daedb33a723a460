"""What is saved beside model and optimizer: the same on all ranks, of each rank its own, or cut as parameters are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp.checkpoint.values import Placeholder

RANK, LIKE = "rank", "like"  # kinds of placeholders


@dataclass(frozen=True)
class PerRank:
    """In ``extra``: a value that every rank has its own of, such as the state of its random generators.

    ``load`` puts this rank's own value in its place; at another world size ``OtherRanks``.
    """

    value: Any


@dataclass(frozen=True)
class OtherRanks:
    """What ``PerRank`` comes back as at another world size: the values of all ranks that saved, in rank order."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class LikeParameters:
    """In ``extra``: tensors that lie as the model's parameters do, by the parameters' names, such as their averages.

    Each has the shape that the parameter has on this rank; ``load`` gives them as the parameters lie then.
    """

    tensors: Mapping[str, torch.Tensor]


class Extra(dict[str, Any]):
    """What ``load`` returns: the ``extra`` that was saved.

    Attributes:
        step: that was saved.
        missing: names of the model that the checkpoint does not have; their values are as before.
        unexpected: names of the checkpoint that the model does not have.
    """

    def __init__(self, values: Mapping[str, Any], step: int, missing: list[str], unexpected: list[str]) -> None:
        super().__init__(values)
        self.step = step
        self.missing = missing
        self.unexpected = unexpected


class Marked:
    """``extra`` with placeholders for what is not the same on all ranks, and that by its place."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self.per_rank: dict[str, Any] = {}
        self.alike: dict[str, Mapping[str, torch.Tensor]] = {}
        self.plain = {key: self._mark(value, key) for key, value in extra.items()}

    def _mark(self, value: Any, at: str) -> Any:
        if isinstance(value, PerRank):
            self.per_rank[at] = value.value
            return Placeholder(RANK, at)
        if isinstance(value, LikeParameters):
            self.alike[at] = value.tensors
            return Placeholder(LIKE, at)
        if type(value) is dict:
            return {key: self._mark(item, f"{at}.{key}") for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._mark(item, f"{at}.{i}") for i, item in enumerate(value))
        return value


def unmark(value: Any, find: Callable[[Placeholder], Any]) -> Any:
    """``value`` with what ``find`` gives in the place of placeholders."""
    if isinstance(value, Placeholder):
        return find(value)
    if type(value) is dict:
        return {key: unmark(item, find) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(unmark(item, find) for item in value)
    return value
