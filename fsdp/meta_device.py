"""Parameters that have no values yet: a unit on the meta device gets memory and values when it is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from collectives.errors import UnsupportedError

Initialise = Callable[[nn.Module], object]


def materialise(modules: Iterable[tuple[str, nn.Module]], device: torch.device, initialise: Initialise | None) -> None:
    """Give the modules' own tensors that are on the meta device memory on ``device``, and initialise them.

    Parameters keep their identity, so tied ones stay tied. Each module that holds such a tensor itself is initialised
    once, by ``initialise(module)`` or else by its ``reset_parameters()``, which has to fill its buffers too.

    Args:
        modules: with the names that messages use.

    Raises:
        UnsupportedError: a module cannot be initialised; nothing has been changed then.
    """
    waiting = [(name, module) for name, module in modules if any(t.is_meta for t in _own_tensors(module))]
    resets = [(module, initialise or _reset_method(name, module)) for name, module in waiting]
    done: set[int] = set()
    for module, reset in resets:
        for tensor in _own_tensors(module):
            if tensor.is_meta and id(tensor) not in done:
                done.add(id(tensor))
                _give_memory(tensor, device)
        with torch.no_grad():
            reset(module)


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _give_memory(tensor: torch.Tensor, device: torch.device) -> None:
    empty = torch.empty_like(tensor.detach(), device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    empty.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]


def _reset_method(name: str, module: nn.Module) -> Initialise:
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if not callable(method):
        raise UnsupportedError(
            f"{name or 'the module'} ({type(module).__name__}) is on the meta device and has no reset_parameters(); "
            "expected a method of that name that fills its parameters and buffers, or "
            "fully_shard(..., param_init_fn=...)"
        )
    return lambda _: method()
