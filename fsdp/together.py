"""Modules that are one unit together: gathered before the first of them runs, freed after the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp.unit import Unit


class Together:
    """Which of the modules have still to run in this forward.

    Args:
        units: one a module, all with the same groups; the last one owns them.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self._waiting: set[Unit] = set()

    def begin(self) -> None:
        """One of them starts to run. If none was waited for, all are."""
        if not self._waiting:
            self._waiting.update(self.units)

    def end(self, unit: Unit) -> bool:
        """``unit`` has run. Whether it was the last."""
        self._waiting.discard(unit)
        return not self._waiting

    def give_up(self) -> bool:
        """The model's forward is over. Whether some of them were still waited for."""
        waited = bool(self._waiting)
        self._waiting.clear()
        return waited
