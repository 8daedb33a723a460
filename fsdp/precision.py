"""Which dtypes a unit computes and communicates in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """dtypes of a unit; None keeps what is there. Only floating-point tensors are ever cast.

    The shard keeps the parameter's own dtype and is the master copy that the optimizer updates.

    Args:
        param_dtype: of the gathered parameters, thus of the computation and of the gather.
        reduce_dtype: of the gradient reduction; None means that of the gathered parameters.
        output_dtype: what the unit's floating-point outputs are cast to.
        cast_forward_inputs: cast the unit's floating-point inputs to ``param_dtype``.
        buffer_dtype: what the unit's floating-point buffers are cast to when it is wrapped. Buffers that are not
            persistent are left alone: they are tables, such as rotary frequencies, and no file restores them.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise TypeError(f"{name}: expected a floating-point dtype, got {dtype}")

    def param(self, dtype: torch.dtype) -> torch.dtype:
        """What parameters of ``dtype`` are gathered in."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def reduce(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients of parameters of ``dtype`` are reduced in."""
        return self.reduce_dtype if self.reduce_dtype is not None and dtype.is_floating_point else self.param(dtype)

    def cast_buffers(self, owners: Iterable[tuple[nn.Module, str]]) -> None:
        """Cast the buffers that modules hold under these names."""
        if self.buffer_dtype is None:
            return
        for module, name in owners:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(self.buffer_dtype)


class Copies:
    """Replicated parameters in the dtype of computation, from a forward to the end of its backward.

    The casts are differentiable, so autograd brings the gradients to the parameters themselves, in their own dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._dtype = dtype
        self._tensors: list[torch.Tensor] = []

    def make(self) -> list[torch.Tensor]:
        """The casts; the same ones until ``drop``. A part of the model may run without gradients first."""
        if not self._tensors:
            with torch.enable_grad():
                self._tensors = [parameter.to(self._dtype) for parameter in self._parameters]
        return self._tensors

    def drop(self) -> None:
        """The parameters may change now."""
        self._tensors = []
