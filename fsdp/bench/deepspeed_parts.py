"""DeepSpeed's ZeRO, to compare with where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

MISSING = "deepspeed is not installed: pip install deepspeed"


def installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


class Engine(NamedTuple):
    """``step``: one training step, ids in, loss out; ``save`` and ``load``: a checkpoint in a folder. Collective."""

    step: Callable[[torch.Tensor], torch.Tensor]
    save: Callable[[Path], object]
    load: Callable[[Path], object]


def engine(model: nn.Module, stage: int, rows: int, world_size: int) -> Engine:
    """ZeRO with AdamW over torch's default process group."""
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of names that it uses
    settings = {
        "train_micro_batch_size_per_gpu": rows,
        "train_batch_size": rows * world_size,
        "gradient_clipping": 0.0,  # otherwise it clips at 1
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trained, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = trained(ids)
        trained.backward(loss)
        trained.step()
        return loss

    return Engine(
        step,
        lambda path: trained.save_checkpoint(str(path), tag="saved"),
        lambda path: trained.load_checkpoint(str(path), tag="saved"),
    )
