"""Model and optimizer in a checkpoint of torch's distributed checkpointing, read without torch.distributed or ranks.

Such a folder has a pickled index, ``.metadata``, and files of tensors as torch.save writes them one after another. The
index is read with an unpickler that knows the index's own classes by name, and builds plain records in their place;
any other class is refused, so nothing in the file can run, unless whoever opens it trusts it.

Source: the classes of torch.distributed.checkpoint.metadata and .filesystem.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.sources import OptimizerState, Source, Stored, Tensor
from fsdp.checkpoint.tensor_file import read_into

METADATA = ".metadata"
_STATE, _GROUPS = "state", "param_groups"  # of an optimizer
_PREFIXES = ("model.", "app.model.", "state_dict.model.", "state.model.")  # of weights beside an optimizer's state


class _Record:
    """Stands for an instance of one of the index's classes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # of a class with slots, or a tuple of its fields
            slots = len(state) == 2 and isinstance(state[1], dict)
            state = state[1] if slots else {"dtype": state[0]} if state else {}  # of TensorProperties
        self.__dict__.update(state or {})

    def __hash__(self) -> int:
        return id(self)  # keys are looked at one by one


_TORCH = "torch.distributed.checkpoint."
_KNOWN = {
    "metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "filesystem": {"_StorageInfo", "_StoragePrefix"},
}  # fmt: skip
_PLAIN = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda *_: None,
    ("builtins", "getattr"): lambda *_: None,  # so some versions of Python pickle a member of an enum: a memory format
    ("collections", "OrderedDict"): OrderedDict,
    **{(m, n): PurePosixPath for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "PurePosixPath")},
}


class _Unpickler(pickle.Unpickler):
    trusts = False

    def find_class(self, module: str, name: str) -> Any:
        part = module.removeprefix(_TORCH)
        if module.startswith(_TORCH) and name in _KNOWN.get(part, ()):
            return _Record
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if self.trusts:
            return super().find_class(module, name)
        raise CheckpointError(
            f"{METADATA}: expected the classes of a torch distributed checkpoint, found {module}.{name}, which is "
            "refused. If you trust who wrote it with this machine: trust_pickle=True, or --trust-pickle"
        )


