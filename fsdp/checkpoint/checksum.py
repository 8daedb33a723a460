"""A checksum that keeps up with memory.

Bytes are taken as little-endian 64-bit words, the end filled with zeros, in tables of 256 KiB. A table is cut into rows
of 512 words and again into rows of 510; the sums of its columns modulo 2**64, from both, go into a CRC-32 behind the
number of all bytes. A changed word changes its column in both, and two words that share a column in one do not in the
other, so two changes cannot make up for each other, and what moved is missed where it was. CRC-32 or SHA-256 of
everything would take longer than reading does. NumPy holds no lock of Python's meanwhile: a thread that saves does not
stop one that trains.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

BLOCK = 4 * 2**20  # bytes that have a checksum of their own, at most
_TABLE = 2**18  # bytes: stays in a processor's cache for the second look
_WIDTHS = (512, 510)  # their least common multiple is longer than a table

Bytes = NDArray[np.uint8]


def checksum(block: Bytes) -> str:
    """Of bytes that are 1-D and contiguous."""
    found = zlib.crc32(block.size.to_bytes(8, "little"))
    for begin in range(0, block.size, _TABLE):
        table = block[begin : begin + _TABLE]
        if table.size % 8:
            table = np.append(table, np.zeros(-table.size % 8, dtype=np.uint8))
        for width in _WIDTHS:
            found = zlib.crc32(_columns(table.view("<u8"), width).data, found)
    return f"{found:08x}"


def _columns(words: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    whole = words.size // width * width
    sums: NDArray[np.uint64] = np.add.reduce(words[:whole].reshape(-1, width), axis=0)
    sums[: words.size - whole] += words[whole:]
    return sums
