"""DDP, ZeRO-1/2/3 and FSDP over any ``collectives.Communicator``."""

from fsdp.checkpoint import (
    CheckpointError,
    LikeParameters,
    OtherRanks,
    PerRank,
    export,
    full_optimizer_state_dict,
    latest,
    load,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    rng_state,
    save,
    set_rng_state,
)
from fsdp.clip import clip_grad_norm_
from fsdp.ddp import DistributedDataParallel
from fsdp.estimate import Estimate, estimate
from fsdp.fsdp_module import FSDPModule, register_fsdp_forward_method
from fsdp.full_params import summon_full_params
from fsdp.fully_shard import fully_shard
from fsdp.offload import CPUOffloadPolicy
from fsdp.precision import MixedPrecisionPolicy
from fsdp.state_dict import full_state_dict
from fsdp.statistics import unit_statistics
from fsdp.sync_batch_norm import convert_sync_batchnorm
from fsdp.synced_forwards import synced_forwards

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointError",
    "DistributedDataParallel",
    "Estimate",
    "FSDPModule",
    "LikeParameters",
    "MixedPrecisionPolicy",
    "OtherRanks",
    "PerRank",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "estimate",
    "export",
    "full_optimizer_state_dict",
    "full_state_dict",
    "fully_shard",
    "latest",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "register_fsdp_forward_method",
    "rng_state",
    "save",
    "set_rng_state",
    "summon_full_params",
    "synced_forwards",
    "unit_statistics",
]
