"""Which dtypes a unit computes and communicates in."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """dtypes of a unit; None keeps what is there. Only floating-point tensors are ever cast.

    The shard keeps the parameter's own dtype and is the master copy that the optimizer updates.

    Args:
        param_dtype: of the gathered parameters, thus of the computation and of the gather.
        reduce_dtype: of the gradient reduction; None means that of the gathered parameters.
        output_dtype: what the unit's floating-point outputs are cast to.
        cast_forward_inputs: cast the unit's floating-point inputs to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise TypeError(f"{name}: expected a floating-point dtype, got {dtype}")

    def param(self, dtype: torch.dtype) -> torch.dtype:
        """What parameters of ``dtype`` are gathered in."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def reduce(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients of parameters of ``dtype`` are reduced in."""
        return self.reduce_dtype if self.reduce_dtype is not None and dtype.is_floating_point else self.param(dtype)
