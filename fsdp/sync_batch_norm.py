"""Batch normalisation with the statistics of all ranks' batches, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from collectives import Communicator
from fsdp.subset import subset


class _Sum(torch.autograd.Function):
    """The sum over ranks, differentiable: every rank's loss depends on it."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
        ctx.comm = comm
        total = tensor.clone()
        comm.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        total = gradients[0].clone()
        ctx.comm.all_reduce(total)
        return None, total


class SyncBatchNorm(_BatchNorm):
    """Normalises over the batches of all ranks of ``comm``, which may differ in size. Otherwise like ``BatchNorm``.

    Made by ``convert_sync_batchnorm``. Collective in training: two small all_reduces in forward, two in backward.
    """

    def __init__(self, like: _BatchNorm, comm: Communicator) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, affine=False, track_running_stats=False)
        self.affine, self.track_running_stats = like.affine, like.track_running_stats
        self._parameters.update(like._parameters)
        self._buffers.update(like._buffers)
        self.training = like.training
        self.comm = comm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shape (batch, features, ...) to the same shape."""
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 dimensions or more, got {input.dim()}")
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        wide = input if input.dtype == torch.float64 else input.float()
        others = [d for d in range(input.dim()) if d != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = wide.new_full((1,), input.numel() // self.num_features)
        sums = _Sum.apply(self.comm, torch.cat([wide.sum(others), count]))  # type: ignore[no-untyped-call]
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = wide - mean.view(shape)
        variance = _Sum.apply(self.comm, centred.square().sum(others)) / total  # type: ignore[no-untyped-call]
        self._track(mean.detach(), variance.detach(), total)
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        result: torch.Tensor = output.to(input.dtype)
        return result

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if share is None else share
        assert share is not None
        unbiased = variance * (total / (total - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def convert_sync_batchnorm(module: nn.Module, comm: Communicator) -> nn.Module:
    """Put a ``SyncBatchNorm`` in place of every batch normalisation in ``module``, before it is wrapped. Collective.

    Parameters and buffers are the same objects, under the same names. Their messages travel on a communicator of their
    own, as ranks may be at different reductions when they normalise.

    Returns:
        ``module``, or what took its place.
    """
    return _convert(module, subset(comm, comm.world_size, "normalisation"))


def _convert(module: nn.Module, comm: Communicator) -> nn.Module:
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return SyncBatchNorm(module, comm)
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _convert(child, comm)
    return module
