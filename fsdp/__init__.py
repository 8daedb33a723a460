"""DDP, ZeRO-1/2/3 and FSDP over any ``collectives.Communicator``."""

from fsdp.clip import clip_grad_norm_
from fsdp.ddp import DistributedDataParallel
from fsdp.fully_shard import FSDPModule, fully_shard
from fsdp.offload import CPUOffloadPolicy
from fsdp.precision import MixedPrecisionPolicy
from fsdp.state_dict import full_state_dict

__all__ = [
    "CPUOffloadPolicy",
    "DistributedDataParallel",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
]
