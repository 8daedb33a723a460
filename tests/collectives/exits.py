"""A program whose ranks end in one of many ways. Started by tests: python -m tests.collectives.exits HOW BACKEND."""

from __future__ import annotations

import os
import sys
import threading
import time

import torch

import collectives
from collectives.errors import CommError


def main(how: str, backend: str) -> None:
    comm = collectives.init(backend, timeout=60.0)
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [comm.world_size] * 3
    first = comm.rank == 0
    if how == "close":
        comm.close()
    if how == "late" and first:
        time.sleep(1.0)
    if how in ("close", "late", "plain"):
        print(f"rank {comm.rank} is done")
        return
    if not first:
        try:
            comm.barrier()
        except CommError as error:
            print(f"rank {comm.rank} sees {type(error).__name__}", file=sys.stderr, flush=True)
            raise
    if how == "thread":
        threading.Thread(target=time.sleep, args=(120,)).start()
    if how in ("raise", "thread"):
        raise ArithmeticError("the first failure")
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
