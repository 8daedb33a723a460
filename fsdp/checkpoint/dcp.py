"""The model in a checkpoint of torch's distributed checkpointing, read without torch.distributed and without ranks.

Such a folder has a pickled index, ``.metadata``, and files of tensors as torch.save writes them one after another. The
index is read with an unpickler that knows the index's own classes by name, and builds plain records in their place;
any other class is refused, so nothing in the file can run.

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
from fsdp.checkpoint.sources import Source, Tensor
from fsdp.checkpoint.tensor_file import read_into

METADATA = ".metadata"
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
    def find_class(self, module: str, name: str) -> Any:
        part = module.removeprefix(_TORCH)
        if module.startswith(_TORCH) and name in _KNOWN.get(part, ()):
            return _Record
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CheckpointError(
            f"{METADATA}: expected the classes of a torch distributed checkpoint, found {module}.{name}, which is "
            "refused; load the checkpoint with torch and save its model as safetensors"
        )


class DcpSource(Source):
    """The tensors of such a folder. Names lose a prefix such as ``model.``, where the weights have one in common."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = _metadata(path / METADATA)
        try:
            self._read_index(index)
        except (AttributeError, TypeError, IndexError, KeyError) as error:
            raise CheckpointError(
                f"{path / METADATA}: expected the index of a torch distributed checkpoint, found {error!r}"
            ) from error

    def _read_index(self, index: Any) -> None:
        found = {
            name: entry for name, entry in index.state_dict_metadata.items() if hasattr(entry, "chunks")
        }  # the others are pickled objects
        prefix = next((p for p in _PREFIXES if any(name.startswith(p) for name in found)), "")
        if any("optim" not in name.split(".")[0] and not name.startswith(prefix) for name in found):
            prefix = ""
        self._full = {name.removeprefix(prefix): name for name in found if name.startswith(prefix)}
        self.tensors = {
            name: Tensor(found[full].properties.dtype, tuple(found[full].size)) for name, full in self._full.items()
        }
        self._chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Any]]] = {}
        places = {
            (key.fqn, None if getattr(key, "offset", None) is None else tuple(key.offset)): info
            for key, info in index.storage_data.items()
        }
        for full in self._full.values():
            self._chunks[full] = []
            for chunk in found[full].chunks:
                offsets = tuple(chunk.offsets)
                info = places.get((full, offsets)) or places[full, None]
                self._chunks[full].append((offsets, tuple(chunk.sizes), info))

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        dtype, shape = self.tensors[name]
        result = torch.empty(numel, dtype=dtype)
        whole = None
        for offsets, sizes, info in self._chunks[self._full[name]]:
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
        tensor = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes or tensor.dtype != dtype:
            raise CheckpointError(
                f"{path}: expected a tensor of {sizes}, {dtype}, at byte {info.offset}; found another"
            )
        return tensor.detach()


def _metadata(path: Path) -> Any:
    with open(path, "rb") as file:
        try:
            return _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path}: expected a pickled index, found {error!r}") from error
