"""What this rank holds of a model's state, under the names that the model has without any wrapper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collectives import Communicator
from fsdp.ddp import DistributedDataParallel
from fsdp.flat_layout import FlatLayout
from fsdp.param_group import ParamGroup
from fsdp.runtime import Phase
from fsdp.unit import Unit, find_unit

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # what torch.compile and activation checkpointing add


@dataclass(frozen=True)
class Holding:
    """Elements ``start`` to ``start + tensor.numel()`` of the tensor called ``name``, which has ``shape``.

    Of these, counted from the first that it holds, a save writes ``owned``: first element and how many. Together the
    ranks own each element once.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: int
    owned: tuple[int, int]
    cut: bool  # the tensor is a shard of the whole

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor that lies as this one does, the elements to write, 1-D."""
        first, numel = self.owned
        return tensor.detach().reshape(-1)[first : first + numel]


class Holdings:
    """The state of ``model`` on this rank: parameters and buffers by name, tied ones once, and what is no tensor."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.units = [unit for module in model.modules() if (unit := find_unit(module)) is not None]
        self.groups = list(dict.fromkeys(group for unit in self.units for group in unit.own_groups))
        self.comm = _communicator(self.units)
        self.tensors: dict[str, Holding] = {}
        self.tied: dict[str, str] = {}
        self.objects: dict[str, Any] = {}
        self.order: list[str] = []
        self.names: dict[int, str] = {}  # of parameters and buffers, by id
        self._raw: dict[str, str] = {}  # names as the wrapped model has them, of objects
        cuts = self._cuts()
        rank = 0 if self.comm is None else self.comm.rank
        for raw, value in self._entries().items():
            name = plain_name(raw)
            self.order.append(name)
            if not isinstance(value, torch.Tensor):
                self.objects[name] = value
                self._raw[name] = raw
            elif id(value) in self.names:
                self.tied[name] = self.names[id(value)]
            else:
                self.names[id(value)] = name
                shape, start, owned, cut = cuts.get(id(value)) or (
                    tuple(value.shape), 0, (0, value.numel() if rank == 0 else 0), False,
                )  # fmt: skip
                self.tensors[name] = Holding(name, value, shape, start, owned, cut)

    def _entries(self) -> dict[str, Any]:
        """The model's own ``state_dict()``, with the parameters themselves in it."""
        root = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        runtimes = list(dict.fromkeys(unit.runtime for unit in self.units))
        for runtime in runtimes:
            if runtime.phase is not Phase.IDLE:
                raise RuntimeError("expected a checkpoint between steps, found a forward or backward under way")
            runtime.exports_state = True
        try:
            entries: dict[str, Any] = root.state_dict(keep_vars=True)
        finally:
            for runtime in runtimes:
                runtime.exports_state = False
        return entries

    def _cuts(self) -> dict[int, tuple[tuple[int, ...], int, tuple[int, int], bool]]:
        """Whole shape, first element, what of it is owned and whether it is cut: of every managed parameter, by id."""
        cuts = {}
        for group in self.groups:
            group.check_parameters()
            if group.strategy.shards:
                pieces = group.shards.pieces
            else:  # every rank has all of it and writes its share
                pieces = FlatLayout.even(group.layout.numels, group.comm.world_size).pieces(group.comm.rank)
            for managed, shape, piece in zip(group.managed, group.shapes, pieces, strict=True):
                cut = group.strategy.shards
                start, owned = (piece.start, (0, piece.numel)) if cut else (0, (piece.start, piece.numel))
                cuts[id(managed.parameter)] = (tuple(shape), start, owned, cut)
        return cuts

    def open_shards(self) -> None:
        """Return when shards may be written: gathered parameters are freed, and nobody reads them. Collective."""
        idle: list[ParamGroup] = [group for group in self.groups if group.strategy.shards]
        for group in idle:
            group.expire()
            group.reshard()
        for group in idle:
            group.settle()

    def restore_objects(self, objects: dict[str, Any]) -> None:
        """Hand what is no tensor back to the modules that it came from."""
        root = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        if objects:
            root.load_state_dict({self._raw[name]: value for name, value in objects.items()}, strict=False)


def plain_name(name: str) -> str:
    """Without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _communicator(units: list[Unit]) -> Communicator | None:
    comms = list(dict.fromkeys(unit.runtime.comm for unit in units))
    if len(comms) > 1:
        raise ValueError(f"expected one communicator for all units of the model, found {len(comms)}; save each alone")
    return comms[0] if comms else None
