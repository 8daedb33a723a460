"""Reads what is wanted of a checkpoint's files, block by block, each with its checksum verified."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fsdp.checkpoint.checksum import BLOCK, Bytes, checksum
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.manifest import Manifest, StoredTensor
from fsdp.checkpoint.tensor_file import DTYPES, as_bytes, read_into


class _Request(NamedTuple):
    offset: int
    into: Bytes


class Reader:
    """First say what is wanted, then ``run``."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._files = manifest.files
        self._begins = [[0, *accumulate(block.nbytes for block in file.blocks)] for file in manifest.files]
        self._requests: defaultdict[int, list[_Request]] = defaultdict(list)

    def want(self, tensor: StoredTensor, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Elements of ``tensor``, 1-D in host memory, in its own dtype; all of it by default. ``run`` fills them in."""
        numel = tensor.numel if numel is None else numel
        result = torch.empty(numel, dtype=DTYPES[tensor.dtype])
        if numel:
            into, size = as_bytes(result), tensor.itemsize
            for part in tensor.parts:
                first, last = max(start, part.start), min(start + numel, part.start + part.numel)
                if first < last:
                    place = slice((first - start) * size, (last - start) * size)
                    self._requests[part.file].append(_Request(part.offset + (first - part.start) * size, into[place]))
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

    def run(self, also: Sequence[Iterable[int]] = ()) -> None:
        """Read what is wanted. ``also``: blocks of each file to verify, whatever is in them.

        Raises:
            CheckpointError: a file is shorter than it was, or its contents have changed; naming it.
            OSError: it cannot be read.
        """
        scratch = np.empty(BLOCK, dtype=np.uint8)
        for number, needed in enumerate(self.needs()):
            blocks = sorted(needed.union(also[number] if also else ()))
            if blocks:
                self._read(number, blocks, scratch)

    def _read(self, number: int, blocks: Sequence[int], scratch: Bytes) -> None:
        file = self._files[number]
        path = self._checkpoint / file.name
        requests = sorted(self._requests[number], key=lambda request: request.offset)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            first = 0  # of the requests that are not done
            for block in blocks:
                begin, size = self._begins[number][block], file.blocks[block].nbytes
                while first < len(requests) and requests[first].offset + requests[first].into.size <= begin:
                    first += 1
                within = _within(requests, first, begin, size)
                direct = len(within) == 1 and within[0][1].size == size and within[0][1].ctypes.data % 8 == 0
                data = within[0][1] if direct else scratch[:size]
                read_into(fd, path, begin, data)
                if checksum(data) != file.blocks[block].checksum:
                    raise CheckpointError(
                        f"{path}: expected bytes {begin} to {begin + size} as they were written, found others; "
                        "the file is damaged, take another checkpoint"
                    )
                if not direct:
                    for at, into in within:
                        into[:] = data[at : at + into.size]
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(fd)


def _within(requests: Sequence[_Request], first: int, begin: int, size: int) -> list[tuple[int, Bytes]]:
    """What requests from the ``first`` on want of the ``size`` bytes at ``begin``: where in them, and its place."""
    found = []
    while first < len(requests) and requests[first].offset < begin + size:
        offset, into = requests[first]
        a, b = max(offset, begin), min(offset + into.size, begin + size)
        found.append((a - begin, into[a - offset : b - offset]))
        first += 1
    return found
