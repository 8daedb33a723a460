"""Where shards wait between uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CPUOffloadPolicy:
    """Keep shards, their gradients and optimizer state in host memory.

    Args:
        pin_memory: page-lock the host memory, so that copies to the device overlap with computation.
    """

    pin_memory: bool = True
