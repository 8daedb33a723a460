"""DeepSpeed's ZeRO, to compare with where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable

import torch
from torch import nn

MISSING = "deepspeed is not installed: pip install deepspeed"


def installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def trainer(model: nn.Module, stage: int, rows: int, world_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """One training step over torch's default process group: ids in, loss out."""
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
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss

    return step
