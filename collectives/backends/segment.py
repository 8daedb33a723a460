"""Memory that the ranks of a host share: one anonymous file a rank, as large as the host's memory, touched as needed.

[Note: one sparse file]
A file made by memfd_create has no name, so a crash leaves nothing behind, and the size of /dev/shm does not bound it.
It is as long as the host's memory from the start, because pages that nobody touches cost nothing. So peers map it once,
and whatever a rank allocates later is already in reach of all of them.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy
import torch

from collectives.errors import CommError

PAGE = 4096
_ADDRESSABLE = 2**46  # half of what a process on x86-64 has: the files of all ranks on a host must fit
_MAP_NORESERVE = 0x4000  # linux/mman.h
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23


class Segment:
    """A rank's file, mapped here.

    Args:
        fd: the file, which is closed by ``drop``.
        size: its length in bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        with contextlib.suppress(OSError):
            self._map.madvise(_MADV_DONTDUMP)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        self.words = memoryview(self._map).cast("Q")  # a word is written at once and in order, as x86-64 stores are

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements from byte ``offset`` on, as they are. The tensor keeps the mapping alive."""
        with torch.inference_mode(False):  # a tensor made in it could not be written outside of it
            return self._bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def lend(self, offset: int, numel: int, dtype: torch.dtype, forget: Callable[[], object]) -> torch.Tensor:
        """The same, and ``forget`` is called when nobody holds the tensor, or a view of it, any more."""
        if numel == 0:
            forget()
            return torch.empty(0, dtype=dtype)
        memory = memoryview(self._map)[offset : offset + numel * dtype.itemsize]
        weakref.finalize(memory, forget).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def show(self, offset: int, numel: int, dtype: torch.dtype, forget: Callable[[], object]) -> torch.Tensor:
        """The same, at another address that is for reading only; ``offset`` is that of a page."""
        nbytes = numel * dtype.itemsize
        pages = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ, offset=offset)
        # torch would warn of a buffer that Python knows to be read-only.
        memory = _bytes(nbytes).from_address(numpy.frombuffer(pages, numpy.uint8).ctypes.data)
        memory.pages = pages
        weakref.finalize(memory, forget).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def protect(self, tensor: torch.Tensor, on: bool) -> None:
        """Whether writing to the pages that lie wholly in ``tensor`` ends this process."""
        first = -(-tensor.data_ptr() // PAGE) * PAGE
        end = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
        allowed = mmap.PROT_READ if on else mmap.PROT_READ | mmap.PROT_WRITE
        if first < end and ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(first), end - first, allowed):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def drop(self) -> None:
        """Unmap, as soon as nobody holds a tensor of it any more."""
        del self._bytes, self._map, self.words
        os.close(self.fd)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a contiguous tensor lies in this file; None where it does not, or at no multiple of its item size."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.size and offset % tensor.dtype.itemsize == 0 else None


class Heap(Segment):
    """This rank's own file, and what is allocated in it.

    Raises:
        OSError: the kernel makes no such files, or a limit on address space or file size is too low.
    """

    def __init__(self, neighbours: int) -> None:
        """``neighbours``: how many ranks are on this host, each with a file that all map."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        size = min(memory, _ADDRESSABLE // max(1, neighbours)) // PAGE * PAGE
        fd = os.memfd_create("collectives", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            super().__init__(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._free = [(0, size)]  # (offset, size), ascending, never touching
        self._sizes: dict[int, int] = {}
        self._returned: deque[int] = deque()  # by finalizers, which run at any time and in any thread
        self._doomed: list[tuple[int, Callable[[], bool]]] = []
        self._populated = 0  # everything below has been touched

    def reserve(self, nbytes: int) -> int:
        """The offset of ``nbytes`` bytes, on a page of their own and touched, so that using them never faults.

        Raises ``CommError`` where the host has no memory left.
        """
        self._collect()
        nbytes = max(1, -(-nbytes // PAGE)) * PAGE
        i = next((i for i, (_, size) in enumerate(self._free) if size >= nbytes), None)
        if i is None:
            raise CommError(f"expected {nbytes} bytes of shared memory, found no gap so long in {self.size} bytes")
        offset, size = self._free[i]
        self._populate(offset, nbytes)
        self._free[i : i + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
        self._sizes[offset] = nbytes
        return offset

    def _populate(self, offset: int, nbytes: int) -> None:
        first, end = max(offset, self._populated), offset + nbytes
        if first >= end:
            return
        try:
            os.posix_fallocate(self.fd, first, end - first)  # where memory ends, touching would kill the process
        except OSError as error:
            raise CommError(
                f"expected {end - first} more bytes of shared memory, found none: {error.strerror}; this rank has "
                f"{self._populated} bytes of it. Use smaller buffers, fewer ranks on the host, or a backend without shm"
            ) from error
        with contextlib.suppress(OSError):  # a kernel before 5.14; pages are then mapped one by one when first used
            self._map.madvise(_MADV_POPULATE_WRITE, first, end - first)
        self._populated = end

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, whose memory is used again when nobody holds it any more."""
        offset = self.reserve(numel * dtype.itemsize)
        return self.lend(offset, numel, dtype, partial(self._returned.append, offset))

    def release(self, offset: int, when: Callable[[], bool]) -> None:
        """What was reserved at ``offset`` is free as soon as ``when()``, asked now and then, says so."""
        self._doomed.append((offset, when))

    def _collect(self) -> None:
        while self._returned:
            self._give_back(self._returned.popleft())
        ready = [offset for offset, when in self._doomed if when()]
        self._doomed = [entry for entry in self._doomed if entry[0] not in ready]
        for offset in ready:
            self._give_back(offset)

    def _give_back(self, offset: int) -> None:
        size = self._sizes.pop(offset)
        i = bisect.bisect(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + size:
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            offset, before = self._free[i - 1]
            self._free[i - 1] = (offset, before + size)
        else:
            self._free.insert(i, (offset, size))

    def drop(self) -> None:
        self._doomed.clear()
        super().drop()


@lru_cache(maxsize=64)
def _bytes(count: int) -> Any:
    return ctypes.c_ubyte * count
