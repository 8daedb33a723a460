"""One Communicator over gloo, NCCL, MPI and threads, with collectives as readable schedules over sends."""

from collectives import errors
from collectives.backends.mpi import from_mpi
from collectives.borrowed import from_process_group
from collectives.communicator import Communicator
from collectives.errors import CommError
from collectives.local import run
from collectives.rendezvous import init
from collectives.types import P2P, ReduceOp, SharedBuffer, Work

__all__ = [
    "P2P",
    "CommError",
    "Communicator",
    "ReduceOp",
    "SharedBuffer",
    "Work",
    "errors",
    "from_mpi",
    "from_process_group",
    "init",
    "run",
]
