"""Who takes part: public calls over any backend, with any algorithm, and the libraries' own calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from collectives import backends
from collectives.bench.memory import KINDS, Memory, private
from collectives.bench.operations import OPERATIONS
from collectives.communicator import Communicator
from collectives.rendezvous import init
from collectives.schedules import SCHEDULES

Run = Callable[[torch.Tensor, torch.Tensor], object]  # (output, input)
LIBRARY = "lib:"
COPY = "copy"  # every rank copies n elements at once: what the bound is computed from
NATIVE = "native"


@dataclass(frozen=True)
class Contender:
    """A name and what it runs for each operation that it has.

    ``mpi`` is the public call; ``mpi@ring`` the same with that algorithm; ``lib:mpi`` is what the library itself calls
    the operation, blocking; ``lib:mpi.I`` its calls whose names start so. ``shm+mpi:symmetric`` is the public call on
    ``memory`` of that kind.
    """

    name: str
    calls: Mapping[str, Run]
    memory: Memory = private


def _copy(output: torch.Tensor, input: torch.Tensor) -> object:
    return output.copy_(input)


COPYING = Contender(COPY, MappingProxyType(dict.fromkeys(OPERATIONS, _copy)))


class Field:
    """The communicators of this process set, one for each backend, opened when first asked for.

    All ranks must ask in the same order.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._open: dict[str, Communicator] = {}

    def communicator(self, backend: str) -> Communicator:
        if backend not in self._open:
            self._open[backend] = init(backend, timeout=self._timeout, setup_timeout=self._timeout)
        return self._open[backend]

    def close(self) -> None:
        for comm in self._open.values():
            comm.close()

    def contenders(self, names: Iterable[str]) -> list[Contender]:
        """Raises ``ValueError`` for a name that means nothing."""
        return [self._library(name) if name.startswith(LIBRARY) else self._public(name) for name in names]

    def _public(self, name: str) -> Contender:
        backend, _, algorithm = name.partition("@")
        backend, _, kind = backend.partition(":")
        if kind and (algorithm or kind not in KINDS):
            raise ValueError(f"{name}: expected {backend}:KIND, KIND being one of {', '.join(KINDS)}")
        comm = self.communicator(backend)
        if not algorithm:
            run = {of: functools.partial(op.call, comm) for of, op in OPERATIONS.items()}
            if not kind:
                return Contender(name, run)
            sample, able = KINDS[kind]
            some = {of: call for of, call in run.items() if able is None or of in able}
            return Contender(name, some, functools.partial(sample, comm))
        found = {of for of, known in SCHEDULES if known == algorithm}
        if algorithm == NATIVE:
            found = {key.operation for key, support in comm.capabilities().items() if support == NATIVE}
        calls = {
            of: functools.partial(op.call, comm, algorithm=algorithm) for of, op in OPERATIONS.items() if of in found
        }
        if not calls:
            names = sorted({name for _, name in SCHEDULES})
            raise ValueError(
                f"{name}: no algorithm {algorithm!r} there; expected {NATIVE} or one of {', '.join(names)}"
            )
        return Contender(name, calls)

    def _library(self, name: str) -> Contender:
        base, _, prefix = name.removeprefix(LIBRARY).partition(".")
        library = self.communicator(base)._transport._library()
        calls: dict[str, Run] = {}
        for called, call in library.items():
            if called.startswith(prefix):
                calls.setdefault(call.operation, call.run)
        if not calls:
            known = ", ".join(library) or "none"
            raise ValueError(f"{name}: {base} has no call of its own that starts with {prefix!r}; it has {known}")
        return Contender(name, calls)


def default_names(bases: Sequence[str]) -> list[str]:
    """Everything there is over these bases: the library's own calls, the backend, and each layer over it."""
    names = []
    for base in bases:
        layered = [f"{layer}+{base}" for layer in backends.LAYERS]
        names += [f"{LIBRARY}{base}", *([f"{LIBRARY}{base}.I"] if base == "mpi" else []), base, *layered]
    names += [f"shm+{bases[-1]}:{kind}" for kind in KINDS]
    return names
