"""What a checkpoint holds and where: JSON that a person can read, checked before anything else is opened.

    {"format": "collectives-fsdp checkpoint", "version": 2, "step": 10, "world_size": 4,
     "files": [{"name": "rank-00000.safetensors", "nbytes": 1234, "blocks": [[1000, "1f3a5c77"], [234, ...]]}, ...],
     "tensors": {"model": {"weight": {"dtype": "F32", "shape": [5, 3], "parts": [[0, 128, 0, 8], [1, 128, 8, 7]]}},
                 "optimizer.exp_avg": {...}, "values": {...}},
     "tied": {"head.weight": "weight"}, "order": ["weight", ...], "objects": {...}, "optimizer": {...}, "extra": ...}

A part is [number of the file, byte where it begins there, first element of the flattened tensor, elements]. Last comes
"sha256", of all the text before it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fsdp.checkpoint.checksum import BLOCK
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.tensor_file import DTYPES

NAME = "manifest.json"
FORMAT = "collectives-fsdp checkpoint"
VERSION = 2
MODEL, OPTIMIZER, LIKE, VALUES = "model", "optimizer.", "like.", "values"  # families of tensors
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SEAL = ', "sha256": "'


class Part(NamedTuple):
    """Elements ``start`` to ``start + numel`` of a tensor: at byte ``offset`` of file number ``file``."""

    file: int
    offset: int
    start: int
    numel: int


class StoredTensor(NamedTuple):
    """A whole tensor, in parts that lie one after another. ``dtype`` is a key of ``DTYPES``."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


class Block(NamedTuple):
    """Bytes of a file that have a checksum of their own."""

    nbytes: int
    checksum: str


class StoredFile(NamedTuple):
    """A file of the checkpoint; ``blocks`` lie one after another."""

    name: str
    nbytes: int
    blocks: tuple[Block, ...]


Family = dict[str, StoredTensor]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents.

    Args:
        tensors: by family ("model", "optimizer.exp_avg", "values", ...) and name.
        tied: further names of a parameter, and the one that it is stored under.
        order: the model's names as its ``state_dict`` has them.
        objects: what is no tensor in the model's ``state_dict``, encoded.
        optimizer: groups with their options and parameters' names, and what the state of a parameter holds beside
            tensors of its shape; encoded. None where no optimizer was saved.
        extra: encoded.
        rank_extra: of each rank, by place in ``extra``; encoded.
    """

    step: int
    world_size: int
    files: tuple[StoredFile, ...]
    tensors: dict[str, Family]
    tied: dict[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    objects: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    extra: Any = None
    rank_extra: tuple[dict[str, Any], ...] = ()

    def family(self, name: str) -> Family:
        return self.tensors.get(name, {})

    def to_json(self) -> str:
        tensors = {
            family: {name: tensor._asdict() for name, tensor in members.items()}
            for family, members in self.tensors.items()
        }
        files = [file._asdict() for file in self.files]
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return seal(json.dumps({"format": FORMAT, "version": VERSION, **fields, "files": files, "tensors": tensors}))

    def check(self, where: Path) -> None:
        """Raise ``CheckpointError`` where names, sizes or parts contradict each other."""
        for file in self.files:
            if not _PLAIN.fullmatch(file.name):
                raise _wrong(where, f"a file's name to be a plain name in its folder, found {file.name!r}")
            sizes = [block.nbytes for block in file.blocks]
            if sum(sizes) != file.nbytes or not all(0 < size <= BLOCK for size in sizes):
                raise _wrong(where, f"a size of {file.name}, and blocks that add up to it, found {file.nbytes}")
        for family, members in self.tensors.items():
            for name, tensor in members.items():
                self._check_tensor(where, f"{family} {name!r}", tensor)
        for name, other in self.tied.items():
            if other not in self.family(MODEL):
                raise _wrong(where, f"{name!r} to be tied to a tensor of the model, found {other!r}")

    def _check_tensor(self, where: Path, what: str, tensor: StoredTensor) -> None:
        if tensor.dtype not in DTYPES or min(tensor.shape, default=0) < 0:
            raise _wrong(where, f"{what} to have a known dtype and a shape, found {tensor.dtype} and {tensor.shape}")
        at = 0
        for part in tensor.parts:
            if part.start != at or part.numel <= 0:
                raise _wrong(where, f"the parts of {what} to follow one another, found {part} after element {at}")
            at += part.numel
            known = 0 <= part.file < len(self.files)
            if (
                not known
                or part.offset < 0
                or part.offset + part.numel * tensor.itemsize > self.files[part.file].nbytes
            ):
                raise _wrong(where, f"{what} to lie inside of a file, found {part}")
        if at != tensor.numel:
            raise _wrong(where, f"{tensor.numel} elements of {what}, found {at}")


def _wrong(where: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{where}: expected {what}; the manifest is damaged, take another checkpoint")


def stored_file(row: Mapping[str, Any]) -> StoredFile:
    """As JSON has it."""
    blocks = tuple(Block(int(nbytes), str(checksum)) for nbytes, checksum in row["blocks"])
    return StoredFile(str(row["name"]), int(row["nbytes"]), blocks)


def seal(text: str) -> str:
    """A JSON object with the checksum of its text as its last member."""
    before = text[: text.rindex("}")]
    return f'{before}{_SEAL}{hashlib.sha256(before.encode()).hexdigest()}"}}'


def parse(text: str, where: Path) -> Manifest:
    """The manifest in ``text``, read from ``where``, with everything in it checked.

    Raises:
        CheckpointError: it is none, is damaged, or is of a later version.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _wrong(where, f"JSON, found {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _wrong(where, f'"format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{where}: expected a manifest of version {VERSION}, found {data.get('version')!r}; the version of "
            "this package that wrote it reads it"
        )
    if text != seal(text.rpartition(_SEAL)[0] + "}"):
        raise _wrong(where, "its text as it was written, found another")
    try:
        manifest = Manifest(
            step=int(data["step"]),
            world_size=int(data["world_size"]),
            files=tuple(stored_file(row) for row in data["files"]),
            tensors={
                family: {
                    name: StoredTensor(
                        str(row["dtype"]),
                        tuple(int(n) for n in row["shape"]),
                        tuple(Part(*(int(n) for n in part)) for part in row["parts"]),
                    )
                    for name, row in members.items()
                }
                for family, members in data["tensors"].items()
            },
            tied={str(name): str(other) for name, other in data["tied"].items()},
            order=tuple(map(str, data["order"])),
            objects=dict(data["objects"]),
            optimizer=data["optimizer"],
            extra=data["extra"],
            rank_extra=tuple(dict(one) for one in data["rank_extra"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _wrong(where, f"all fields of version {VERSION}, found {type(error).__name__} {error}") from error
    manifest.check(where)
    return manifest
