"""What differs between versions of torch, and what is no public interface of it: in this file and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from collectives.errors import UnsupportedError

Handler: TypeAlias = Callable[..., Iterator[tuple[Any, int, int]]]

# The same method under the names that versions of torch call it by.
ALIASES = {
    "all_gather_single": ("_allgather_base",),
    "reduce_scatter_single": ("_reduce_scatter_base",),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
    "all_to_all_single": ("alltoall_base",),
}
INIT_NAMES = ((dist, "init_process_group"), (_c10d, "init_process_group"))


def check() -> None:
    """Raise ``UnsupportedError`` where this torch does not call process groups written in Python."""
    if not dist.is_available():
        raise UnsupportedError(f"torch {torch.__version__} was built without torch.distributed; install one with it")
    if not all(hasattr(dist.ProcessGroup, name) for name in ("_set_group_name", "all_gather_single")):
        raise UnsupportedError(
            f"collectives.torch_backend needs torch 2.13 or later, found {torch.__version__}; upgrade torch, or use "
            "collectives.init() and the fsdp package, which need no process group"
        )


def leave_unrecorded(names: Iterable[str]) -> None:
    """Keep torch 2.15's flight recorder off groups of these backends: it cannot read a group written in Python."""
    left_alone: set[str] = getattr(_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    left_alone.update(names)


def rendezvous_handlers() -> MutableMapping[str, Handler]:
    """How torch finds its ranks, by scheme."""
    module = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name
    handlers: MutableMapping[str, Handler] = module._rendezvous_handlers
    return handlers


def default_group() -> dist.ProcessGroup | None:
    """torch's default group, if there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


def current_backward() -> int | None:
    """A number for the backward whose gradients this thread computes; None where there is none, and at its end.

    At the end other callbacks may come after this one, or wait for what this one asks for.
    """
    return None if torch._C._current_autograd_node() is None else torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Have autograd call this when the backward that runs on this thread ends. False where none runs."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:  # final callbacks can only be installed during a backward pass
        return False
    return True
