"""The three-minute tour: what data parallelism does with a model, step by step, against one ``Communicator``.

    python -m launch.demo                      # starts two ranks itself
    mpirun -n 4 python -m launch.demo          # or any launcher

Read on from ``broadcast_module``: (a) ranks are made equal, (b) they stay equal by averaging gradients, (c) a parameter
is kept in shards and rebuilt when needed, and (d) that is why DDP, ZeRO and FSDP need different amounts of memory.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import collectives
import fsdp
from collectives import Communicator, ReduceOp
from launch import __main__ as launcher
from launch.entry import InputError, JobParser, identity, on_rank_0, run_job

FEATURES = 31  # odd on purpose: shards need padding
WIDTH = 128
SHAPES = ((16, 15), (7, 15), (3,), (1, 7), (), (0,))
FILE = Path("outputs/ddp-demo.json")
ALIGNMENT = 64  # bytes; parameters in a shard start and end on such multiples
STAGES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP": 3}


def broadcast_module(module: nn.Module, comm: Communicator) -> None:
    """(a) Overwrite every rank's parameters and buffers with those of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        comm.broadcast(tensor.detach(), src=0)


def all_reduce_grads_(module: nn.Module, comm: Communicator) -> float:
    """(b) Replace every gradient by its average over ranks; returns the L2 norm of them all.

    A parameter that this rank did not use counts as zero: every rank must make the same calls.
    """
    squares = 0.0
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        comm.all_reduce(parameter.grad, ReduceOp.AVG)
        squares += parameter.grad.double().square().sum().item()
    return float(squares**0.5)


