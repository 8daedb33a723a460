"""The full gradients of a group: where they are collected, packed, and handed to a reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from collectives import Communicator, ReduceOp
from fsdp.flat_layout import FlatLayout, local_shape
from fsdp.gradient_hooks import Arrival
from fsdp.reduction import Reduction, Target

TakeBuffer = Callable[[int, torch.dtype], torch.Tensor]


class Gradients:
    """What autograd leaves in the leaves of a group, until a reduction takes it.

    Args:
        parameters: the users' parameters, which receive reduced gradients.
        leaves: what autograd differentiates: full shapes. Replicated parameters are their own leaves.
        layout: of the group. Its wanted parameters, closed up, make the layout of the gradients.
        part: which part of the layout this rank keeps.
        shards: reduce-scatter into that part; otherwise all-reduce, and keep everything.
        dtype: of the reduction.
        views: replicated gradients are views of their bucket, otherwise copies.
        counts: learn from autograd when a gradient is there.
        home: the device of the users' parameters and their gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        part: int,
        comm: Communicator,
        *,
        shards: bool,
        dtype: torch.dtype,
        views: bool,
        counts: bool,
        home: torch.device,
    ) -> None:
        self.parameters = parameters
        self.leaves = leaves
        self.part = part
        self.comm = comm
        self.shards = shards
        self.dtype = dtype
        self.home = home
        self.on_ready: Callable[[], None] = _nothing  # every gradient of this backward is there
        self.on_backward: Callable[[], None] = _nothing  # one came although no backward was known of
        self.ready = False
        self._whole = layout
        self._views = views
        self._counts = counts
        self.replaceable = False  # another wrapper may take its parameters over
        self.retired = False  # one has
        self._hooks: dict[int, RemovableHandle] = {}
        self._missing: set[int] | None = None  # whose gradients backward still owes; None outside of backward
        self.want(tuple(p.requires_grad for p in parameters))

    def want(self, wanted: tuple[bool, ...]) -> None:
        """Set which parameters get gradients: at the start, and when somebody freezes or thaws one."""
        self.wanted = wanted
        self.indices = [i for i, want in enumerate(wanted) if want]
        self.layout = self._whole.subset(wanted)
        self._bucket: torch.Tensor | None = None
        self._bucket_views: list[torch.Tensor] = []
        self._spans = self.layout.spans()
        self._padding = [
            torch.zeros(gap, dtype=self.dtype, device=self.comm.device) if gap else None for gap in self._spans[1::2]
        ]
        pieces = self.layout.pieces(self.part)
        shapes = [self.leaves[i].shape for i in self.indices]
        self.target = Target(
            [self.parameters[i] for i in self.indices],
            self.layout.shard_spans(self.part),
            [local_shape(s, piece.numel) for s, piece in zip(shapes, pieces, strict=True)] if self.shards else shapes,
            self.comm if self.shards else None,
            self._views,
            self.home,
        )
        for i, want in enumerate(wanted):
            self.leaves[i].requires_grad_(want)
            if want and self._counts and i not in self._hooks:
                handle = self.leaves[i].register_post_accumulate_grad_hook(Arrival(self, i))  # type: ignore[no-untyped-call]
                self._hooks[i] = handle

    def begin_backward(self) -> None:
        """No gradient of this backward is there yet."""
        self.ready = False
        self._missing = set(self.indices)

    def end_backward(self) -> None:
        """No backward is under way."""
        self._missing = None

    def arrived(self, i: int) -> None:
        """The gradient of parameter ``i`` is there, or more of it (a module used twice under checkpointing)."""
        if self._missing is None:
            self.on_backward()
        if self._missing is not None and not self.ready:
            self._missing.discard(i)
            if not self._missing:
                self.ready = True
                self.on_ready()

    def late(self) -> list[int]:
        """Parameters with gradients that no reduction has taken."""
        return [i for i in self.indices if self.leaves[i].grad is not None]

    def drop(self) -> None:
        """Forget what a failed backward left behind. Replicated gradients are the user's to drop."""
        if self.shards:
            for leaf in self.leaves:
                leaf.grad = None

    def retire(self) -> None:
        """Another wrapper has taken the parameters over: hear of their gradients no more."""
        self.retired = True
        for handle in self._hooks.values():
            handle.remove()

    def start_reduction(self, take_buffer: TakeBuffer, first: bool) -> Reduction:
        """Take the gradients, and start to average them over ranks.

        Args:
            take_buffer: gives the input of a reduce_scatter: numel, dtype -> a 1-D tensor of at least that numel.
            first: no other reduction of the group is under way.
        """
        taken: list[torch.Tensor | None] = []
        for i in self.indices:
            gradient = self.leaves[i].grad
            self.leaves[i].grad = None
            if gradient is not None and gradient.layout is not torch.strided:
                raise TypeError(
                    f"a gradient of shape {tuple(gradient.shape)} is {gradient.layout}, expected a dense one"
                )
            taken.append(gradient)
        used = [gradient is not None for gradient in taken]
        if not self.shards:
            bucket = self._fill_bucket(taken, first)
            work = self.comm.all_reduce(bucket, ReduceOp.AVG, async_op=True)
            return Reduction(self.target, work, None, bucket, used)
        numel = self.layout.numel
        buffer = take_buffer(numel, self.dtype)
        flat = self._pack(taken, buffer if buffer.numel() == numel else buffer[:numel])
        output = flat.new_empty(self.layout.sizes[self.part])
        if self.layout.is_even:
            work = self.comm.reduce_scatter(output, flat, ReduceOp.AVG, async_op=True)
        else:
            work = self.comm.reduce_scatter_v(output, flat, self.layout.sizes, ReduceOp.AVG, async_op=True)
        return Reduction(self.target, work, buffer, output, used)

    def _pack(self, taken: Sequence[torch.Tensor | None], flat: torch.Tensor) -> torch.Tensor:
        """The gradients, side by side in ``flat``; those that are missing are zero.

        This is the one copy that a gradient sees: a collective needs them side by side, and autograd allocates them.
        Letting autograd add into zeroed views of the buffer instead would write it twice and read it once more.
        """
        parts: list[torch.Tensor] = []
        for gradient, numel, padding in zip(taken, self._spans[::2], self._padding, strict=True):
            parts.append(flat.new_zeros(numel) if gradient is None else gradient.reshape(-1))
            if padding is not None:
                parts.append(padding)
        return torch.cat(parts, out=flat)

    def _fill_bucket(self, taken: Sequence[torch.Tensor | None], first: bool) -> torch.Tensor:
        """The same for replicated gradients, whose buffer becomes their home. Those that live there already stay."""
        if self._bucket is None or not first:
            bucket = self.comm.allocate(self.layout.numel, self.dtype).zero_()
            spans = torch.split(bucket, self._spans)[::2]
            views = [span.view(shape) for span, shape in zip(spans, self.target.shapes, strict=True)]
            if first:
                self._bucket, self._bucket_views = bucket, views
        else:
            bucket, views = self._bucket, self._bucket_views
        for gradient, view in zip(taken, views, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():  # autograd made it anew, after zero_grad to None
                view.copy_(gradient)
        return bucket


def _nothing() -> None:
    """What is called before a runtime owns the group."""
