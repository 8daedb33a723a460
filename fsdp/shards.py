"""This rank's pieces of the parameters of a group: what the users' parameters are, between forwards and for ever."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from fsdp.flat_layout import FlatLayout, local_shape
from fsdp.places import ManagedParameter, replaced


class Shards:
    """Views of one flat shard. Afterwards each ``parameter.data`` is one, and the parameter has a ``full_shape``.

    Args:
        flat: this rank's part of the layout, 1-D. The caller's, who keeps it as long as the parameters live.
        layout: of the group.
        rank: whose part it is.
        managed: the parameters, of full shape.
    """

    def __init__(self, flat: torch.Tensor, layout: FlatLayout, rank: int, managed: Sequence[ManagedParameter]) -> None:
        self._rank = rank
        self._managed = managed
        self._shapes = [m.parameter.shape for m in managed]
        self.pieces = layout.pieces(rank)
        self.views = [
            flat[piece.offset : piece.offset + piece.numel].view(local_shape(shape, piece.numel))
            for piece, shape in zip(self.pieces, self._shapes, strict=True)
        ]
        self._ambiguous = [_whole_somewhere(layout, i, shape) for i, shape in enumerate(self._shapes)]
        for m, view, shape in zip(managed, self.views, self._shapes, strict=True):
            m.parameter.data = view.data
            m.parameter.full_shape = shape  # type: ignore[attr-defined]
        self._parameters = [m.parameter for m in managed]
        self._pointers = [p.data_ptr() for p in self._parameters]

    def mend(self) -> None:
        """Where ``.data`` was given other memory, by ``.to()`` for example, copy its values back.

        It may have the shape of the shard, or that of the whole parameter, of which every rank takes its own piece.
        """
        for i, parameter in enumerate(self._parameters):
            if parameter.data_ptr() != self._pointers[i]:
                held = parameter.data
                if held.shape == self._shapes[i]:
                    piece = self.pieces[i]
                    held = held.reshape(-1)[piece.start : piece.start + piece.numel].view(self.views[i].shape)
                self._copy_back(i, held)

    def take(self, i: int, held: torch.Tensor | None) -> None:
        """Copy values of the shard's shape, of another tensor that was put in place of parameter ``i``.

        A whole parameter in its place is refused, and so must be on every rank. So where a rank's shard has the shape
        of the whole, which it may be taken for, all ranks refuse.
        """
        if self._ambiguous[i]:
            raise replaced(self._rank, self._managed[i], self.views[i], held)
        self._copy_back(i, held)

    def _copy_back(self, i: int, held: torch.Tensor | None) -> None:
        view = self.views[i]
        if held is None or held.shape != view.shape or held.dtype != view.dtype:
            raise replaced(self._rank, self._managed[i], view, held)
        with torch.no_grad():
            view.copy_(held)  # the flat shard is what is gathered, so values must be in it
        self._parameters[i].data = view.data


def _whole_somewhere(layout: FlatLayout, i: int, shape: torch.Size) -> bool:
    """Whether the shard of parameter ``i`` has the shape of the whole on a rank, and on others not."""
    numel, offset, cuts = layout.numels[i], layout.offsets[i], layout.cuts
    if len(cuts) <= 2 or numel == 0 or local_shape(shape, numel) != tuple(shape):
        return False
    return offset + numel <= cuts[bisect.bisect_right(cuts, offset)]