def shard_of(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """(c) This rank's part of ``tensor``: 1/N of its elements, rounded up, the last ones padded with zeros."""
    flat = tensor.detach().flatten()
    size = -(-flat.numel() // comm.world_size)
    padded = F.pad(flat, (0, size * comm.world_size - flat.numel()))
    return padded[comm.rank * size : (comm.rank + 1) * size].clone()


def rebuild(shard: torch.Tensor, shape: torch.Size, comm: Communicator) -> torch.Tensor:
    """(c) The whole tensor again, from every rank's shard."""
    gathered = shard.new_empty(shard.numel() * comm.world_size)
    comm.all_gather(gathered, shard)
    return gathered[: shape.numel()].view(shape)


@dataclass(frozen=True)
class Bytes:
    """(d) What one rank holds after a step with AdamW, and sent during it."""

    parameters: int
    gradients: int
    optimizer: int
    sent: int

    @property
    def held(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def measure(comm: Communicator, stage: int, seed: int) -> Bytes:
    """(d) Take one step at ``stage``, and look at the storages that are left."""
    module = network(seed, comm)
    if stage == 0:
        wrapped: nn.Module = fsdp.DistributedDataParallel(module, comm)
    else:
        wrapped = fsdp.fully_shard(module, comm, stage=stage, units=[nn.Linear])
    optimizer = torch.optim.AdamW(wrapped.parameters())
    inputs, targets = batch(seed, 0, 4, comm)
    before = comm.stats().sent_bytes
    F.mse_loss(wrapped(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    sent = comm.stats().sent_bytes - before
    parameters = list(wrapped.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return Bytes(
        parameters=storage_bytes(parameters),
        gradients=storage_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer=storage_bytes(value for value in state if isinstance(value, torch.Tensor)),
        sent=sent,
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Memory behind ``tensors``, each storage counted once. A view keeps all of its storage alive."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def network(seed: int, comm: Communicator) -> nn.Module:
    """A small regression network; equal seeds give equal weights, also where ranks are threads of one process."""
    module = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)
    return module.to(comm.device)


def batch(seed: int, step: int, size: int, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (size, FEATURES) and targets (size, 1), a function of the seed and the step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    inputs = torch.randn(size, FEATURES, generator=generator)
    return inputs.to(comm.device), inputs.sin().sum(1, keepdim=True).to(comm.device)


def everywhere(ok: bool, comm: Communicator) -> bool:
    """Whether ``ok`` holds on every rank."""
    flag = torch.tensor([int(ok)], device=comm.device)
    comm.all_reduce(flag, ReduceOp.MIN)
    return bool(flag.item())


def parameter_sums(module: nn.Module, comm: Communicator) -> list[float]:
    """Every rank's sum of its parameters, by rank."""
    own = torch.stack([p.detach().double().sum() for p in module.parameters()]).sum().reshape(1)
    sums = own.new_empty(comm.world_size)
    comm.all_gather(sums, own)
    return [float(value) for value in sums.tolist()]


def equal_to_rank_0(module: nn.Module, comm: Communicator) -> bool:
    """Whether every rank's parameters have the bits of rank 0's."""
    own = nn.utils.parameters_to_vector(module.parameters()).detach()
    theirs = own.clone()
    comm.broadcast(theirs, src=0)
    return everywhere(torch.equal(own, theirs), comm)


def tour(comm: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """All four parts. Returns what was found, ``checks`` among it, the same on every rank."""
    module = network(options.seed + comm.rank, comm)
    sums_at_first = parameter_sums(module, comm)
    broadcast_module(module, comm)
    checks = {"broadcast_makes_ranks_equal": equal_to_rank_0(module, comm)}

    single = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    losses: list[float] = []
    norm, difference = 0.0, 0.0
    for step in range(options.num_steps):
        inputs, targets = batch(options.seed, step, options.batch_size * comm.world_size, comm)
        mine = slice(comm.rank * options.batch_size, (comm.rank + 1) * options.batch_size)
        optimizer.zero_grad()
        loss = F.mse_loss(module(inputs[mine]), targets[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        step_norm = all_reduce_grads_(module, comm)
        if step == 0:
            F.mse_loss(single(inputs), targets).backward()  # type: ignore[no-untyped-call]
            norm, difference = step_norm, largest_difference(module, single, comm)
        optimizer.step()
        mean = loss.detach().double()
        comm.all_reduce(mean, ReduceOp.AVG)
        losses.append(mean.item())
    checks["averaged_gradients_equal_single_process"] = difference <= 1e-6 * max(1.0, norm)
    checks["ranks_equal_after_training"] = equal_to_rank_0(module, comm)

    generator = torch.Generator().manual_seed(options.seed)
    tensors = [p.detach() for p in module.parameters()]
    tensors += [torch.randn(shape, generator=generator).to(comm.device) for shape in SHAPES]
    whole = all(torch.equal(t, rebuild(shard_of(t, comm), t.shape, comm)) for t in tensors)
    checks["shards_rebuild_bit_identical"] = everywhere(whole, comm)

    held = {name: measure(comm, stage, options.seed) for name, stage in STAGES.items()}
    slack = 4 * ALIGNMENT * (len(list(module.parameters())) + 1)  # parameter, gradient, two moments; and step counts
    most = 1.01 * held["DDP"].held / comm.world_size + slack
    small = all(held[name].held <= most for name, stage in STAGES.items() if stage)
    checks["sharded_state_is_one_nth"] = everywhere(small, comm)

    sums = parameter_sums(module, comm)
    return {
        "schema": "collectives-fsdp/ddp-demo/1",
        "world_size": comm.world_size,
        "backend": comm.backend,
        "param_sum_before_broadcast_per_rank": sums_at_first,
        "param_sum_per_rank": sums,
        "param_sum_spread": max(sums) - min(sums),
        "losses": losses,
        "grad_norm_after_all_reduce": norm,
        "manual_all_reduce_max_diff_vs_single_process": difference,
        "fsdp_round_trip_all_ranks_ok": checks["shards_rebuild_bit_identical"],
        "bytes_per_rank": {
            name: {
                "parameters": b.parameters,
                "gradients": b.gradients,
                "optimizer": b.optimizer,
                "share_of_ddp": b.held / held["DDP"].held,
                "sent_per_step": b.sent,
            }
            for name, b in held.items()
        },
        "checks": checks,
    }


def largest_difference(module: nn.Module, single: nn.Module, comm: Communicator) -> float:
    """Between the gradients of two modules, over all ranks."""
    pairs = zip(module.parameters(), single.parameters(), strict=True)
    worst = torch.stack([(a.grad - b.grad).abs().max() for a, b in pairs if a.grad is not None and b.grad is not None])
    comm.all_reduce(largest := worst.max().double(), ReduceOp.MAX)
    return largest.item()


def show(found: dict[str, Any]) -> None:
    """Print what the tour found."""
    size = found["world_size"]
    say = functools.partial(print, flush=True)
    say(f"{size} ranks over {found['backend']}")
    first = ", ".join(f"{value:.4f}" for value in found["param_sum_before_broadcast_per_rank"])
    say(f"(a) sums of the parameters by rank: {first}; after broadcast and training all alike")
    say(
        f"(b) averaged gradients: L2 norm {found['grad_norm_after_all_reduce']:.6f}, at most "
        f"{found['manual_all_reduce_max_diff_vs_single_process']:.1e} from one process with the joined batch; "
        f"loss {found['losses'][0]:.3f} to {found['losses'][-1]:.3f} in {len(found['losses'])} steps"
    )
    say("(c) parameters cut into shards, gathered and rebuilt")
    say(f"(d) bytes that rank 0 holds after a step, beside 1/{size} = {1 / size:.3f}:")
    table = Table()
    for heading in ("strategy", "parameters", "gradients", "optimizer", "of DDP", "sent in a step"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for name, row in found["bytes_per_rank"].items():
        cells = (row["parameters"], row["gradients"], row["optimizer"])
        table.add_row(name, *map("{:,}".format, cells), f"{row['share_of_ddp']:.3f}", f"{row['sent_per_step']:,}")
    Console().print(table)
    for name, ok in found["checks"].items():
        say(f"{'passed' if ok else 'FAILED'}: {name.replace('_', ' ')}")


def write(found: dict[str, Any]) -> None:
    try:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise InputError(
            f"expected to write {FILE.resolve()}; found {error.strerror}; start in another folder, or pass --no-write"
        ) from error
    print(f"wrote {FILE}", flush=True)


def run(comm: Communicator, options: argparse.Namespace) -> bool:
    """The tour on one rank of a job; rank 0 speaks. Returns whether every check passed."""
    if options.world_size not in (None, comm.world_size):
        raise InputError(
            f"--world-size: expected {comm.world_size}, which the launcher started, found {options.world_size}; "
            "leave it out under a launcher"
        )
    found = tour(comm, options)
    if comm.rank == 0:
        show(found)
    if not options.no_write:
        on_rank_0(comm, lambda: write(found))
    return all(found["checks"].values())


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, found {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = JobParser(prog="launch.demo", description="A tour of data parallelism in four checks.")
    parser.add_argument("--world-size", type=positive, help="ranks to start where no launcher did (default: 2)")
    parser.add_argument("--backend", help="gloo, mpi, nccl, threads, ring+gloo, ... (default: chosen)")
    parser.add_argument("--num-steps", type=positive, default=10, help="training steps (default: 10)")
    parser.add_argument("--batch-size", type=positive, default=8, help="rows for each rank in a step (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    parser.add_argument("--no-write", action="store_true", help=f"do not write {FILE}")
    options = parser.parse_args(arguments)
    size = options.world_size or 2
    if (options.backend or "").rpartition("+")[2] == "threads":
        sys.exit(0 if all(collectives.run(run, options, n=size, backend=options.backend)) else 1)
    info = identity()
    if size > 1 and info is not None and info.launcher == "single":
        sys.exit(launcher.main(["-n", str(size), "-m", "launch.demo", *arguments]))
    sys.exit(0 if run_job("launch.demo", options.backend, lambda comm: run(comm, options)) else 1)


if __name__ == "__main__":
    main()
