"""Reads what is wanted of a checkpoint's files: verifies it first, block by block, and then puts it where it belongs.

Memory that a process has not touched before costs more than the reading does, and a copy of everything beside may be
more than there is. So files are read twice, the second time from the system's cache: once through a cache-sized scratch
past the checksums, and, when every rank has found its part whole, straight into the tensors.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fsdp.checkpoint.checksum import TABLE, Bytes, checksum
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.manifest import Manifest, StoredTensor
from fsdp.checkpoint.tensor_file import DTYPES, as_bytes, read_into


class _Request(NamedTuple):
    offset: int
    into: Bytes


class Reader:
    """First say what is wanted, then ``verify``, then ``fill``."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._files = manifest.files
        self._begins = [[0, *accumulate(block.nbytes for block in file.blocks)] for file in manifest.files]
        self._requests: defaultdict[int, list[_Request]] = defaultdict(list)
        self._places: list[torch.Tensor] = []

    def want(
        self, tensor: StoredTensor, start: int = 0, numel: int | None = None, place: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Elements of ``tensor``, all of it by default, which ``fill`` reads; 1-D in host memory, in its own dtype.

        Args:
            place: where they may go, if it is such memory; until then it stays as it is.
        """
        numel = tensor.numel if numel is None else numel
        dtype = DTYPES[tensor.dtype]
        if place is not None and _is_plain(place, dtype):
            result = place.detach().view(-1)
            self._places.append(result)
        else:
            result = torch.empty(numel, dtype=dtype)
        if numel:
            into, size = as_bytes(result), tensor.itemsize
            for part in tensor.parts:
                first, last = max(start, part.start), min(start + numel, part.start + part.numel)
                if first < last:
                    bytes_of_part = slice((first - start) * size, (last - start) * size)
                    request = _Request(part.offset + (first - part.start) * size, into[bytes_of_part])
                    self._requests[part.file].append(request)
        return result

    def needs(self) -> list[set[int]]:
        """The blocks of each file that hold something wanted."""
        found: list[set[int]] = []
        for number in range(len(self._files)):
            blocks: set[int] = set()
            begins = self._begins[number]
            for offset, into in self._requests[number]:
                blocks.update(range(bisect_right(begins, offset) - 1, bisect_left(begins, offset + into.size)))
            found.append(blocks)
        return found

    def verify(self, also: Sequence[Iterable[int]] = ()) -> None:
        """Compare what is wanted with its checksums. ``also``: blocks of each file, whatever is in them.

        Raises:
            CheckpointError: a file is shorter than it was, or its contents have changed; naming it.
            OSError: it cannot be read.
        """
        scratch = np.empty(TABLE, dtype=np.uint8)
        for number, needed in enumerate(self.needs()):
            if blocks := sorted(needed.union(also[number] if also else ())):
                with self._opened(number) as (fd, path):
                    for block in blocks:
                        self._verify(number, block, fd, path, scratch)

    def _verify(self, number: int, block: int, fd: int, path: Path, scratch: Bytes) -> None:
        begin, (nbytes, expected) = self._begins[number][block], self._files[number].blocks[block]
        if checksum(nbytes, _read_tables(fd, path, begin, nbytes, scratch)) != expected:
            raise CheckpointError(
                f"{path}: expected bytes {begin} to {begin + nbytes} as they were written, found others; the file is "
                "damaged, take another checkpoint"
            )

    def fill(self) -> None:
        """Read what is wanted.

        Raises:
            CheckpointError, OSError: a file is no longer what it was; something has been read.
        """
        for number, requests in self._requests.items():
            with self._opened(number) as (fd, path):
                for offset, into in sorted(requests, key=lambda request: request.offset):
                    read_into(fd, path, offset, into)
        # A graph that holds one must not be used any more.
        torch.autograd.graph.increment_version([place for place in self._places if not place.is_inference()])

    @contextlib.contextmanager
    def _opened(self, number: int) -> Generator[tuple[int, Path]]:
        path = self._checkpoint / self._files[number].name
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd, path
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(fd)


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes of a file can go to its memory as they are."""
    in_order = tensor.layout is torch.strided and tensor.is_contiguous()
    return in_order and tensor.is_cpu and tensor.dtype == dtype and not tensor.is_conj() and not tensor.is_neg()


def _read_tables(fd: int, path: Path, begin: int, nbytes: int, scratch: Bytes) -> Iterator[Bytes]:
    for at in range(0, nbytes, TABLE):
        table = scratch[: min(TABLE, nbytes - at)]
        read_into(fd, path, begin + at, table)
        yield table
