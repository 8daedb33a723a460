"""Checkpoints: saved by any number of ranks at any stage, loaded by any other, never lost, opened by other tools."""

from fsdp.checkpoint.directory import complete, latest
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.export import export
from fsdp.checkpoint.extras import Extra, LikeParameters, OtherRanks, PerRank
from fsdp.checkpoint.full_model import LoadResult, load_full_state_dict
from fsdp.checkpoint.full_optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict
from fsdp.checkpoint.loading import load
from fsdp.checkpoint.rng import rng_state, set_rng_state
from fsdp.checkpoint.saving import Saving, save

__all__ = [
    "CheckpointError",
    "Extra",
    "LikeParameters",
    "LoadResult",
    "OtherRanks",
    "PerRank",
    "Saving",
    "complete",
    "export",
    "full_optimizer_state_dict",
    "latest",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "rng_state",
    "save",
    "set_rng_state",
]
