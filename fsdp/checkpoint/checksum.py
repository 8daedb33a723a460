"""A checksum that keeps up with memory, of blocks of 4 MiB.

A block is read in tables of 128 rows of 512 little-endian 64-bit words; its last row is filled with zeros. Every row
gives the sum of its words, each times an odd number of its own, and every column the sum of its words, modulo 2**64;
the CRC-32 of all these, the block's number of bytes in front, is the checksum. Multiplying by an odd number loses
nothing, so a changed word changes its row and its column, and what moved counts otherwise in its new place. CRC-32 or
SHA-256 of everything would take longer than reading does. NumPy holds no lock of Python's meanwhile: a thread that
saves does not stop one that trains.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

BLOCK = 4 * 2**20  # bytes
_WORDS, _ROWS = 512, 128  # of a table: half a MiB, which stays in a processor's cache for the second look
_WEIGHTS = np.multiply.accumulate(np.full(_WORDS, 0x9E3779B97F4A7C15, dtype="<u8"))  # powers of an odd number are odd
DIGITS = 8  # of a checksum, hexadecimal

Bytes = NDArray[np.uint8]


def checksum(block: Bytes) -> str:
    """Of at most ``BLOCK`` bytes, 1-D and contiguous."""
    row = 8 * _WORDS
    whole = block.size // row * row
    found = zlib.crc32(block.size.to_bytes(8, "little"))
    for begin in range(0, whole, _ROWS * row):
        found = _table(block[begin : min(begin + _ROWS * row, whole)], found)
    if whole < block.size:
        last = np.zeros(row, dtype=np.uint8)
        last[: block.size - whole] = block[whole:]
        found = _table(last, found)
    return f"{found:08x}"


def _table(data: Bytes, found: int) -> int:
    table = data.view("<u8").reshape(-1, _WORDS)
    found = zlib.crc32(np.dot(table, _WEIGHTS).data, found)
    return zlib.crc32(np.add.reduce(table, axis=0).data, found)
