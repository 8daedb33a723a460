"""The public calls. Each checks its arguments once, then starts an operation.

What an argument must be stands in ``arguments.py``, what travels in ``collective.py``, how operations are started in
``endpoint.py`` and how they come to their end in ``operation.py`` and ``progress.py``.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypedDict, TypeVar

import torch
from typing_extensions import Unpack

from collectives.arguments import check_numel, check_overlap, check_rank, check_same_dtype, check_sizes, cuts_of
from collectives.backend import Backend
from collectives.collective import Algorithm, Collective
from collectives.endpoint import Endpoint
from collectives.messages import spread, wire_tag
from collectives.schedules.arithmetic import check_reducible
from collectives.schedules.executor import Chunks, Posted
from collectives.types import P2P, RankInfo, ReduceOp, SharedBuffer, Work

T = TypeVar("T")


class Options(TypedDict, total=False):
    """Keywords of every collective.

    ``async_op``: return at once, with a ``Work`` to wait for. ``timeout``: seconds, None for the communicator's.
    ``algorithm``: a schedule's name ("ring", "direct", ...), a generator of your own, or "native"; None chooses.
    """

    async_op: bool
    timeout: float | None
    algorithm: Algorithm


class Communicator(Endpoint):
    """A group of ranks that call the same operations in the same order.

    Made by ``collectives.init``, ``run``, ``from_mpi`` or ``split``; closed by ``close`` or a ``with`` block. Ranks are
    this communicator's own, 0 to ``world_size - 1``. Tensors lie on ``device`` and may have any strides; a result
    replaces the elements of the caller's own tensor, and other arguments stay unchanged. Every operation returns a
    ``Work``, which is done unless ``async_op`` was asked for (see ``Options``).

    Wrong arguments raise ``TypeError`` or ``ValueError`` before anything is sent. A ``CommError`` while an operation
    runs ends the communicator: pending Works raise it, and later calls raise ``CommClosedError`` from it.
    """

    # Collectives

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: Unpack[Options]) -> Work:
        """Combine every rank's ``tensor``, in place; all ranks get the same bits."""
        short = not options or self._may_be_short(options)
        if short and (done := self._express.one("all_reduce", op, tensor, self.timeout)):
            return done
        flat = self._flat(tensor, "tensor", written=True)
        check_reducible(tensor.dtype, op)
        chunks = flat.even(self.world_size)
        return self._collective(Collective("all_reduce", tensor.dtype, chunks, chunks, op), [flat], **options)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, **options: Unpack[Options]) -> Work:
        """Every rank's ``input`` (n elements), in rank order, into every rank's ``output`` (world_size * n).

        ``input`` may be this rank's own part of ``output``: then nothing is copied locally.
        """
        short = not options or self._may_be_short(options)
        if short and (done := self._express.two("all_gather", None, output, input, self.timeout)):
            return done
        sizes = self._even_sizes(input, "input", output, "output")
        return self._all_gather(output, input, sizes, True, **options)

    def all_gather_v(
        self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], **options: Unpack[Options]
    ) -> Work:
        """``all_gather`` with ``sizes[r]`` elements from rank r (zeros allowed); the same ``sizes`` on all ranks."""
        self._check_sizes(sizes, part=(input, "input"), whole=(output, "output"))
        return self._all_gather(output, input, sizes, len(set(sizes)) == 1, **options)

    def _all_gather(
        self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], even: bool, **options: Unpack[Options]
    ) -> Work:
        check_same_dtype(output, input)
        cuts = cuts_of(sizes)
        check_overlap(input, output, cuts[self.rank])
        source, result = self._flat(input, "input"), self._flat(output, "output", written=True)
        gathered = Chunks(result.tensor, cuts)
        own = Chunks(source.tensor, cuts, cuts[self.rank])
        place = (gathered.view(self.rank), source.tensor)
        call = Collective("all_gather", input.dtype, own, gathered, own=place, even=even)
        return self._collective(call, [result], **options)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: Unpack[Options]
    ) -> Work:
        """Combine every rank's ``input`` (world_size * n elements, rank-major); rank r gets part r in ``output`` (n).

        ``output`` may be this rank's own part of ``input``, which otherwise stays unchanged.
        """
        short = not options or self._may_be_short(options)
        if short and (done := self._express.two("reduce_scatter", op, input, output, self.timeout)):
            return done
        sizes = self._even_sizes(output, "output", input, "input")
        return self._reduce_scatter(output, input, sizes, op, True, **options)

    def reduce_scatter_v(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        sizes: Sequence[int],
        op: ReduceOp = ReduceOp.SUM,
        **options: Unpack[Options],
    ) -> Work:
        """``reduce_scatter`` with ``sizes[r]`` elements for rank r (zeros allowed); the same ``sizes`` on all ranks."""
        self._check_sizes(sizes, part=(output, "output"), whole=(input, "input"))
        return self._reduce_scatter(output, input, sizes, op, len(set(sizes)) == 1, **options)

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        sizes: Sequence[int],
        op: ReduceOp,
        even: bool,
        **options: Unpack[Options],
    ) -> Work:
        check_same_dtype(output, input)
        check_reducible(input.dtype, op)
        cuts = cuts_of(sizes)
        check_overlap(output, input, cuts[self.rank])
        source, result = self._flat(input, "input"), self._flat(output, "output", written=True)
        own = Chunks(result.tensor, cuts, cuts[self.rank])
        call = Collective("reduce_scatter", input.dtype, Chunks(source.tensor, cuts), own, op, even=even)
        return self._collective(call, [result], **options)

    def broadcast(self, tensor: torch.Tensor, src: int, **options: Unpack[Options]) -> Work:
        """Rank ``src``'s ``tensor`` into everyone's."""
        if not options and type(src) is int and (done := self._express.one("broadcast", src, tensor, self.timeout)):
            return done
        check_rank("src", src, self.world_size)
        flat = self._flat(tensor, "tensor", written=self.rank != src)
        chunks = flat.even(self.world_size)
        return self._collective(Collective("broadcast", tensor.dtype, chunks, chunks, root=src), [flat], **options)

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, **options: Unpack[Options]) -> Work:
        """Combine every rank's ``tensor`` into that of rank ``dst``; the others' stay unchanged."""
        check_rank("dst", dst, self.world_size)
        flat = self._flat(tensor, "tensor", written=self.rank == dst)
        check_reducible(tensor.dtype, op)
        chunks = flat.even(self.world_size)
        result = chunks if self.rank == dst else None
        return self._collective(Collective("reduce", tensor.dtype, chunks, result, op, root=dst), [flat], **options)

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, dst: int, **options: Unpack[Options]) -> Work:
        """Every rank's ``input`` (n elements) into ``output`` (world_size * n) of rank ``dst``, None elsewhere."""
        check_rank("dst", dst, self.world_size)
        source = self._flat(input, "input")
        cuts = cuts_of([input.numel()] * self.world_size)
        own, gathered, flats = Chunks(source.tensor, cuts, cuts[self.rank]), None, []
        if self.rank == dst:
            if output is None:
                raise ValueError(f"output is None, but this rank, {dst}, is dst and receives there")
            self._even_sizes(input, "input", output, "output")
            check_same_dtype(output, input)
            check_overlap(input, output, cuts[self.rank])
            flats = [self._flat(output, "output", written=True)]
            gathered = Chunks(flats[0].tensor, cuts)
        return self._collective(Collective("gather", input.dtype, own, gathered, root=dst), flats, **options)

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int, **options: Unpack[Options]) -> Work:
        """Part r of rank ``src``'s ``input`` (world_size * n elements, None elsewhere) into rank r's ``output`` (n)."""
        check_rank("src", src, self.world_size)
        result = self._flat(output, "output", written=True)
        cuts = cuts_of([output.numel()] * self.world_size)
        own, dealt = Chunks(result.tensor, cuts, cuts[self.rank]), None
        if self.rank == src:
            if input is None:
                raise ValueError(f"input is None, but this rank, {src}, is src and sends from there")
            self._even_sizes(output, "output", input, "input")
            check_same_dtype(output, input)
            check_overlap(output, input, cuts[self.rank])
            dealt = Chunks(self._flat(input, "input").tensor, cuts)
        return self._collective(Collective("scatter", output.dtype, dealt, own, root=src), [result], **options)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Work:
        """Part d of ``input`` to rank d; part s of ``output`` from rank s.

        Splits are in elements, one a rank, and default to equal parts; what r sends to s must be what s expects of r.
        """
        check_same_dtype(output, input)
        sides = []
        for tensor, splits, name in ((input, input_splits, "input"), (output, output_splits, "output")):
            flat = self._flat(tensor, name, written=name == "output")
            if splits is None:
                equal, left = divmod(tensor.numel(), self.world_size)
                if left:
                    raise ValueError(f"{name} has {tensor.numel()} elements, not a multiple of {self.world_size} ranks")
                splits = [equal] * self.world_size
            check_sizes(f"{name}_splits", splits, self.world_size)
            check_numel(name, tensor, sum(splits), f"the sum of {name}_splits")
            sides.append((flat, Chunks(flat.tensor, cuts_of(splits))))
        check_overlap(output, input, None)
        (_, sent), (result, received) = sides
        own = (received.view(self.rank), sent.view(self.rank))
        call = Collective("all_to_all", input.dtype, sent, received, own=own, even=False)
        return self._collective(call, [result], **options)

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work:
        """Done when every rank has called it."""
        token = torch.empty(self.world_size, dtype=torch.uint8, device=self._transport.device)
        tokens = Chunks(token, range(self.world_size + 1))
        call = Collective("barrier", torch.uint8, tokens, tokens)
        return self._collective(call, [], async_op=async_op, timeout=timeout)

    # Point to point

    def send(
        self, tensor: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Work:
        """Send ``tensor`` to rank ``dst``. Done when it may be changed again, perhaps not before it is received."""
        return self.exchange([P2P.send(tensor, dst)], tag, async_op=async_op, timeout=timeout)

    def recv(
        self, tensor: torch.Tensor, src: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Work:
        """Receive into ``tensor`` the next message with this ``tag`` from rank ``src``, of the same numel and dtype."""
        return self.exchange([P2P.recv(tensor, src)], tag, async_op=async_op, timeout=timeout)

    def exchange(
        self, ops: Sequence[P2P], tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Work:
        """Sends and receives, all under way together, so that ranks may send to each other without blocking.

        Messages between two ranks with one tag arrive in the order sent. They overtake pending collectives. A message
        to the rank itself is copied, and must be sent before, or together with, its receive.
        """
        width = spread(self._transport)
        if not 0 <= tag < self._transport.max_tag // width:
            raise ValueError(f"tag is {tag}, expected 0 to {self._transport.max_tag // width - 1}")
        for op in ops:
            check_rank("dst" if op.sends else "src", op.peer, self.world_size)
        flats = [self._flat(op.tensor, "tensor", written=not op.sends) for op in ops]
        if self._buffers and any(
            self._shared(flat.tensor) for op, flat in zip(ops, flats, strict=True) if not op.sends
        ):
            raise ValueError(
                "a receive into a shared buffer, which all ranks of a host have in common; use another tensor"
            )
        pairs = list(zip(ops, flats, strict=True))
        wire = []
        for op, flat in sorted(pairs, key=lambda pair: not pair[0].sends):
            if op.peer != self.rank:
                wire.append(P2P(op.sends, flat.tensor, op.peer))
            elif op.sends:
                self._to_self[tag].append(flat.tensor.clone())
            elif self._to_self[tag]:
                with torch.inference_mode():
                    flat.tensor.copy_(self._to_self[tag].popleft())
            else:
                raise ValueError(f"rank {self.rank} receives from itself with tag {tag}, but has not sent itself any")
        wire = [op for op in wire if op.tensor.numel()]
        messages = [self._progress.ledger.enter(op, tag) for op in wire]
        by_tag: defaultdict[int, list[P2P]] = defaultdict(list)
        for op in wire:
            by_tag[wire_tag(tag, op.tensor.numel(), op.tensor.dtype, width)].append(op)
        name = "exchange" if len(ops) != 1 else "send" if ops[0].sends else "recv"
        row = self._statistics.row(name)

        def steps() -> Iterator[Posted]:
            yield from [
                self._poster(row, sent_as)(those) for sent_as, those in by_tag.items()
            ]  # all are under way first
            for flat in flats:
                flat.finish()

        def what() -> str:
            details = ", ".join(f"{'to' if op.sends else 'from'} {op.peer}: {op.tensor.numel()}" for op in ops)
            return f"{name} ({details})"

        return self._start(what, steps(), row, async_op, timeout, messages=messages)

    # Objects

    def broadcast_object(self, obj: T | None, src: int) -> T:
        """Rank ``src``'s object, pickled, on every rank."""
        data = self._packed(obj) if self.rank == src else None
        length = torch.tensor([0 if data is None else data.numel()], device=self.device)
        self.broadcast(length, src)
        if data is None:
            data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.broadcast(data, src)
        return obj if self.rank == src else pickle.loads(data.cpu().numpy().tobytes())  # type: ignore[return-value]

    def all_gather_object(self, obj: T) -> list[T]:
        """Every rank's object, pickled, in rank order."""
        data = self._packed(obj)
        sizes = self._gather_ints(data.numel())
        everything = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self.all_gather_v(everything, data, sizes)
        return [pickle.loads(part.cpu().numpy().tobytes()) for part in torch.split(everything, sizes)]

    def gather_object(self, obj: T, dst: int) -> list[T] | None:
        """Every rank's object, pickled, in rank order, on rank ``dst``; None elsewhere."""
        check_rank("dst", dst, self.world_size)
        data = self._packed(obj)
        sizes = self._gather_ints(data.numel())
        if self.rank != dst:
            self.send(data, dst)
            return None
        parts = [data if n == dst else torch.empty(size, dtype=torch.uint8) for n, size in enumerate(sizes)]
        self.exchange([P2P.recv(part, peer) for peer, part in enumerate(parts) if peer != dst])
        return [pickle.loads(part.cpu().numpy().tobytes()) for part in parts]

    def _packed(self, obj: object) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(self.device)

    def _gather_ints(self, *values: int) -> list[int]:
        output = torch.empty(self.world_size * len(values), dtype=torch.int64, device=self.device)
        self.all_gather(output, torch.tensor(values, device=self.device))
        return [int(value) for value in output.tolist()]

    # Memory

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D tensor of ``numel`` elements, in the memory that this backend reaches fastest.

        Collective: the same ``numel`` and ``dtype`` on all ranks. The caller owns it.
        """
        return self._transport._allocate(numel, dtype).to(self.device)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> SharedBuffer | None:
        """One buffer a host, mapped by all its ranks; None where the backend shares no memory.

        Collective: the same ``numel`` and ``dtype`` on all ranks. It lives until every rank has released it, or let go
        of all tensors that show it.
        """
        if not self._transport.shares or not numel or self.device.type != "cpu":
            return None
        rows = self._gather_ints(self._transport._offer_shared(numel, dtype), numel, dtype.itemsize)
        offers, numels, sizes = rows[::3], rows[1::3], rows[2::3]
        if len(set(zip(numels, sizes, strict=True))) > 1:
            found = ", ".join(f"rank {r}: {n} of {size} bytes" for r, (n, size) in enumerate(zip(numels, sizes)))  # noqa: B905
            raise ValueError(f"allocate_shared was called with different sizes: {found}; call it alike everywhere")
        buffer = self._transport._map_shared(numel, dtype, offers)
        self._buffers.add(buffer)
        self._express.forget()  # while there are any, every output is compared with them
        return buffer

    # Life

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator among the ranks with the same ``color``, ordered by (``key``, rank); None for ``color`` None.

        Collective over this communicator. It is closed with this one, or before. Setting it up may take as long as
        ``init`` may; if a member dies or that time passes, this communicator fails, on all ranks.
        """
        present = color is not None
        rows = self._gather_ints(int(present), color or 0, key, self.node)
        self._splits += 1
        self._progress.calls += 1  # of setting up, which is a call of its own to the control plane
        if not present:
            return None
        table = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        members = [rank for rank, row in enumerate(table) if row[0] and row[1] == color]
        members.sort(key=lambda rank: (table[rank][2], rank))
        neighbours = [rank for rank in members if table[rank][3] == self.node]
        # Which splits led here: siblings split further must not be mistaken for each other.
        group = f"{self._progress.name}/{self._splits}.{color}"
        transport = self._progress.set_up(lambda: self._transport._split(members, group), members, self.timeout)
        return self._child(transport, members, neighbours, group, self.timeout)

    def _subgroup(self, members: Sequence[int], nodes: Sequence[int], name: str, timeout: float) -> Communicator:
        """A communicator among ``members``, in this order, that the others know nothing of.

        Collective over the members only, so none may be lost meanwhile. ``nodes`` are the hosts of all ranks of this
        communicator, and ``name`` is one that no other part of it has.
        """
        self._check_usable()
        group = f"{self._progress.name}/{name}"
        neighbours = [rank for rank in members if nodes[rank] == self.node]
        return self._child(self._transport._split(members, group), members, neighbours, group, timeout)

    def _child(
        self, transport: Backend, members: Sequence[int], neighbours: Sequence[int], group: str, timeout: float
    ) -> Communicator:
        child = Communicator(
            transport,
            RankInfo(
                rank=members.index(self.rank),
                world_size=len(members),
                local_rank=neighbours.index(self.rank),
                local_world_size=len(neighbours),
                node=self.node,
            ),
            name=self.backend,
            layers=self._layers,
            device=self.device,
            timeout=timeout,
            algorithm=self._selection.default,
            table=self._selection.table,
            validate=self._validate,
            control=self._control,
            group=group,
            members=[self._progress.members[rank] for rank in members],
        )
        self._children.append(child)
        return child
