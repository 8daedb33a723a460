"""Whole tensors by name, read in parts, from whatever people have: one interface over each kind of file.

``open_source`` tells the kind by what is there:

    manifest.json, or a run with such     a checkpoint of this package
    .safetensors, or a folder of them     files of tensors, with an index where there are several
    .metadata                             a torch distributed checkpoint (dcp.py)
    .pt, .pth, .bin, or a folder of .bin  what torch.save wrote: a state dict, also DeepSpeed's consolidated weights
"""

from __future__ import annotations

import json
import os
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp.checkpoint import directory
from fsdp.checkpoint import manifest as manifests
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.tensor_file import DTYPES, Entry, as_bytes, read_header, read_into
from fsdp.checkpoint.values import decode

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ZERO = "zero_to_fp32.py"  # what DeepSpeed puts beside its checkpoints
_NESTED = ("module", "state_dict", "model", "model_state_dict")  # where training scripts keep the weights


class Tensor(NamedTuple):
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Stored(NamedTuple):
    """A tensor of an optimizer's state, to be read: ``read(start, numel)`` gives elements of it, flattened."""

    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]

    def whole(self) -> torch.Tensor:
        return self.read(0, torch.Size(self.shape).numel()).view(self.shape)


class OptimizerState(NamedTuple):
    """What an optimizer keeps, as its ``state_dict()`` has it, but with ``Stored`` in the place of tensors.

    ``groups``: options, and under "params" the parameters, by name or number; ``state``: values by these, by key.
    """

    groups: Sequence[Mapping[str, Any]]
    state: Mapping[str | int, Mapping[str, Any]]


class Source(ABC):
    """Tensors of a model. ``tensors`` has what is there, in the order of the file."""

    tensors: dict[str, Tensor]

    @abstractmethod
    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements of the flattened tensor, 1-D, in host memory; the caller owns them."""

    def whole(self, name: str) -> torch.Tensor:
        """The tensor, in host memory; the caller owns it."""
        tensor = self.tensors[name]
        return self.read(name, 0, torch.Size(tensor.shape).numel()).view(tensor.shape)

    def optimizer(self) -> OptimizerState:
        """The optimizer's state that is there too. Raises ``CheckpointError`` where none is."""
        raise CheckpointError(
            "expected the state of an optimizer, found none; it is in checkpoints that were saved with one, of this "
            "package or torch's distributed ones"
        )


