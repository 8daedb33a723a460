"""A checksum that keeps up with memory.

Bytes are taken in tables of 256 KiB, which stay in a processor's cache from reading or until writing; a table as
little-endian 64-bit words, the end filled with zeros, in rows of 510. The sums of its columns modulo 2**64 go into a
CRC-32 behind the number of all bytes. A changed word changes its column, and what has moved by any number of bytes that
disks and memory know as a unit comes to other columns. CRC-32 or SHA-256 of everything would take longer than reading
does. NumPy holds no lock of Python's meanwhile: a thread that saves does not stop one that trains.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK = 4 * 2**20  # bytes that have a checksum of their own, at most
TABLE = 2**18
_WIDTH = 510  # words: no power of two, and more than one word off the next

Bytes = NDArray[np.uint8]


def tables(block: Bytes) -> Iterator[Bytes]:
    """The block, table by table."""
    for begin in range(0, block.size, TABLE):
        yield block[begin : begin + TABLE]


def checksum(nbytes: int, parts: Iterable[Bytes]) -> str:
    """Of a block of ``nbytes``, whose ``tables`` come one by one, each 1-D and contiguous."""
    found = zlib.crc32(nbytes.to_bytes(8, "little"))
    for table in parts:
        if table.size % 8:
            table = np.append(table, np.zeros(-table.size % 8, dtype=np.uint8))
        found = zlib.crc32(_columns(table.view("<u8")).data, found)
    return f"{found:08x}"


def _columns(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    whole = words.size // _WIDTH * _WIDTH
    sums: NDArray[np.uint64] = np.add.reduce(words[:whole].reshape(-1, _WIDTH), axis=0)
    sums[: words.size - whole] += words[whole:]
    return sums
