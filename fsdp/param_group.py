"""The parameters of a unit that have one dtype: gathered, freed and reduced together, by one collective each.

[Note: two leaves for one parameter]
The user's ``nn.Parameter`` is the shard for ever: its ``.data`` views the flat shard and its ``.grad`` is the reduced
gradient of the shard, so an optimizer may be built at any time. Autograd insists that ``.grad`` has the shape of its
leaf, so while a unit computes, the module holds a second leaf of the full shape, which views the gathered buffer and
collects the full gradient (see places.py).

[Note: one storage for life]
Autograd saves views of weights (a linear layer saves ``weight.t()``), which keep their storage and not its contents.
So the gathered buffer of a group is one storage for life: freed by ``resize_(0)`` (or kept, where all ranks of a host
have it in common: see unsharded.py), refilled in place before backward, never lent to another group. Leaves view
``.data`` of it and so have version counters of their own; otherwise a refill would look to autograd like a change to a
saved tensor. While the storage is freed the leaves themselves view one NaN: who kept one beyond its unit's forward
reads NaN, and not freed memory. (A view of a leaf is beyond our reach.)
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from collectives import Communicator, Work
from collectives.errors import CommError, PeerLostError, UnsupportedError
from fsdp.flat_layout import FlatLayout
from fsdp.gradient_hooks import put_off
from fsdp.gradients import Gradients
from fsdp.offload import CPUOffloadPolicy
from fsdp.places import ManagedParameter, Places, replaced
from fsdp.post_forward import PostForwardShard
from fsdp.precision import Copies, MixedPrecisionPolicy
from fsdp.shards import Shards
from fsdp.strategy import Strategy, Trigger
from fsdp.unit_statistics import UnitStatistics
from fsdp.unsharded import HostShared, unsharded
from fsdp.use import Progress, Use


class Storage(enum.Enum):
    """Whether the gathered buffer is there."""

    FREED = "only the shard exists"  # -> GATHERING by unshard
    GATHERING = "an all_gather is filling it"  # -> FULL by wait_for_unshard; -> FREED by reshard, after a wrong guess
    FULL = "all parameters are there"  # -> FREED by reshard; -> GATHERING by the unshard of a later forward


class ParamGroup:
    """Parameters of one dtype, in one flat layout.

    Collective: every rank builds it, with the same parameters, and gets rank 0's values.

    Args:
        parameters: what it manages. Afterwards each ``parameter.data`` is a view of the flat shard (unless the strategy
            replicates), of shape (n, 1, ..., 1) with as many dimensions as before, and has a ``full_shape``.
        comm: the ranks that share the parameters.
        strategy: how they share them.
        policy: dtypes of gathers and reductions.
        grad_views: replicated gradients are views of the reduced bucket; otherwise copies.
        offload: shards and their gradients stay in host memory.
        host_shared: see ``fully_shard``.
        post_forward: where the parameters are between forward and backward; None: nowhere but at rest.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        comm: Communicator,
        strategy: Strategy,
        policy: MixedPrecisionPolicy,
        grad_views: bool = True,
        offload: CPUOffloadPolicy | None = None,
        host_shared: HostShared = True,
        post_forward: PostForwardShard | None = None,
    ) -> None:
        # Trainable ones first, so that a unit of which a part is frozen reduces one stretch of its layout.
        self.managed = sorted(parameters, key=lambda m: not m.parameter.requires_grad)
        self.comm = comm
        self.strategy = strategy
        self.home = comm.device if offload is None else torch.device("cpu")  # of shards and their gradients
        self._pins = offload is not None and offload.pin_memory and comm.device.type == "cuda"
        self.dtype = self.managed[0].parameter.dtype
        self.shapes = [m.parameter.shape for m in self.managed]
        self.part = comm.rank if strategy.shards else 0
        self.layout = FlatLayout.even([s.numel() for s in self.shapes], comm.world_size if strategy.shards else 1)
        self.statistics = UnitStatistics()
        self.storage = Storage.FREED if strategy.shards else Storage.FULL
        self.users = 0  # units whose forward or backward is under way and that see the full leaves
        self.touched = False  # backward has reached it since its last reduction
        self.frees_after_backward = True
        self.spans_modules = False  # of several modules: stays gathered until the last one is done
        self.post_forward = post_forward
        self.reduce_buffers = strategy.reduce_buffers
        self.divide_factor: float | None = None  # of summed gradients; None: the number of ranks
        self.flag_offset = 0  # its place among the flags of the runtime
        self._uses: list[weakref.ref[Use]] = []
        self._gather: Work | None = None
        self._epoch = -1  # the root forward that it was last gathered for
        self._fresh = False  # gathered parameters are known to equal the shards, although a backward has ended
        self.summoned = False  # parameters are whole for somebody to look at: see full_params.py

        values = self._rank_0_values()
        self.shard = values  # replicated: never read
        self.full = values
        self.leaves: list[nn.Parameter] = [m.parameter for m in self.managed]
        self._copies: Copies | None = None
        if strategy.shards:
            self._cut(values, policy.param(self.dtype), host_shared)
        elif policy.param(self.dtype) != self.dtype:
            self._copies = Copies(self.leaves, policy.param(self.dtype))
        self.places = Places(self.managed, self.leaves, guards=strategy.shards)
        self.gradients = Gradients(
            [m.parameter for m in self.managed],
            self.leaves,
            self.layout,
            self.part,
            comm,
            shards=strategy.shards,
            dtype=policy.reduce(self.dtype),
            views=grad_views,
            counts=strategy.trigger is Trigger.ORDER,
            home=self.home,
        )

    # Building

    def _rank_0_values(self) -> torch.Tensor:
        """All parameters in the layout, as they are on rank 0; the padding is zero."""
        values = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.comm.device)
        spans = torch.split(values, self.layout.spans())[::2]
        with torch.no_grad():
            for span, managed in zip(spans, self.managed, strict=True):
                parameter = managed.parameter
                if self.comm.rank == 0:
                    span.copy_(parameter.reshape(-1))  # side by side, for one broadcast
                if self.strategy.shards:  # one whole unit is enough, and one parameter
                    parameter.data = span.data.view(parameter.shape)
            self.comm.broadcast(values, 0)
            if not self.strategy.shards:
                for span, managed in zip(spans, self.managed, strict=True):
                    # Back to where it was: replicated parameters keep their memory, which callers may hold.
                    managed.parameter.copy_(span.view(managed.parameter.shape))
                return values.new_empty(0)
        return values

    def _cut(self, values: torch.Tensor, compute_dtype: torch.dtype, host_shared: HostShared) -> None:
        """Keep this rank's shard, and make the second leaves."""
        first, last = self.layout.cuts[self.part : self.part + 2]
        self._unsharded = unsharded(self.comm, values, compute_dtype, (first, last), self.home, host_shared)
        self.full = self._unsharded.tensor
        if self._unsharded.keeps_shard:
            self.shard = self._unsharded.contribution(values, True)
        else:
            # A copy, for good: ``values`` is, or was made for, the gathered buffer, which is freed.
            self.shard = values[first:last].to(self.home, copy=True)
        if self._pins:
            self.shard = self.shard.pin_memory()
        spans = torch.split(self.full.data, self.layout.spans())[::2]
        self._whole = [span.data.view(shape) for span, shape in zip(spans, self.shapes, strict=True)]
        nothing = self.full.new_full((), float("nan") if compute_dtype.is_floating_point else 0)
        self._freed = [nothing.expand(shape) for shape in self.shapes]
        self.leaves = []
        for managed, whole in zip(self.managed, self._whole, strict=True):
            parameter = managed.parameter
            leaf = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            leaf.__dict__.update(parameter.__dict__)  # marks that users put on parameters
            self.leaves.append(leaf)
        self.shards = Shards(self.shard, self.layout, self.part, self.managed)
        self._free()

    def _free(self) -> None:
        self._unsharded.close()
        for leaf, freed in zip(self.leaves, self._freed, strict=True):
            leaf.data = freed

    # Gathered and freed

    def check_parameters(self) -> None:
        """Mend what callers did to parameters between steps, or say what cannot be mended."""
        if self.gradients.retired:
            raise UnsupportedError(
                f"parameter {self.managed[0].name!r} of this DistributedDataParallel was wrapped once more, and "
                "belongs to the later wrapper; expected a forward of that one"
            )
        if self._copies is not None:
            self._copies.drop()
        users = self.gradients.parameters
        if self.strategy.shards:
            self.places.mend(self.shards.take)
            self.shards.mend()
        else:
            self.places.mend(self._refuse)
            for parameter in users:
                if len(parameter._post_accumulate_grad_hooks or ()) > 1:
                    put_off(parameter)
        wanted = tuple([parameter.requires_grad for parameter in users])
        if wanted != self.gradients.wanted:
            self.gradients.want(wanted)

    def _refuse(self, i: int, held: torch.Tensor | None) -> NoReturn:
        managed = self.managed[i]
        raise replaced(self.comm.rank, managed, managed.parameter, held)

    def unshard(self, epoch: int | None = None) -> None:
        """Start to gather, unless the parameters are there.

        Args:
            epoch: the root forward that needs them. One that is newer than the last gather gathers again, as the
                optimizer may have stepped in between; nothing that could be asked of a tensor would tell.
        """
        if not self.strategy.shards or self.summoned:
            return
        stale = epoch is not None and epoch != self._epoch and not self._fresh
        if self.storage is not Storage.FREED:
            if not stale:
                return
            self.wait_for_unshard()
        self.check_parameters()
        self._unsharded.open()
        if self.storage is Storage.FREED:
            for leaf, whole in zip(self.leaves, self._whole, strict=True):
                leaf.data = whole
        if self.post_forward is not None and self.post_forward.tensor is not None and epoch in (None, self._epoch):
            assert self.post_forward.comm is not None
            self._gather = self.post_forward.comm.all_gather(self.full, self.post_forward.tensor, async_op=True)
        else:
            # One copy of a shard, where it is kept elsewhere or gathered in another dtype; otherwise it is sent as is.
            source = self._unsharded.contribution(self.shard, again=epoch is None and self._epoch >= 0)
            self._gather = self.comm.all_gather(self.full, source, async_op=True)
        self.statistics.gathers += 1
        self.statistics.gathered_nbytes += self.full.nbytes
        self.storage = Storage.GATHERING
        if epoch is not None:
            self._epoch = epoch

    def wait_for_unshard(self) -> None:
        """Return when the parameters are there."""
        if self._gather is not None:
            started = time.perf_counter()
            try:
                self._gather.wait()
            except CommError as error:
                raise self._told(error) from error
            self.statistics.gather_wait += time.perf_counter() - started
            self._gather = None
            self.storage = Storage.FULL

    def _told(self, error: CommError) -> CommError:
        """The same, and which parameters were to come."""
        names = self.managed[0].name, self.managed[-1].name
        text = f"{error} (while the unit of {' ... '.join(map(repr, dict.fromkeys(names)))} was gathered)"
        return PeerLostError(text, error.rank) if isinstance(error, PeerLostError) else type(error)(text)

    def poll(self) -> None:
        """Make progress on a gather under way."""
        if self._gather is not None:
            self._gather.is_completed()

    def reshard(self, after_forward: bool = False) -> None:
        """Free the gathered parameters. ``after_forward``: backward may come and want them again."""
        if self._copies is not None:
            self._copies.drop()
        if self.post_forward is not None:
            if after_forward and self.storage is not Storage.FREED:
                self.wait_for_unshard()
                self.post_forward.keep(self.full)
            else:
                self.post_forward.drop()
        if self.strategy.shards and self.storage is not Storage.FREED:
            self.wait_for_unshard()
            self._free()
            self.storage = Storage.FREED
            self._fresh = False

    def settle(self) -> None:
        """Return when no rank reads what is freed here, so that shards may be edited."""
        if self.strategy.shards and self.storage is Storage.FREED:
            self._unsharded.settle()

    def retain(self) -> None:
        """Keep the gathered parameters for the next forward: no optimizer step comes before it."""
        self._fresh = self.storage is not Storage.FREED

    def expire(self) -> None:
        """The next root forward gathers again."""
        self._fresh = False

    def enter(self) -> None:
        """A unit starts to compute: its modules hold the full leaves."""
        self.users += 1
        if self.users == 1:
            if self.strategy.shards:
                self.places.hold(self.leaves)
            elif self._copies is not None:
                self.places.hold(self._copies.make())

    def leave(self) -> bool:
        """A unit has computed. Whether it was the last: then the modules hold the user's parameters again."""
        self.users -= 1
        if self.users == 0 and self._switches:
            self.places.rest()
        return self.users == 0

    @property
    def _switches(self) -> bool:
        """Whether modules hold something else than the user's parameters while they compute."""
        return self.strategy.shards or self._copies is not None

    def reset(self) -> None:
        """Nothing computes: the modules hold the user's parameters, and the gathered ones are freed."""
        if self.users:
            self.users = 0
            if self._switches:
                self.places.rest()
        self._uses.clear()
        self.reshard()

    def gather_values(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Every parameter with its whole value, in a buffer of its own: what is under way in the model stays."""
        self.check_parameters()
        values = torch.empty(self.layout.numel, dtype=self.dtype, device=self.comm.device)
        self.comm.all_gather(values, self.shard.to(self.comm.device))
        spans = torch.split(values, self.layout.spans())[::2]
        return [
            (managed.parameter, span.view(shape))
            for managed, span, shape in zip(self.managed, spans, self.shapes, strict=True)
        ]

    # Forwards that may be differentiated

    def open_uses(self) -> list[Use]:
        """The forwards that used it and whose backward is not done."""
        alive = [use for ref in self._uses if (use := ref()) is not None and use.progress is not Progress.DONE]
        self._uses = [weakref.ref(use) for use in alive]
        return alive

    def remember(self, use: Use) -> None:
        """A forward used it, and backward may follow."""
        self._uses.append(weakref.ref(use))