class CheckpointSource(Source):
    """A checkpoint's model, with every name that it has there; without verifying checksums."""

    def __init__(self, path: Path) -> None:
        self.path = directory.resolve(path)
        self.manifest: Manifest = directory.read_manifest(self.path)
        self._stored = self.manifest.family(manifests.MODEL)
        named = {name: self.manifest.tied.get(name, name) for name in self.manifest.order}
        self._names = {name: stored for name, stored in named.items() if stored in self._stored}
        self.tensors = {
            name: Tensor(DTYPES[self._stored[stored].dtype], self._stored[stored].shape)
            for name, stored in self._names.items()
        }

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        return self.read_stored(manifests.MODEL, self._names[name], start, numel)

    def read_stored(self, family: str, name: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Elements of any tensor of the manifest."""
        stored = self.manifest.family(family)[name]
        numel = stored.numel if numel is None else numel
        result = torch.empty(numel, dtype=DTYPES[stored.dtype])
        for part in stored.parts:
            first, last = max(start, part.start), min(start + numel, part.start + part.numel)
            if first < last:
                path = self.path / self.manifest.files[part.file].name
                offset = part.offset + (first - part.start) * stored.itemsize
                _read(path, offset, result[first - start : last - start])
        return result

    def optimizer(self) -> OptimizerState:
        saved = self.manifest.optimizer
        if saved is None:
            return super().optimizer()
        families = [family for family in self.manifest.tensors if family.startswith(manifests.OPTIMIZER)]

        def fetch(key: str) -> torch.Tensor:
            return self._stored_in(manifests.VALUES, key).whole()

        groups = [{**decode(group["options"], fetch), "params": group["params"]} for group in saved["groups"]]
        state: dict[str | int, dict[str, Any]] = {n: decode(values, fetch) for n, values in saved["state"].items()}
        for family in families:
            for name in self.manifest.family(family):
                key = family.removeprefix(manifests.OPTIMIZER)
                state.setdefault(name, {})[key] = self._stored_in(family, name)
        return OptimizerState(groups, state)

    def _stored_in(self, family: str, name: str) -> Stored:
        shape = self.manifest.family(family)[name].shape
        return Stored(shape, lambda start, numel: self.read_stored(family, name, start, numel))


class SafetensorsSource(Source):
    """One file, or those that an index names."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._entries: dict[str, tuple[Path, Entry]] = {}
        for path in files:
            for name, entry in read_header(path).items():
                self._entries[name] = path, entry
        self.tensors = {name: Tensor(entry.dtype, entry.shape) for name, (_, entry) in self._entries.items()}

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        path, entry = self._entries[name]
        result = torch.empty(numel, dtype=entry.dtype)
        _read(path, entry.offset + start * entry.dtype.itemsize, result)
        return result


class DictSource(Source):
    """A state dict in memory, or mapped from files."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
        self.tensors = {name: Tensor(value.dtype, tuple(value.shape)) for name, value in self._state.items()}

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        return self._state[name].reshape(-1)[start : start + numel].to("cpu", copy=True)


def _read(path: Path, offset: int, into: torch.Tensor) -> None:
    if into.numel():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            read_into(fd, path, offset, as_bytes(into))
        finally:
            os.close(fd)


def open_source(path: str | os.PathLike[str], trust_pickle: bool = False) -> Source:
    """What is at ``path``.

    Args:
        trust_pickle: load files of torch.save that hold more than tensors and plain values, which may run any code.

    Raises:
        CheckpointError: nothing that is known is there, or it is damaged.
    """
    from fsdp.checkpoint.dcp import DcpSource

    place = Path(path)
    if not place.exists():
        raise CheckpointError(f"{place}: expected a checkpoint or a file of weights, found nothing")
    if place.is_file():
        return _file(place, trust_pickle)
    if (place / manifests.NAME).exists() or directory.steps(place):
        return CheckpointSource(place)
    if (place / ".metadata").exists():
        return DcpSource(place, trust_pickle)
    for index in sorted(place.glob("*.index.json")):
        files = _indexed(index)
        if all(file.suffix == ".safetensors" for file in files):
            return SafetensorsSource(files)
        merged: dict[str, Any] = {}
        for file in files:
            merged.update(_weights(file, trust_pickle))
        return DictSource(merged)
    for name in ("model.safetensors", "pytorch_model.bin", "*.safetensors"):
        if found := sorted(place.glob(name)):
            return SafetensorsSource(found) if found[0].suffix == ".safetensors" else _file(found[0], trust_pickle)
    if converter := next((at / _ZERO for at in (place, place.parent) if (at / _ZERO).exists()), None):
        raise CheckpointError(
            f"{place}: expected weights, found a DeepSpeed checkpoint, which holds what its ranks had of them; "
            f"consolidate it first: python {converter} {converter.parent} weights"
        )
    raise CheckpointError(
        f"{place}: expected {manifests.NAME}, .metadata, *.index.json, *.safetensors or pytorch_model.bin in it, "
        f"found {', '.join(sorted(os.listdir(place))[:10]) or 'nothing'}"
    )


def _file(path: Path, trust_pickle: bool) -> Source:
    if path.suffix == ".safetensors":
        return SafetensorsSource([path])
    if path.name.endswith(".index.json"):
        return open_source(path.parent, trust_pickle)
    return DictSource(_weights(path, trust_pickle))


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: expected an index with a weight_map, found {error!r}") from error
    for name in names:
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):
            raise CheckpointError(f"{index}: expected plain names of files beside it, found {name!r}")
    return [index.parent / name for name in names]


def _weights(path: Path, trust_pickle: bool) -> Mapping[str, Any]:
    """The state dict in a file of torch.save, mapped rather than read."""
    found = torch_load(path, trust_pickle)
    for name in _NESTED:
        if isinstance(found, Mapping) and not any(isinstance(value, torch.Tensor) for value in found.values()):
            found = found.get(name, found)
    if not isinstance(found, Mapping) or not any(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(f"{path}: expected a state dict of tensors, found {type(found).__name__} without any")
    return found


def torch_load(path: Path, trust_pickle: bool) -> Any:
    """What is in a file of torch.save; tensors are mapped rather than read.

    Raises:
        CheckpointError: it is no such file, or holds objects that may run code, and ``trust_pickle`` is not given.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=_is_zip(path), weights_only=not trust_pickle)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: expected tensors and plain values only, found other objects ({str(error).splitlines()[0]}). If "
            "you trust who wrote it with this machine: trust_pickle=True, or --trust-pickle"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path}: expected a file of torch.save, found {error}") from error


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"
