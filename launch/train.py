"""Train a byte-level GPT on text, on every rank that a launcher started, with DDP, ZeRO or FSDP.

    python -m launch -n 2 -m launch.train
    mpirun -n 2 python -m launch.train --backend ring+mpi --strategy zero2
    torchrun --nproc-per-node 2 -m launch.train --backend gloo

The losses do not depend on how many ranks there are, what carries their messages, or how the model is sharded: each
step's global batch is a function of the seed and the step, and every rank computes its share of it.

Exit codes: 0, done; 75, SIGTERM or SIGUSR1 on any rank: the step was finished and saved, and the same command with
--resume auto goes on (at any number of ranks); 1, an error; 2, wrong arguments; 130, Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import fsdp
from collectives import Communicator
from launch import data
from launch.checkpoints import Checkpoints, Saves, StopSignal, facts_of
from launch.entry import InputError, JobParser, StoppedError, on_rank_0, run_job
from launch.model import GPT, Block, GPTConfig, generate
from launch.report import METRICS, Report, Step, printable

STAGES = {"zero1": 1, "zero2": 2, "fsdp": 3}
STRATEGIES = ("ddp", *STAGES)
WARMUP_STEPS = 20
SAMPLE_PROMPT = 64  # bytes of held-out text that the sample continues


@dataclass(frozen=True)
class TrainConfig:
    """What a run depends on, besides the text.

    ``batch_size`` is the global one, in sequences of ``model.context`` bytes. ``held_out`` windows are measured at the
    end, and a quarter of them ``evaluations - 1`` times on the way. ``folder`` None writes nothing.
    """

    strategy: str = "fsdp"
    data: tuple[str, ...] = ()
    steps: int = 800
    batch_size: int = 12
    lr: float = 4e-3
    clip: float = 1.0
    weight_decay: float = 0.1
    seed: int = 0
    held_out: int = 384
    evaluations: int = 5
    sample: int = 200
    folder: str | None = "outputs/train"
    model: GPTConfig = field(default_factory=GPTConfig)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, found {self.strategy!r}")
        for name, least in (("steps", 1), ("batch_size", 1), ("held_out", 0), ("evaluations", 0), ("sample", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, found {getattr(self, name)}")
        if not (self.lr > 0 and self.clip > 0):
            raise ValueError(f"lr and clip: expected positive numbers, found {self.lr} and {self.clip}")


@dataclass(frozen=True)
class Result:
    """What a run came to, the same on every rank. ``held_out_loss`` is NaN where it was not measured."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    held_out_loss: float
    bigram_entropy: float
    sample: bytes