class DcpSource(Source):
    """The tensors of such a folder. Names lose a prefix such as ``model.``, where the weights have one in common."""

    def __init__(self, path: Path, trust_pickle: bool = False) -> None:
        self.path = path
        self._weights_only = not trust_pickle
        index = _metadata(path / METADATA, trust_pickle)
        try:
            self._read_index(index)
        except (AttributeError, TypeError, IndexError, KeyError) as error:
            raise CheckpointError(
                f"{path / METADATA}: expected the index of a torch distributed checkpoint, found {error!r}"
            ) from error

    def _read_index(self, index: Any) -> None:
        self._entries: dict[str, Any] = index.state_dict_metadata
        places = {name: place for name, path in (index.planner_data or {}).items() if (place := _place(path))}
        self._optimizer = {name: place for name, place in places.items() if name in self._entries}
        found = [name for name, entry in self._entries.items() if hasattr(entry, "chunks") and name not in places]
        prefix = next((p for p in _PREFIXES if any(name.startswith(p) for name in found)), "")
        if any("optim" not in name.split(".")[0] and not name.startswith(prefix) for name in found):
            prefix = ""
        self._full = {name.removeprefix(prefix): name for name in found if name.startswith(prefix)}
        self.tensors = {name: self._tensor(full) for name, full in self._full.items()}
        self._places = {
            (key.fqn, None if getattr(key, "offset", None) is None else tuple(key.offset)): info
            for key, info in index.storage_data.items()
        }
        self._chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Any]]] = {}
        for full, entry in self._entries.items():
            self._chunks[full] = []
            for chunk in getattr(entry, "chunks", ()):
                offsets = tuple(chunk.offsets)
                info = self._places.get((full, offsets)) or self._places[full, None]
                self._chunks[full].append((offsets, tuple(chunk.sizes), info))

    def _tensor(self, full: str) -> Tensor:
        return Tensor(self._entries[full].properties.dtype, tuple(self._entries[full].size))

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        return self._read(self._full[name], start, numel)

    def optimizer(self) -> OptimizerState:
        state: dict[str | int, dict[str, Any]] = {}
        groups: dict[str | int, dict[str, Any]] = {}
        for full, (kind, owner, key) in self._optimizer.items():
            row = (state if kind == _STATE else groups).setdefault(owner, {})
            row[key] = self._stored(full) if hasattr(self._entries[full], "chunks") else self._object(full)
        if not groups:
            return super().optimizer()
        # Where torch was asked to flatten the state, options are listed by parameter.
        return OptimizerState([{"params": [owner], **options} for owner, options in groups.items()], state)

    def _stored(self, full: str) -> Stored:
        return Stored(self._tensor(full).shape, lambda start, numel: self._read(full, start, numel))

    def _object(self, full: str) -> Any:
        path, contents = self._bytes(self._places[full, None])
        try:
            return torch.load(contents, map_location="cpu", weights_only=self._weights_only)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{path}: expected a plain value for {full!r}, found {error}") from error

    def _read(self, full: str, start: int, numel: int) -> torch.Tensor:
        dtype, shape = self._tensor(full)
        result = torch.empty(numel, dtype=dtype)
        whole = None
        for offsets, sizes, info in self._chunks[full]:
            if 0 in sizes:
                continue
            if sizes[1:] == shape[1:]:  # rows that lie one after another
                row = torch.Size(shape[1:]).numel()
                begin = offsets[0] * row if offsets else 0
                count = torch.Size(sizes).numel()
                first, last = max(start, begin), min(start + numel, begin + count)
                if first < last:
                    part = self._load(info, sizes, dtype).reshape(-1)[first - begin : last - begin]
                    result[first - start : last - start] = part
            else:
                whole = torch.empty(shape, dtype=dtype) if whole is None else whole
                place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                whole[place] = self._load(info, sizes, dtype)
        return result if whole is None else whole.reshape(-1)[start : start + numel].clone()

    def _load(self, info: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        path, contents = self._bytes(info)
        tensor = torch.load(contents, map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes or tensor.dtype != dtype:
            raise CheckpointError(
                f"{path}: expected a tensor of {sizes}, {dtype}, at byte {info.offset}; found another"
            )
        return tensor.detach()

    def _bytes(self, info: Any) -> tuple[Path, io.BytesIO]:
        """A file's name and what the index says is at a place in it."""
        if os.path.basename(info.relative_path) != info.relative_path:
            raise CheckpointError(
                f"{self.path / METADATA}: expected plain names of files, found {info.relative_path!r}"
            )
        path = self.path / info.relative_path
        size = path.stat().st_size
        if not 0 <= info.offset <= info.offset + info.length <= size:
            raise CheckpointError(f"{path}: expected {info.length} bytes at byte {info.offset}, found a file of {size}")
        buffer = bytearray(info.length)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            read_into(fd, path, info.offset, torch.frombuffer(buffer, dtype=torch.uint8).numpy())
        finally:
            os.close(fd)
        return path, io.BytesIO(buffer)


def _place(path: tuple[str | int, ...]) -> tuple[str, str | int, str] | None:
    """Of an entry of an optimizer: whether it is state or an option, of which parameter or group, and its key."""
    for i in range(1, len(path)):
        if not any("optim" in str(part).lower() for part in path[:i]):
            continue
        if path[i] in (_STATE, _GROUPS) and len(path) == i + 3:
            return str(path[i]), path[i + 1], str(path[i + 2])
        kind, _, rest = str(path[i]).partition(".")
        if kind in (_STATE, _GROUPS) and "." in rest and len(path) == i + 1:
            owner, _, key = rest.rpartition(".")
            return kind, owner, key
    return None


def _metadata(path: Path, trust_pickle: bool) -> Any:
    with open(path, "rb") as file:
        unpickler = _Unpickler(file)
        unpickler.trusts = trust_pickle
        try:
            return unpickler.load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path}: expected a pickled index, found {error!r}") from error
