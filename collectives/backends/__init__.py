"""Names to backends: a base, and layers before it ("ring+gloo")."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import NamedTuple

from collectives.backend import Backend, Bootstrap

REGISTRY = {
    "threads": "collectives.backends.threads:create",
    "gloo": "collectives.backends.torch_dist:create_gloo",
    "nccl": "collectives.backends.torch_dist:create_nccl",
    "mpi": "collectives.backends.mpi:create",
}
LAYERS = ("ring", "shm")


class Stack(NamedTuple):
    """A parsed name: ``ring+gloo`` is layers ("ring",) over base "gloo"."""

    layers: tuple[str, ...]
    base: str


def names() -> list[str]:
    """Every base that can be asked for, third parties' entry points included."""
    return [*REGISTRY, *(point.name for point in entry_points(group="collectives.backends"))]


def parse(name: str) -> Stack:
    """Split a backend name, or raise ``ValueError`` that lists what there is."""
    *layers, base = name.split("+")
    if base not in names() or any(layer not in LAYERS for layer in layers):
        stacks = [f"{layer}+X" for layer in LAYERS]
        raise ValueError(
            f"unknown backend {name!r}; expected one of {', '.join(names())}, or {', '.join(stacks)} over one of them"
        )
    return Stack(tuple(layers), base)


def connect(stack: Stack, bootstrap: Bootstrap) -> Backend:
    """Connect a base, and share memory over it if asked for. Raises ``UnsupportedError`` where a library is missing."""
    backend = create(stack.base, bootstrap)
    if "shm" in stack.layers:
        backend = importlib.import_module("collectives.backends.shm").wrap(backend, bootstrap)
    return backend


def create(base: str, bootstrap: Bootstrap) -> Backend:
    """Connect the backend called ``base``. Raises ``UnsupportedError`` where its library is missing."""
    if base in REGISTRY:
        module, function = REGISTRY[base].split(":")
        factory = getattr(importlib.import_module(module), function)
    else:
        factory = next(point for point in entry_points(group="collectives.backends") if point.name == base).load()
    backend: Backend = factory(bootstrap)
    return backend
