"""One rank of a small job: joins by ``init`` with the options of the command line, adds up ranks, says who it is."""

from __future__ import annotations

import argparse
import json
import time

import torch

import collectives
from collectives.rendezvous import environment, resolve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--setup-timeout", type=float, default=60.0)
    parser.add_argument("--late", type=float, default=0.0, help="seconds that rank 1 comes late to init")
    parser.add_argument("--times", type=int, default=1, help="communicators, one after the other and all kept")
    options = parser.parse_args()
    if options.late and resolve(environment()).rank == 1:
        time.sleep(options.late)
    comms = [
        collectives.init(options.backend, timeout=options.timeout, setup_timeout=options.setup_timeout)
        for _ in range(options.times)
    ]
    sums = []
    for comm in reversed(comms):
        tensor = torch.tensor([comm.rank + 1.0])
        comm.all_reduce(tensor)
        sums.append(tensor.item())
    comm = comms[0]
    print(json.dumps({"rank": comm.rank, "size": comm.world_size, "backend": comm.backend, "sums": sums}), flush=True)
    for comm in comms:
        comm.close()


if __name__ == "__main__":
    main()
