"""One file of tensors in the safetensors format: written in one pass with checksums, read by byte ranges.

    8 bytes: length of the header | header: JSON, name -> dtype, shape, first and last byte | the tensors' bytes

Source: the description of the format at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fsdp.checkpoint.checksum import BLOCK, Bytes, checksum, tables
from fsdp.checkpoint.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
DIRECT = 2**18  # bytes of a tensor from which on it has blocks of its own, which are written without a copy
_ADVISES = hasattr(os, "posix_fadvise")  # macOS has none
MAX_HEADER = 100_000_000  # bytes: what other readers of the format accept


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The format's name of ``dtype``. Raises ``CheckpointError``, naming ``what``, where it has none."""
    if dtype not in NAMES:
        raise CheckpointError(f"{what}: expected a dtype that safetensors files have, found {dtype}; convert it before")
    return NAMES[dtype]


class Item(NamedTuple):
    """A tensor to write. ``load`` gives its elements, 1-D or not, on any device, when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Written:
    """A file's size in bytes, its blocks as sizes and checksums, and where each tensor's bytes begin."""

    nbytes: int
    blocks: list[tuple[int, str]]
    offsets: dict[str, int]


def write(path: Path, items: Sequence[Item], metadata: Mapping[str, str] | None = None) -> Written:
    """Write a new file and bring it to the disk. Raises ``OSError`` with the file's name.

    One tensor's bytes at a time, in pieces of 4 MiB, are in memory beside what ``load`` gives.
    """
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)  # so that each lies on a multiple of its size
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    for item in ordered:
        begin, end = end, end + math.prod(item.shape) * item.dtype.itemsize
        offsets[item.name] = begin
        header[item.name] = {
            "dtype": dtype_name(item.dtype, item.name),
            "shape": list(item.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        sink = _Sink(fd)
        sink.add(np.frombuffer(struct.pack("<Q", len(raw)) + raw, dtype=np.uint8))
        for item in ordered:
            if math.prod(item.shape):
                for part in _pieces(item):
                    sink.add(part)
        sink.flush()
        os.fsync(fd)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)
    data = 8 + len(raw)
    return Written(data + end, sink.blocks, {name: data + at for name, at in offsets.items()})


def _pieces(item: Item) -> Iterator[Bytes]:
    flat = item.load().detach().reshape(-1)
    if flat.numel() != math.prod(item.shape) or flat.dtype != item.dtype:
        raise CheckpointError(f"{item.name}: expected {item.shape} of {item.dtype}, found {flat.shape} of {flat.dtype}")
    if flat.device.type == "cpu":
        yield as_bytes(flat.contiguous())
        return
    for piece in torch.split(flat, BLOCK // item.dtype.itemsize):
        yield as_bytes(piece.cpu())


def as_bytes(flat: torch.Tensor) -> Bytes:
    """The bytes of a 1-D contiguous tensor in host memory, shared with it."""
    return flat.detach().view(torch.uint8).numpy()


class _Sink:
    """Writes blocks, each with its checksum: of large data as they are, of small ones put together."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._scratch = np.empty(BLOCK, dtype=np.uint8)
        self._filled = 0
        self._begun, self._end = 0, 0  # bytes on their way to the disk, and bytes written
        self.blocks: list[tuple[int, str]] = []

    def add(self, data: Bytes) -> None:
        if data.size >= DIRECT and data.ctypes.data % 8 == 0:
            self.flush()
            for begin in range(0, data.size, BLOCK):
                self._write(data[begin : begin + BLOCK])
            return
        done = 0
        while done < data.size:
            count = min(BLOCK - self._filled, data.size - done)
            self._scratch[self._filled : self._filled + count] = data[done : done + count]
            self._filled += count
            done += count
            if self._filled == BLOCK:
                self.flush()

    def flush(self) -> None:
        if self._filled:
            self._write(self._scratch[: self._filled])
            self._filled = 0

    def _write(self, block: Bytes) -> None:
        self.blocks.append((block.size, checksum(block.size, self._written(block))))
        self._end += block.size
        if _ADVISES and self._end - self._begun >= BLOCK:
            # Linux begins to write when it is told so, and fsync finds less to do; what is under way stays cached.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, self._begun, self._end - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._end

    def _written(self, block: Bytes) -> Iterator[Bytes]:
        """Each table, once it is written: it is in the cache then, and read from memory once."""
        for table in tables(block):
            left = table.data
            while left:
                left = left[os.write(self._fd, left) :]
            yield table


class Entry(NamedTuple):
    """A tensor in a file: ``offset`` is where its bytes begin, from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> dict[str, Entry]:
    """What is in a file, every offset and size checked against the file's own.

    Raises:
        CheckpointError: it is no such file, or is cut short.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else MAX_HEADER
        if length > min(MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: expected a safetensors file, found none, or one cut short ({size} bytes)")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {}
        for name, row in header.items():
            begin, end = row["data_offsets"]
            dtype, shape = DTYPES[row["dtype"]], tuple(int(n) for n in row["shape"])
            if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name!r} has offsets {begin} to {end} for {shape} of {dtype}")
            if 8 + length + end > size:
                raise ValueError(f"{name!r} ends at byte {8 + length + end} of {size}: the file is cut short")
            entries[name] = Entry(dtype, shape, 8 + length + begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected the header of a safetensors file, found {error}; take another copy of the file"
        ) from error
    return entries


def read_into(fd: int, path: Path, offset: int, into: Bytes) -> None:
    """Fill ``into`` from byte ``offset`` on. Raises ``CheckpointError`` where the file ends before."""
    left = into.data
    while left:
        count = os.preadv(fd, [left], offset)
        if count == 0:
            raise CheckpointError(f"{path}: expected {len(left)} more bytes at byte {offset}, found the file's end")
        left, offset = left[count:], offset + count
