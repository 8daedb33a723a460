"""What one rank writes, and what all ranks' parts are together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp.checkpoint import manifest as manifests
from fsdp.checkpoint import tensor_file
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.extras import Marked
from fsdp.checkpoint.holdings import Holdings
from fsdp.checkpoint.manifest import Block, Manifest, Part, StoredFile, StoredTensor, stored_file
from fsdp.checkpoint.optimizer_state import NamedState
from fsdp.checkpoint.values import encode

FILE = "rank-{:05d}.safetensors"


@dataclass
class Piece:
    """Elements of the tensor ``name``, which has ``shape``, from ``start`` on; 1-D, shared with the model."""

    family: str
    name: str
    shape: tuple[int, ...]
    start: int
    elements: torch.Tensor

    @property
    def key(self) -> str:
        return f"{self.family}/{self.name}"


class Snapshot:
    """What this rank writes: shares the tensors of model and optimizer until ``copy``.

    Raises:
        CheckpointError: something cannot be written; names it.
    """

    def __init__(
        self,
        holdings: Holdings,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        rank: int,
    ) -> None:
        self.rank = rank
        self.pieces: list[Piece] = []
        self.fields: dict[str, Any] = {}
        self._holdings = holdings
        aside: dict[str, torch.Tensor] = {}
        for name in holdings.tensors:
            self._add(manifests.MODEL, name, holdings.tensors[name].tensor)
        marked = Marked(extra)
        for at, tensors in marked.alike.items():
            for name, tensor in tensors.items():
                self._add_alike(at, name, tensor)
        own: dict[str, torch.Tensor] = {}
        self.fields["rank_extra"] = {
            at: encode(value, f"rank.{rank}.{at}", own) for at, value in marked.per_rank.items()
        }
        if optimizer is not None:
            self._add_optimizer(NamedState(optimizer, holdings), aside)
        if rank == 0:
            self.fields["extra"] = encode(marked.plain, "extra", aside)
            self.fields["objects"] = {n: encode(v, f"object.{n}", aside) for n, v in holdings.objects.items()}
            self.fields["tied"], self.fields["order"] = holdings.tied, holdings.order
            own.update(aside)
        for key, value in own.items():
            self.pieces.append(Piece(manifests.VALUES, key, tuple(value.shape), 0, value.detach().reshape(-1)))
        for piece in self.pieces:
            tensor_file.dtype_name(piece.elements.dtype, piece.key)
        del self._holdings

    def _add(self, family: str, name: str, tensor: torch.Tensor) -> None:
        holding = self._holdings.tensors[name]
        piece = Piece(family, name, holding.shape, holding.start + holding.owned[0], holding.part(tensor))
        self.pieces.append(piece)

    def _add_alike(self, at: str, name: str, tensor: torch.Tensor) -> None:
        name = self._holdings.tied.get(name, name)
        holding = self._holdings.tensors.get(name)
        if holding is None or holding.tensor.shape != tensor.shape:
            expected = (
                "a parameter's name" if holding is None else f"shape {tuple(holding.tensor.shape)}, as on this rank"
            )
            raise CheckpointError(f"extra {at!r}, {name!r}: expected {expected}; found {tuple(tensor.shape)}")
        self._add(manifests.LIKE + at, name, tensor)

    def _add_optimizer(self, state: NamedState, aside: dict[str, torch.Tensor]) -> None:
        for key, tensors in state.alike.items():
            for name, tensor in tensors.items():
                self._add(manifests.OPTIMIZER + key, name, tensor)
        if self.rank:  # rank 0 has what the others have of parameters that are whole
            cut = {name for name, holding in self._holdings.tensors.items() if holding.cut}
            state.beside = {name: values for name, values in state.beside.items() if name in cut}
        self.fields["optimizer"] = state.encoded(aside)

    def copy(self) -> None:
        """Own the values, in host memory."""
        for piece in self.pieces:
            piece.elements = piece.elements.to("cpu", copy=True)

    @property
    def nbytes(self) -> int:
        return sum(piece.elements.nbytes for piece in self.pieces)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write this rank's file, and return what ``join`` wants, as JSON has it. Raises ``OSError``."""
        pieces = [piece for piece in self.pieces if piece.elements.numel()]
        items = [
            tensor_file.Item(p.key, p.elements.dtype, (p.elements.numel(),), lambda p=p: p.elements)  # type: ignore[misc]
            for p in pieces
        ]
        name = FILE.format(self.rank)
        written = tensor_file.write(folder / name, items)
        tensors = [
            [p.family, p.name, tensor_file.NAMES[p.elements.dtype], list(p.shape), p.start, p.elements.numel(),
             written.offsets.get(p.key, 0)]
            for p in self.pieces
        ]  # fmt: skip
        file = StoredFile(name, written.nbytes, tuple(Block(*block) for block in written.blocks))
        return {"file": file._asdict(), "tensors": tensors, **self.fields}


def join(step: int, parts: Sequence[Mapping[str, Any]]) -> Manifest:
    """The manifest of what all ranks wrote, in rank order."""
    families: dict[str, dict[str, StoredTensor]] = {}
    for number, rank in enumerate(parts):
        for family, name, dtype, shape, start, numel, offset in rank["tensors"]:
            members = families.setdefault(family, {})
            tensor = members.setdefault(name, StoredTensor(dtype, tuple(shape), ()))
            if numel:
                members[name] = tensor._replace(parts=(*tensor.parts, Part(number, offset, start, numel)))
    tensors = {
        family: {n: t._replace(parts=tuple(sorted(t.parts, key=lambda p: p.start))) for n, t in members.items()}
        for family, members in families.items()
    }
    first = parts[0]
    return Manifest(
        step=step,
        world_size=len(parts),
        files=tuple(stored_file(rank["file"]) for rank in parts),
        tensors=tensors,
        optimizer=_join_optimizer(parts),
        rank_extra=tuple(rank["rank_extra"] for rank in parts),
        **{name: first[name] for name in ("tied", "objects", "extra")},
        order=tuple(first["order"]),
    )


def _join_optimizer(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if "optimizer" not in parts[0]:
        return None
    state: dict[str, Any] = {}
    for rank in parts:
        for name, values in rank["optimizer"]["state"].items():
            state.setdefault(name, values)
    return {"groups": parts[0]["optimizer"]["groups"], "state": state}
