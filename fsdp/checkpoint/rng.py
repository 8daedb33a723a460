"""Random generators' states, to save in ``extra`` and to put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from fsdp.checkpoint.extras import OtherRanks, PerRank


def rng_state() -> PerRank:
    """The states of Python's, NumPy's and torch's generators of this process, the current accelerator's included."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module(device).get_rng_state()
    return PerRank(state)


def set_rng_state(state: Any) -> bool:
    """Put back what ``rng_state`` saved, as ``load`` returned it. False, and nothing done, at another world size."""
    if isinstance(state, OtherRanks):
        return False
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    device = torch.accelerator.current_accelerator()
    if "accelerator" in state and device is not None:
        torch.get_device_module(device).set_rng_state(state["accelerator"])
    return True
