"""torch's reduce operations as ours."""

from __future__ import annotations

from typing import Any

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
