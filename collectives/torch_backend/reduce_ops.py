"""What torch's options say of a reduction, as ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from collectives.errors import UnsupportedError
from collectives.types import ReduceOp

_KINDS: Any = dist.ReduceOp.RedOpType  # the type stubs leave it out
_OURS = {getattr(_KINDS, op.name): op for op in ReduceOp}


def reduce_op(asked: Any) -> ReduceOp:
    """Ours for torch's ``ReduceOp``, or its kind. Raises ``UnsupportedError`` for what only NCCL has."""
    kind = getattr(asked, "op", asked)
    found = _OURS.get(kind)
    if found is None:
        raise UnsupportedError(
            f"ReduceOp.{kind.name} is not among those of collectives, {', '.join(op.name for op in ReduceOp)}; scale "
            "the tensor before the call and use SUM"
        )
    return found


def op_of(opts: Any) -> ReduceOp:
    """From options, from a ReduceOp in their place, or SUM."""
    return ReduceOp.SUM if opts is None else reduce_op(getattr(opts, "reduceOp", opts))


def root_of(opts: Any) -> int:
    """The root, from options, or itself in their place."""
    root: int = opts if isinstance(opts, int) else opts.rootRank
    return root


def divide(tensor: torch.Tensor, by: int) -> None:
    """What remains of AVG of integers after their sum."""
    with torch.no_grad():
        tensor.div_(by, rounding_mode="trunc")
