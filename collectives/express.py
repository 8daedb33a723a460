"""The short way, for small messages, where every microsecond in Python counts.

It serves a synchronous call whose signature went the long way to the library before, with nothing to pack, round or
divide and nothing pending; and any such call of a rank that is alone. Where that is not so it does nothing, and the
long way says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from collectives.backend import Backend, Pending
from collectives.collective import Collective
from collectives.fork import forget_in_child
from collectives.operation import DONE
from collectives.progress import Progress
from collectives.statistics import Row
from collectives.types import ReduceOp, Work
from collectives.validate import Unmet

_STRIDED = torch.strided


class _Known(NamedTuple):
    """A signature that may go the short way, and how. Sizes are in bytes."""

    start: Callable[..., Pending]
    what: Callable[[], str]
    unmet: Unmet | None  # where such calls are counted
    row: Row
    sent: int
    own: int  # where this rank's part of the larger tensor begins
    larger: int
    smaller: int
    untouched: bool  # by autograd: the tensors' addresses are all that is used


class Express:
    """The signatures of one communicator that may go the short way."""

    def __init__(self, backend: Backend, progress: Progress, where: str) -> None:
        self._backend = backend
        self._progress = progress
        self._where = where
        self._device = backend.device
        self._on_cpu = backend.device.type == "cpu"  # which is asked for faster than any other device
        self._known: dict[tuple[Any, ...], _Known] = {}
        forget_in_child(self)

    def learn(self, call: Collective, what: Callable[[], str], row: Row, unmet: Unmet | None) -> None:
        """Calls with this signature, which is the library's or that of a rank that is alone, go the short way now.

        They are noted in ``unmet``, and go the long way where it is full.
        """
        alone = self._backend.size == 1
        start = _ALONE[call.operation] if alone else getattr(self._backend, f"_{call.operation}")
        argument = call.root if call.op is None else call.op
        key: tuple[Any, ...] = (call.operation, argument, call.dtype, call.numel)
        nbytes = call.numel * call.dtype.itemsize
        part = nbytes // self._backend.size
        if call.operation in ("all_gather", "reduce_scatter"):
            key += (call.numel // self._backend.size,)
        self._known[key] = _Known(
            start,
            what,
            unmet,
            row,
            call.least_bytes(self._backend.size, self._backend.rank),
            part * self._backend.rank,
            nbytes,
            part,
            self._backend.by_address and not alone,
        )

    def forget(self) -> None:
        """From now on every call goes the long way, which may refuse it."""
        self._known.clear()

    def one(self, operation: str, argument: ReduceOp | int, tensor: torch.Tensor, timeout: float) -> Work | None:
        """Carry out an operation in place. None where it must go the long way."""
        if not isinstance(tensor, torch.Tensor):
            return None
        numel = tensor.numel()
        known = self._known.get((operation, argument, tensor.dtype, numel))
        if known is None or tensor.layout is not _STRIDED or not tensor.is_contiguous():
            return None
        if not (tensor.is_cpu if self._on_cpu else tensor.device == self._device):
            return None
        if not known.untouched and (tensor.requires_grad or tensor.is_inference()):
            return None
        flat = _flat(tensor, numel)
        return None if flat is None else self._run(known, (flat, argument), timeout)

    def two(
        self,
        operation: str,
        argument: ReduceOp | None,
        larger: torch.Tensor,
        smaller: torch.Tensor,
        timeout: float,
    ) -> Work | None:
        """Carry out an all_gather into ``larger`` or a reduce_scatter from it. None where it must go the long way."""
        if not isinstance(larger, torch.Tensor) or not isinstance(smaller, torch.Tensor):
            return None
        numel, part, dtype = larger.numel(), smaller.numel(), larger.dtype
        known = self._known.get((operation, argument, dtype, numel, part))
        if known is None or smaller.dtype != dtype:
            return None
        if larger.layout is not _STRIDED or smaller.layout is not _STRIDED:
            return None
        if not larger.is_contiguous() or not smaller.is_contiguous():
            return None
        if not (
            larger.is_cpu and smaller.is_cpu
            if self._on_cpu
            else larger.device == self._device and smaller.device == self._device
        ):
            return None
        apart = smaller.data_ptr() - larger.data_ptr()
        if -known.smaller < apart < known.larger and apart != known.own:
            return None  # they overlap as they must not
        written = larger if argument is None else smaller
        if not known.untouched and (written.requires_grad or written.is_inference()):
            return None
        whole, piece = _flat(larger, numel), _flat(smaller, part)
        if whole is None or piece is None:
            return None
        return self._run(known, (whole, piece) if argument is None else (piece, whole, argument), timeout)

    def _run(self, known: _Known, arguments: tuple[Any, ...], timeout: float) -> Work | None:
        if (unmet := known.unmet) is not None and unmet.full:
            return None
        if not self._progress.claim():
            return None
        if unmet is not None:
            unmet.note(known.what)
        self._progress.run(known.start, arguments, known.what, known.row, known.sent, self._where, timeout)
        return DONE


def _flat(tensor: torch.Tensor, numel: int) -> torch.Tensor | None:
    """A contiguous tensor in one dimension; None where its values are not those in its memory."""
    if tensor.dim() == 1 < numel:
        return tensor
    return None if tensor.is_neg() else tensor.as_strided((numel,), (1,))


class _Done:
    """Nothing was posted."""

    def poll(self) -> bool:
        return True

    def wait(self, i: int, deadline: float) -> None:
        return


_DONE = _Done()


def _keep(tensor: torch.Tensor, *_: object) -> Pending:
    return _DONE


def _copy(output: torch.Tensor, input: torch.Tensor, *_: object) -> Pending:
    output.copy_(input.detach() if input.requires_grad else input)
    return _DONE


# What is left at world size 1.
_ALONE: dict[str, Callable[..., Pending]] = {"all_reduce": _keep, "all_gather": _copy, "reduce_scatter": _copy}


def short_when_alone(operation: str) -> bool:
    """Whether a rank that is alone may go the short way."""
    return operation in _ALONE
