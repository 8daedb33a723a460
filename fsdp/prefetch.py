"""Which units are gathered before their turn, and how many of them at once.

A wrong guess costs memory until the end of the forward or backward, and nothing else: what nobody comes for is freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp.param_group import ParamGroup, Storage

if TYPE_CHECKING:
    from fsdp.unit import Unit
    from fsdp.use import Use


class Prefetch:
    """The order in which units ran, and what was gathered ahead because of it.

    There is one guess at a time, so at most two units are gathered at once, beside what is kept; unless a unit says
    what to fetch.
    """

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []  # of all units
        self.max_live_parameters: int | None = None  # gathered at once by guesses, in elements
        self.order: list[Unit] = []  # units that ran in this forward, or in the last one
        self._next_of: dict[Unit, Unit] = {}
        self._ahead: dict[Unit, None] = {}

    def start_forward(self) -> None:
        """What ran last time is what to expect."""
        self._next_of = dict(zip(self.order, self.order[1:], strict=False))
        self.order = []

    def came(self, unit: Unit) -> None:
        """It is its turn: it is no guess any more."""
        self._ahead.pop(unit, None)

    def run(self, unit: Unit) -> Unit | None:
        """``unit`` starts its forward. The one that ran before it."""
        before = self.order[-1] if self.order else None
        self.order.append(unit)
        return before

    def ran(self, use: Use) -> None:
        """``use.unit`` ends its forward: if others ran inside of it, backward comes to the last of them next."""
        if self.order[-1] is not use.unit:
            use.before = self.order[-1]

    def in_forward(self, unit: Unit, epoch: int) -> None:
        """Fetch what comes after ``unit``."""
        if unit.forward_prefetch is not None:
            for other in unit.forward_prefetch:
                self._fetch(other, epoch)
        elif not self._ahead:
            self._fetch(self._next_of.get(unit), epoch)

    def in_backward(self, use: Use) -> None:
        """Fetch what comes after ``use.unit`` in backward."""
        if use.unit.backward_prefetch is not None:
            for other in use.unit.backward_prefetch:
                self._fetch(other, None)
        elif use.before is not None and not self._ahead and use.before.gathers_for_backward:
            self._fetch(use.before, None)

    def _fetch(self, unit: Unit | None, epoch: int | None) -> None:
        if unit is None or not unit.frees_after_forward:
            return
        # Its own only: what it shares with other units is gathered, or they are about to gather it.
        groups = unit.own_groups
        if all(group.storage is Storage.FREED for group in groups) and self._has_room(groups):
            self._ahead[unit] = None
            for group in groups:
                group.unshard(epoch)

    def _has_room(self, groups: list[ParamGroup]) -> bool:
        if self.max_live_parameters is None:
            return True
        live = [group for group in self.groups if group.strategy.shards and group.storage is not Storage.FREED]
        return sum(group.layout.numel for group in (*live, *groups)) <= self.max_live_parameters

    def free(self) -> None:
        """Nobody came for what was fetched."""
        for unit in self._ahead:
            for group in unit.own_groups:
                group.reshard()
        self._ahead.clear()

    def forget(self) -> None:
        """What was fetched is freed, or kept, with everything else."""
        self._ahead.clear()

    def poll(self) -> None:
        """Make progress on what is under way."""
        for unit in self._ahead:
            for group in unit.own_groups:
                group.poll()
