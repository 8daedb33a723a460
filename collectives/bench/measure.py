"""The measuring itself: buffers, turns, and verification of every result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from collectives.bench.contenders import COPY, COPYING, LIBRARY, NATIVE, Contender
from collectives.bench.memory import Memory, Sample, private
from collectives.bench.operations import OPERATIONS, Data, Part
from collectives.communicator import Communicator
from collectives.errors import UnsupportedError

# A sample of small messages is several calls, each on memory of its own, so that a barrier's skew is spread over them.
_SAMPLE_BYTES = 128 * 1024
_MOST_CALLS = 64
WARM_UP = 2  # samples of each contender that do not count


@dataclass(frozen=True)
class Case:
    """What is called: ``operation`` over about ``nbytes`` on its larger side, on tensors in the cache or not."""

    operation: str
    nbytes: int
    dtype: torch.dtype
    cold: bool

    def numel(self, size: int) -> int:
        """Elements of the larger side: a multiple of the world size."""
        return max(1, self.nbytes // self.dtype.itemsize // size) * size


class Result(NamedTuple):
    """One contender's: the seconds of a call on the slowest rank, by sample; samples that were wrong on some rank."""

    contender: str
    seconds: list[float]
    wrong: int


class Bench:
    """One case on this rank. Collective over ``sync``, whose barrier separates samples and which carries the results.

    Contenders take turns, one sample each. Before that all samples' tensors are filled, and afterwards every result is
    verified. Hot: every sample has the same tensors, just written. Cold: so many that they exceed twice the last-level
    cache, which the ranks of a host share; the first one filled is the first one used.
    """

    def __init__(self, case: Case, contenders: Sequence[Contender], sync: Communicator, cache_bytes: int) -> None:
        self._case = case
        self._operation = OPERATIONS[case.operation]
        self._sync = sync
        self._rank, self._size = sync.rank, sync.world_size
        self._numel = numel = case.numel(self._size)
        nbytes = numel * case.dtype.itemsize
        self._calls = max(1, min(_MOST_CALLS, _SAMPLE_BYTES // nbytes))
        rotating = max(2, -(-2 * cache_bytes // (self._size * nbytes * self._calls)))
        self._rotating = rotating if case.cold else 1
        self._samples: dict[Memory, list[Sample]] = {}
        self._data = Data.of(numel, case.dtype)
        self.left_out: dict[str, str] = {}
        self.contenders = [c for c in (COPYING, *contenders) if case.operation in c.calls and self._able(c)]

    def run(self, iterations: int) -> list[Result]:
        """``iterations`` samples of each contender, and of the copy; the same results on every rank."""
        count = len(self.contenders)
        seconds: list[list[float]] = [[] for _ in range(count)]
        wrong = [0] * count
        turns = count * (iterations + WARM_UP)
        for first in range(0, turns, self._rotating):
            self._sync.barrier()  # nobody still reads what has been shared
            batch = []
            for number, turn in enumerate(range(first, min(first + self._rotating, turns))):
                contender = self.contenders[turn % count]
                batch.append((turn, contender, self._samples[contender.memory][number]))
            for turn, contender, sample in batch:
                self._fill(sample, contender, turn)
            for turn, contender, sample in batch:
                seconds[turn % count].append(self._time(sample, contender))
            for turn, contender, sample in batch:
                wrong[turn % count] += not self._right(sample, contender, turn)
        mine = torch.tensor(
            [[float(n), *s[WARM_UP:]] for n, s in zip(wrong, seconds, strict=True)], dtype=torch.float64
        )
        everyone = torch.empty(self._size, *mine.shape, dtype=torch.float64)
        self._sync.all_gather(everyone, mine)
        worst = everyone.amax(0).tolist()
        return [Result(c.name, row[1:], int(row[0])) for c, row in zip(self.contenders, worst, strict=True)]

    def _able(self, contender: Contender) -> bool:
        """Whether there is such memory, and a library's call does this dtype.

        It fails on every rank or on none, and before it sends anything.
        """
        try:
            if contender.memory not in self._samples:
                made = [contender.memory(self._numel, self._calls, self._case.dtype) for _ in range(self._rotating)]
                self._samples[contender.memory] = made
                if contender.memory is not private:  # pages of peers are mapped here when they are first read
                    for sample in made:
                        self._fill(sample, contender, 0)
                        self._time(sample, contender)
            if contender.name.startswith(LIBRARY) or contender.name.endswith(f"@{NATIVE}"):
                sample = self._samples[contender.memory][0]
                self._fill(sample, contender, 0)
                self._time(sample, contender)
        except (KeyError, RuntimeError, TypeError, UnsupportedError) as error:
            self.left_out[contender.name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return False
        return True

    def _tensors(self, sample: Sample, contender: Contender) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = list(zip(sample.a, sample.b, strict=True))
        return rows if contender.name == COPY else [self._operation.tensors(a, b, self._size) for a, b in rows]

    def _fill(self, sample: Sample, contender: Contender, turn: int) -> None:
        """This rank's contribution in the input, or in the output where the operation works in place."""
        offset = Data.offsets(turn, self._size)[self._rank]
        for output, input in self._tensors(sample, contender):
            self._data.fill(input, offset)
            if input is not output and not sample.shared:
                output.fill_(-1)  # so that an old result is not taken for a new one

    def _time(self, sample: Sample, contender: Contender) -> float:
        """Seconds of one call."""
        run = contender.calls[self._case.operation]
        tensors = self._tensors(sample, contender)
        self._sync.barrier()
        start = time.perf_counter()
        if sample.shared:
            for (output, input), buffer in zip(tensors, sample.shared, strict=True):
                run(output, input)
                buffer.retire()
        else:
            for output, input in tensors:
                run(output, input)
        return (time.perf_counter() - start) / self._calls

    def _right(self, sample: Sample, contender: Contender, turn: int) -> bool:
        offsets = Data.offsets(turn, self._size)
        if contender.name == COPY:
            parts = [Part(0, self._numel, 0, 1, offsets[self._rank])]
        else:
            parts = list(self._operation.answer(self._numel, self._rank, self._size, offsets))
        results = [output for output, _ in self._tensors(sample, contender)]
        return all(self._data.holds(result, part) for result in results for part in parts)
