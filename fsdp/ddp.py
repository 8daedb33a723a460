"""DistributedDataParallel: every rank holds the whole model, gradients are averaged in buckets while backward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp.fsdp_module import no_sync
from fsdp.precision import MixedPrecisionPolicy
from fsdp.runtime import Runtime
from fsdp.strategy import STAGES
from fsdp.unit import unit_of
from fsdp.wrap import Options, agree, wrap

_REFUSED = {  # options of torch's class, and what to do instead
    "process_group": "pass a Communicator as comm, such as collectives.from_process_group(group)",
    "device_mesh": "pass a Communicator as comm",
    "init_sync": "leave it out: state always starts as rank 0's",
    "mixed_precision": "pass mp_policy=fsdp.MixedPrecisionPolicy(...)",
    "delay_all_reduce_named_params": "leave it out: parameters are reduced in buckets, in one order",
    "param_to_hook_all_reduce": "leave it out: parameters are reduced in buckets, in one order",
    "skip_all_reduce_unused_params": "leave it out: unused parameters cost no reduction of their own",
}
_NO_COPY = "DistributedDataParallel holds a communicator and cannot be copied or pickled; copy its .module instead"


class DistributedDataParallel(nn.Module):
    """A module that trains on every rank's data. Names and behaviour are those of torch's class of this name.

    Parameters and buffers start as rank 0's; buffers are rank 0's again at every training forward. After a backward
    each ``.grad`` is the average over ranks (None where no rank used the parameter). Collective: built, called and
    differentiated alike on all ranks. A module that is wrapped again belongs to the later wrapper.

    Hooks that users register to run after accumulation (``register_post_accumulate_grad_hook``) run when the average is
    there, so an optimizer may step in them.

    Args:
        module: stays available as ``.module``; names in ``state_dict`` start with ``module.``.
        comm: the ranks.
        bucket_cap_mb: MiB of gradients that are reduced together. The first bucket is smaller, to start early.
        find_unused_parameters: accepted; unused parameters are always found.
        gradient_as_bucket_view: gradients are views of the buckets; otherwise copies, and twice the memory.
        static_graph: every backward uses what the first one used; ranks no longer tell each other.
        broadcast_buffers: buffers are rank 0's again at every training forward.
        mp_policy: dtypes of computation and reduction; parameters stay as they are.
        device_ids, output_device, dim, check_reduction: accepted; the module is on ``comm.device``.

    Raises:
        UnsupportedError: another option of torch's class, saying what to do instead.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020).
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        check_reduction: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm: expected a collectives.Communicator, got {type(comm)}")
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb: expected a positive number of MiB, got {bucket_cap_mb}")
        for name in others:
            if name not in _REFUSED:
                raise TypeError(f"DistributedDataParallel got an option that it does not know: {name}")
            raise UnsupportedError(f"DistributedDataParallel(..., {name}=...) is not supported; {_REFUSED[name]}")
        self.module = module
        runtime = Runtime(comm, static_graph=static_graph)
        runtime.broadcasts_buffers = broadcast_buffers
        options = Options(
            STAGES[0],
            mp_policy or MixedPrecisionPolicy(),
            bucket_mb=float(bucket_cap_mb),
            grad_views=gradient_as_bucket_view,
        )
        parts = [("", module)]
        agree(parts, comm, options.ignored)
        for group in wrap([self], parts, runtime, options).groups:
            group.gradients.replaceable = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(_NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(_NO_COPY)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up locally, and are reduced by the first backward outside. Forward belongs inside too."""
        with no_sync(unit_of(self).runtime):
            yield
