"""The gradient of a shard: a tensor like any other, except where taking it for the whole gradient would be wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives import Communicator, ReduceOp
from collectives.errors import UnsupportedError

_NORMS = frozenset(
    (
        torch.linalg.vector_norm, torch.linalg.norm, torch.linalg.matrix_norm, torch.norm, torch.Tensor.norm,
        torch.nuclear_norm, torch._foreach_norm,
    )
)  # fmt: skip
# Modules of optimizers that compute with whole matrices, or with all parameters as one vector.
_WHOLE_TENSOR_OPTIMIZERS = frozenset(
    ("torch.optim._muon", "torch.optim._adafactor", "torch.optim.lbfgs", "transformers.optimization")
)
_FINITE_CHECK = torch._amp_foreach_non_finite_check_and_unscale_


class ShardGradient(torch.Tensor):
    """This rank's elements of a gradient, in the shape of the shard.

    A norm of it would be a local one, different on every rank; so norms raise ``UnsupportedError`` and name what to
    use, and so do optimizers of torch that need whole tensors. The finite check of ``torch.amp.GradScaler`` is agreed
    between ranks, so that all skip the same steps.
    """

    comm: Communicator

    @staticmethod
    def of(tensor: torch.Tensor, comm: Communicator) -> ShardGradient:
        """``tensor`` itself, guarded; nothing is copied."""
        guarded = tensor.as_subclass(ShardGradient)
        guarded.comm = comm
        return guarded

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller in _WHOLE_TENSOR_OPTIMIZERS:
            raise UnsupportedError(
                f"an optimizer of {caller} needs whole tensors and has this rank's parts; expected one that treats "
                "elements alike, such as AdamW or SGD, or stage 0, where parameters are whole"
            )
        if func in _NORMS:
            raise UnsupportedError(
                f"{getattr(func, '__name__', func)} of a sharded gradient would be the norm of this rank's part only; "
                "expected a norm over all ranks. Use fsdp.clip_grad_norm_(model, max_norm), or for your own sum "
                "p.grad.as_subclass(torch.Tensor) and an all_reduce"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func is _FINITE_CHECK:
            grads, found_inf = args[0], args[1]
            comm = next(g.comm for g in grads if isinstance(g, ShardGradient))
            if found_inf.device == comm.device:
                comm.all_reduce(found_inf, ReduceOp.MAX)
            else:
                shared = found_inf.to(comm.device)
                comm.all_reduce(shared, ReduceOp.MAX)
                found_inf.copy_(shared)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
