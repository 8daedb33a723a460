"""Our communicators as backends of ``torch.distributed``: importing this registers them.

    import collectives.torch_backend
    torch.distributed.init_process_group("cshm")

``cshm`` shares memory inside a host, ``cmpi`` is MPI, ``cgloo`` gloo with our schedules, ``cring`` hand-written rings.
``python -m collectives.torch_backend script.py`` runs a script that knows nothing of this.
"""

import functools

import torch.distributed as dist

from collectives.torch_backend import features
from collectives.torch_backend.creation import NAMES, create
from collectives.torch_backend.process_group import CollectivesProcessGroup
from collectives.torch_backend.rendezvous_handler import extend_env

__all__ = ["NAMES", "CollectivesProcessGroup"]

features.check()
for _name in NAMES:
    dist.Backend.register_backend(_name, functools.partial(create, _name), extended_api=True, devices=["cpu"])
features.leave_unrecorded(NAMES)
extend_env()
