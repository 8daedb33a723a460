"""What collectives must answer, computed without communication: the conformance suite's own reference."""

from __future__ import annotations

import torch

from collectives.conformance.reference import (
    ARITHMETIC,
    all_gather,
    all_reduce,
    all_to_all,
    data,
    reduce_scatter,
)

__all__ = ["ARITHMETIC", "DTYPES", "all_gather", "all_reduce", "all_to_all", "data", "reduce_scatter"]

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
