"""A checksum that keeps up with memory, of blocks of 4 MiB.

A block is read as rows of 4,096 little-endian 64-bit words, its end filled with zeros. Every column is a polynomial in
an odd number, evaluated row by row (Horner's rule) modulo 2**64; the CRC-32 of the columns, their number of bytes in
front, is the checksum. Multiplying by an odd number loses nothing, so every changed word changes its column, wherever
it is; and what moved to another row or column counts otherwise there. CRC-32 or SHA-256 of everything would take
longer than reading does.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

BLOCK = 4 * 2**20  # bytes
_LANES = 4096
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
DIGITS = 8  # of a checksum, hexadecimal

Bytes = NDArray[np.uint8]


def checksum(block: Bytes) -> str:
    """Of at most ``BLOCK`` bytes, 1-D and contiguous."""
    columns = np.zeros(_LANES, dtype=np.uint64)
    whole = block.size // (8 * _LANES) * (8 * _LANES)
    for row in block[:whole].view("<u8").reshape(-1, _LANES):
        np.multiply(columns, _MULTIPLIER, out=columns)
        np.add(columns, row, out=columns)
    if whole < block.size:
        last = np.zeros(8 * _LANES, dtype=np.uint8)
        last[: block.size - whole] = block[whole:]
        np.multiply(columns, _MULTIPLIER, out=columns)
        np.add(columns, last.view("<u8"), out=columns)
    return f"{zlib.crc32(columns.data, zlib.crc32(block.size.to_bytes(8, 'little'))):08x}"
