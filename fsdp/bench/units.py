"""Python time per unit and step: hooks and bookkeeping, on units that compute next to nothing, at world size 1."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Mapping
from statistics import median

import torch
from torch import nn

import collectives
from collectives import Communicator
from fsdp import fully_shard
from fsdp.bench import torch_parts
from fsdp.bench.models import Chain, TinyUnit

PLAIN, OURS, FSDP2 = "plain model", "ours, stage 3", "torch FSDP2"


def microseconds(units: int, steps: int, warm_up: int = 3) -> dict[str, float]:
    """Median microseconds of CPU time that a unit costs in a step, by contender. They take turns.

    A step is forward, backward and the dropping of gradients. What the calling thread spends is counted, and neither
    its waiting nor the work of other threads (gloo has some).

    Raises ``ArithmeticError`` where contenders computed different losses.
    """
    found: dict[str, float] = collectives.run(_measure, units, steps, warm_up, n=1)[0]
    return found


def _measure(comm: Communicator, units: int, steps: int, warm_up: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = Chain(units)
    with tempfile.TemporaryDirectory() as folder, torch_parts.process_group(0, 1, f"{folder}/meeting"):
        models = {PLAIN: model, OURS: copy.deepcopy(model), FSDP2: copy.deepcopy(model)}
        fully_shard(models[OURS], comm, units=[TinyUnit])
        torch_parts.fsdp2(models[FSDP2], list(models[FSDP2].units))
        seconds = _alternate(models, torch.randn(4, 16), steps, warm_up)
    return {name: median(found) * 1e6 / units for name, found in seconds.items()}


def _alternate(models: Mapping[str, nn.Module], x: torch.Tensor, steps: int, warm_up: int) -> Mapping[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step in range(warm_up + steps):
        losses = []
        for name, model in models.items():
            started = time.thread_time()
            loss = model(x)
            loss.backward()
            model.zero_grad()
            if step >= warm_up:
                seconds[name].append(time.thread_time() - started)
            losses.append(float(loss.detach()))
        if len(set(losses)) > 1:
            raise ArithmeticError(f"expected the same loss of {', '.join(models)}; found {losses}")
    return seconds