def train(
    comm: Communicator, config: TrainConfig, saves: Saves | None = None, stop: Callable[[], bool] = lambda: False
) -> Result:
    """Train on all ranks of ``comm``; rank 0 prints and writes.

    Args:
        saves: when checkpoints are saved, and whether to go on from one.
        stop: asked after every step. When any rank says yes, all of them save, and end.

    Raises:
        InputError: on every rank, if the data, the folder, the checkpoints or the batch size cannot be used.
        StoppedError: on every rank, when all have saved because of ``stop``.
    """
    if config.batch_size < comm.world_size:
        raise InputError(
            f"--batch-size: expected at least one sequence for each of {comm.world_size} ranks, "
            f"found {config.batch_size}; raise it, or start fewer ranks"
        )
    corpus = data.load(comm, config.data, window=config.model.context + 1)
    entropy = data.bigram_entropy(corpus.held_out)
    folder = on_rank_0(comm, lambda: make_folder(config.folder))
    trainer = Trainer(comm, config, corpus)
    checkpoints = Checkpoints(comm, folder, saves or Saves(), facts_of(config, corpus.sha256))
    first = trainer.restore(checkpoints.resume(trainer.model, trainer.optimizer))
    with Report(config.steps, folder, trainer.steps) if comm.rank == 0 else nullcontext() as report:
        if report is not None:
            checkpoints.say = report.say
            report.say(
                f"{config.strategy} on {comm.world_size} ranks over {comm.backend}: {trainer.parameters:,} parameters; "
                f"{len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out, from {corpus.source}"
            )
        for step in range(first, config.steps + 1):
            done = trainer.step(step, stop())
            if report is not None:
                report.add(done)
            saved = False
            if checkpoints.due(step) or trainer.stops:
                saved = checkpoints.save(step, trainer.model, trainer.optimizer, trainer.history())
            if trainer.stops:
                if not saved:
                    raise InputError(f"a signal ended the run at step {step}, and it could not be saved")
                checkpoints.tell(
                    f"a signal ended the run; step {step} of {config.steps} is saved, and --resume auto goes on"
                )
                raise StoppedError
    result = trainer.result(entropy)
    if report is None:
        return result
    if config.held_out:
        below = "below" if result.held_out_loss < entropy else "not below"
        report.say(
            f"held-out loss {result.held_out_loss:.4f}, {below} the held-out text's bigram entropy {entropy:.4f}"
        )
    if config.sample:
        report.say(f"--- sample\n{printable(result.sample)}\n---")
    steps = report.steps
    report.write_summary(
        {
            "schema": "collectives-fsdp/train/1",
            "config": dataclasses.asdict(config),
            "world_size": comm.world_size,
            "backend": comm.backend,
            "device": str(comm.device),
            "parameters": trainer.parameters,
            "data": {
                "source": corpus.source,
                "sha256": corpus.sha256,
                "documents": corpus.documents,
                "train_bytes": len(corpus.train),
                "held_out_bytes": len(corpus.held_out),
            },
            "first_loss": result.losses[0],
            "last_loss": result.losses[-1],
            "held_out_loss": result.held_out_loss,
            "bigram_entropy": entropy,
            "seconds": report.seconds,
            "tokens_per_s": median([s.tokens_per_s for s in steps]),
            "comm_share": median([s.comm_share for s in steps]),
            "sample": printable(result.sample),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
    )
    return result


class Trainer:
    """The model, wrapped for its strategy, and its optimizer; ``step`` is the same on every rank."""

    def __init__(self, comm: Communicator, config: TrainConfig, corpus: data.Corpus) -> None:
        self.comm, self.config, self.corpus = comm, config, corpus
        model = GPT(config.model, seed=config.seed).to(comm.device)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = wrap(model, comm, config.strategy)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        self.steps: list[Step] = []
        self.stops = False  # some rank wants to end

    def history(self) -> dict[str, Any]:
        """What a later run needs to go on, besides model and optimizer: batches are functions of seed and step."""
        return {"steps": [dataclasses.asdict(step) for step in self.steps]}

    def restore(self, history: Mapping[str, Any] | None) -> int:
        """Take over what ``history`` gave, if anything. Returns the number of the next step."""
        if history is not None:
            self.steps = [Step(**step) for step in history["steps"]]
        return len(self.steps) + 1

    def step(self, step: int, stop: bool = False) -> Step:
        """Train on global batch number ``step``, from 1 on. ``stop``: this rank wants to end after it."""
        config, comm = self.config, self.comm
        started, waited = time.perf_counter(), comm.stats().seconds
        lr = learning_rate(step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        context = config.model.context
        starts = data.train_starts(self.corpus.train, config.batch_size, context, seed=config.seed, step=step)
        self.optimizer.zero_grad()
        total = self.summed_loss(self.corpus.train, starts)
        mean = total / (config.batch_size * context)
        # Gradients are averaged over ranks, so that this rank's part of the mean counts world_size times.
        (mean * comm.world_size).backward()  # type: ignore[no-untyped-call]
        norm = fsdp.clip_grad_norm_(self.model, config.clip)
        self.optimizer.step()
        sums = torch.stack([mean.detach().double(), mean.new_tensor(float(stop), dtype=torch.float64)])
        comm.all_reduce(sums)
        loss, self.stops = float(sums[0]), bool(sums[1] > 0)
        seconds = time.perf_counter() - started
        share = (comm.stats().seconds - waited) / seconds
        speed = config.batch_size * context / seconds
        self.steps.append(Step(step, loss, speed, share, lr, float(norm), self.evaluate(step)))
        return self.steps[-1]

    def summed_loss(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Cross-entropy summed over this rank's share of the windows that begin at ``starts``."""
        mine = starts[data.share(len(starts), self.comm.rank, self.comm.world_size)]
        inputs, targets = data.windows(text, mine, self.config.model.context)
        logits = self.model(inputs.to(self.comm.device))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(self.comm.device), reduction="sum")

    def sum_over_ranks(self, value: torch.Tensor) -> float:
        total = value.detach().double()
        self.comm.all_reduce(total)
        return total.item()

    def evaluate(self, step: int) -> float | None:
        """The held-out loss where it is due after ``step``: on a quarter of the windows, at the end on all."""
        config = self.config
        if not (config.held_out and config.evaluations):
            return None
        last = step == config.steps
        if not last and step % math.ceil(config.steps / config.evaluations):
            return None
        count = config.held_out if last else math.ceil(config.held_out / 4)
        text = self.corpus.held_out
        starts = data.held_out_starts(text, count, config.model.context)
        total = torch.zeros((), device=self.comm.device)
        with torch.no_grad():
            for part in torch.split(starts, config.batch_size):
                total += self.summed_loss(text, part)
        return self.sum_over_ranks(total) / (len(starts) * config.model.context)

    def result(self, bigram_entropy: float) -> Result:
        """What the run came to, and a sample, which every rank must take part in."""
        config = self.config
        prompt = self.corpus.held_out[:SAMPLE_PROMPT].numpy().tobytes()
        model, context, device = self.model, config.model.context, self.comm.device
        text = generate(model, prompt, config.sample, context=context, seed=config.seed, device=device)
        held_out = self.steps[-1].held_out_loss
        return Result(
            losses=tuple(s.loss for s in self.steps),
            grad_norms=tuple(s.grad_norm for s in self.steps),
            held_out_loss=math.nan if held_out is None else held_out,
            bigram_entropy=bigram_entropy,
            sample=text,
        )


def wrap(model: nn.Module, comm: Communicator, strategy: str) -> nn.Module:
    """``model`` as ``strategy`` has it. Blocks are the units that are sharded, and gathered, one at a time."""
    if strategy == "ddp":
        return fsdp.DistributedDataParallel(model, comm)
    return fsdp.fully_shard(model, comm, stage=STAGES[strategy], units=[Block])


def learning_rate(step: int, config: TrainConfig) -> float:
    """Up in a straight line, then down a cosine to a tenth."""
    warmup = min(WARMUP_STEPS, config.steps)
    if step <= warmup:
        return config.lr * step / warmup
    done = (step - warmup) / max(config.steps - warmup, 1)
    return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def make_folder(name: str | None) -> Path | None:
    if name is None:
        return None
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS).open("a").close()  # that it cannot be written must be known before the training
    except OSError as error:
        raise InputError(
            f"--out: expected a folder that rank 0 can write; found {folder} ({error.strerror}); "
            "name another, or pass --no-write"
        ) from error
    return folder


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def parser() -> argparse.ArgumentParser:
    default = TrainConfig()
    options = JobParser(
        prog="launch.train",
        description="Train a byte-level GPT on text, on every rank that a launcher started.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = options.add_argument
    add("--backend", help="gloo, mpi, nccl, ring+gloo, ...; None chooses")
    add("--strategy", choices=STRATEGIES, default=default.strategy, help="how the model's state lies on the ranks")
    add("--data", nargs="+", metavar="PATH", default=[], help="text files or folders; none: the standard library")
    add("--steps", type=int, default=default.steps, help="optimizer steps")
    add("--batch-size", type=int, default=default.batch_size, help="sequences a step, over all ranks")
    add("--lr", type=float, default=default.lr, help="highest learning rate")
    add("--clip", type=float, default=default.clip, help="largest norm of the gradient")
    add("--seed", type=int, default=default.seed, help="of the weights, the batches and the sample")
    add("--layers", type=int, default=default.model.layers, help="blocks")
    add("--width", type=int, default=default.model.width, help="features of a position")
    add("--heads", type=int, default=default.model.heads, help="attention heads")
    add("--context", type=int, default=default.model.context, help="bytes in a sequence")
    add("--held-out", type=int, default=default.held_out, help="held-out sequences to measure at the end; 0: none")
    add("--evaluations", type=int, default=default.evaluations, help="how often to measure the held-out loss")
    add("--sample", type=int, default=default.sample, help="bytes to generate at the end")
    add(
        "--save-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="save a checkpoint after so many; 0: only at a signal",
    )
    add("--keep", type=int, metavar="N", help="delete all checkpoints but the newest N; None keeps all")
    add(
        "--resume", choices=("auto", "no"), default="no", help="auto: go on from the newest checkpoint, if there is one"
    )
    add("--threads", type=int, help="threads of each rank; None leaves the launcher's choice")
    add("--out", metavar="DIR", default="outputs", help="where runs are written")
    add("--name", default="train", help="this run's folder there; an earlier run's files are replaced")
    add("--no-write", action="store_true", help="write no files")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parser()
    args = options.parse_args(argv)
    try:
        config = TrainConfig(
            strategy=args.strategy,
            data=tuple(args.data),
            steps=args.steps,
            batch_size=args.batch_size,
            lr=args.lr,
            clip=args.clip,
            seed=args.seed,
            held_out=args.held_out,
            evaluations=args.evaluations,
            sample=args.sample,
            folder=None if args.no_write else str(Path(args.out) / args.name),
            model=GPTConfig(args.layers, args.width, args.heads, args.context),
        )
        saves = Saves(args.save_every, args.keep, args.resume == "auto")
        if args.no_write and (args.save_every or saves.resume):
            raise ValueError("no-write: expected it without --save-every and --resume, which need the run's folder")
        if args.threads is not None and args.threads < 1:
            raise ValueError(f"threads: expected at least 1, found {args.threads}")
    except ValueError as error:
        options.error(str(error))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with nullcontext() if args.no_write else StopSignal() as signals:
        stop = (lambda: False) if signals is None else (lambda: signals.seen)
        run_job("launch.train", args.backend, lambda comm: train(comm, config, saves, stop))


if __name__ == "__main__":
    main()
