"""The training program: its losses are those of one process, whatever starts it, carries it and shards it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from collectives import Communicator
from launch import data, report
from launch.entry import InputError
from launch.model import GPT, GPTConfig, generate
from launch.train import STRATEGIES, TrainConfig, learning_rate, main, train
from tests import ranks
from tests.ranks import run_ranks

TOLERANCE = 1e-5  # relative, of each of the losses
STEPS = 20
TINY = GPTConfig(layers=2, width=32, heads=2, context=32)
TEXT = Path(__file__).read_text() + Path(data.__file__).read_text()
OPTIONS = (
    f"--steps {STEPS} --layers {TINY.layers} --width {TINY.width} --heads {TINY.heads} --context {TINY.context} "
    "--held-out 10 --sample 8 --seed 3"
).split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_text(TEXT)
    return path


def config(text: Path, **changes: Any) -> TrainConfig:
    fields = {"data": (str(text),), "steps": STEPS, "held_out": 10, "sample": 8, "seed": 3, "folder": None, **changes}
    return TrainConfig(model=TINY, **fields)


@functools.cache
def reference(batch_size: int = 12) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of one process that knows nothing of ranks."""
    cfg = TrainConfig(steps=STEPS, seed=3, batch_size=batch_size, model=TINY)
    raw = TEXT.encode()
    bytes_ = torch.tensor(list(raw[: len(raw) - len(raw) // 10]), dtype=torch.uint8)
    model = GPT(TINY, seed=3)
    decayed, others = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg)
        starts = data.train_starts(bytes_, batch_size, TINY.context, seed=3, step=step)
        inputs, targets = data.windows(bytes_, starts, TINY.context)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def tier(backend: str, world_size: int, strategy: str) -> Any:
    """Plain runs have a few of all combinations, --full each backend and world size once, with some strategy."""
    plain = {("gloo", 2, "fsdp"), ("ring+gloo", 2, "zero2"), ("mpi", 2, "zero1"), ("shm+mpi", 2, "ddp")}
    if (backend, world_size, strategy) in plain or (backend == "threads" and world_size == 3):
        return ()
    turn = (ranks.BACKENDS.index(backend) + world_size) % len(STRATEGIES)
    usual = world_size == USUAL.get(backend, world_size)
    return pytest.mark.full if usual and STRATEGIES[turn] == strategy else pytest.mark.exhaustive


USUAL = {"gloo": 1, "mpi": 3, "ring+gloo": 3, "ring+mpi": 2, "shm+gloo": 4, "shm+mpi": 2}
MATRIX = [
    pytest.param(*case, marks=tier(*case)) for case in itertools.product(ranks.BACKENDS, (1, 2, 3, 4), STRATEGIES)
]


@pytest.mark.parametrize(("backend", "world_size", "strategy"), MATRIX)
def test_losses_are_those_of_one_process(backend: str, world_size: int, strategy: str, text: Path) -> None:
    losses, norms = reference()
    results = run_ranks(train, config(text, strategy=strategy), world_size=world_size, backend=backend)
    assert results == [results[0]] * world_size, "the ranks disagree"
    assert results[0].losses == pytest.approx(losses, rel=TOLERANCE)
    assert results[0].grad_norms == pytest.approx(norms, rel=1e-3)
    assert len(results[0].sample) == 64 + 8


@pytest.mark.parametrize(("batch_size", "world_size"), [(5, 2), (7, 3), (4, 4), (1, 1)])
def test_uneven_shares_weigh_what_they_hold(batch_size: int, world_size: int, text: Path) -> None:
    results = run_ranks(train, config(text, batch_size=batch_size), world_size=world_size)
    assert results[0].losses == pytest.approx(reference(batch_size)[0], rel=TOLERANCE)


def held_out_losses(comm: Communicator, cfg: TrainConfig) -> float:
    return train(comm, cfg).held_out_loss


def test_the_held_out_loss_does_not_depend_on_the_ranks(text: Path) -> None:
    cfg = config(text, steps=3, held_out=7)
    alone = run_ranks(held_out_losses, cfg, world_size=1)[0]
    for world_size in (2, 3, 5, 8):
        changed = config(text, steps=3, held_out=7, batch_size=12)
        assert run_ranks(held_out_losses, changed, world_size=world_size) == pytest.approx(
            [alone] * world_size, rel=TOLERANCE
        )


def test_a_gpt_predicts_from_the_past_only() -> None:
    model = GPT(TINY, seed=1)
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 11:] = 0
    assert torch.allclose(model(tokens)[:, :11], model(changed)[:, :11], atol=1e-6)
    assert not torch.allclose(model(tokens)[:, 11:], model(changed)[:, 11:], atol=1e-3)


def test_samples_are_a_function_of_the_seed() -> None:
    model, device = GPT(TINY, seed=1), torch.device("cpu")
    first, again, other = (
        generate(model, b"import ", 60, context=TINY.context, seed=seed, device=device) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.startswith(b"import ")
    assert len(first) == 67


def test_too_small_a_batch_is_named_on_every_rank(text: Path) -> None:
    with pytest.raises(InputError, match=r"--batch-size: expected .* 3 ranks"):
        run_ranks(train, config(text, batch_size=2), world_size=3)


# Through real launchers


def environment() -> dict[str, str]:
    return ranks.clean_environment()


def launch(*arguments: str, n: int = 2) -> list[str]:
    return [sys.executable, "-m", "launch", "-n", str(n), "-m", "launch.train", *OPTIONS, *arguments]


def under(launcher: str, n: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment that start the training program, options to be added."""
    program = [sys.executable, "-m", "launch.train"]
    if launcher == "single":
        return program, environment()
    if launcher == "launch":
        return [sys.executable, "-m", "launch", "-n", str(n), "-m", "launch.train"], environment()
    if launcher == "mpirun":
        command, variables = ranks.mpirun(n)
        return [*command, *program], variables
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return [*torchrun, "-m", "launch.train"], environment()


def execute(command: list[str], variables: dict[str, str], cwd: Path, timeout: float = 120) -> Any:
    return subprocess.run(
        command, env=variables, cwd=cwd, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


LAUNCHES = [
    ("single", 1, "gloo"),
    ("launch", 2, "gloo"),
    ("launch", 2, "ring+gloo"),
    ("mpirun", 2, "mpi"),
    ("mpirun", 2, "ring+mpi"),
    ("mpirun", 2, "gloo"),
    ("mpirun", 3, "ring+mpi"),
    ("torchrun", 2, "gloo"),
    ("launch", 4, "gloo"),
]
PLAIN = {("launch", 2, "gloo", "fsdp"), ("mpirun", 2, "ring+mpi", "fsdp")}


def launch_tier(number: int, start: tuple[str, int, str], strategy: str) -> Any:
    """--full has each way to start two ranks, with one strategy or another."""
    if (*start, strategy) in PLAIN:
        return ()
    usual = start[1] <= 2 and start not in {case[:3] for case in PLAIN}
    return pytest.mark.full if usual and STRATEGIES[number % len(STRATEGIES)] == strategy else pytest.mark.exhaustive


PROGRAMS = [
    pytest.param(*start, strategy, marks=launch_tier(number, start, strategy))
    for number, start in enumerate(LAUNCHES)
    for strategy in STRATEGIES
]


@pytest.mark.parametrize(("launcher", "n", "backend", "strategy"), PROGRAMS)
def test_the_program_unchanged_under_every_launcher(
    launcher: str, n: int, backend: str, strategy: str, text: Path, tmp_path: Path
) -> None:
    command, variables = under(launcher, n)
    options = [*OPTIONS, "--data", str(text), "--backend", backend, "--strategy", strategy]
    done = execute([*command, *options], variables, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    folder = tmp_path / "outputs" / "train"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["loss"] for step in steps] == pytest.approx(reference()[0], rel=TOLERANCE)
    assert all(0 <= step["comm_share"] <= 1 and step["tokens_per_s"] > 0 for step in steps)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["world_size"], summary["backend"]) == (n, backend)
    assert summary["data"]["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert summary["held_out_loss"] == steps[-1]["held_out_loss"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert not re.search(r"^\[[1-9]\d*\]", done.stdout, re.MULTILINE), "a rank other than 0 printed"
    assert done.stdout.count("held-out loss") == 1
    assert f"step {STEPS}/{STEPS}" in done.stdout
    assert f"bigram entropy {summary['bigram_entropy']:.4f}" in done.stdout


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--data", "missing"], "found nothing at missing"),
        pytest.param(["--data", "binary"], "found binary data", marks=pytest.mark.full),
        pytest.param(["--out", "binary"], "found binary/train (Not a directory)", marks=pytest.mark.full),
    ],
)
def test_bad_input_is_explained_on_every_rank(options: list[str], found: str, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    done = execute(launch(*options), environment(), tmp_path)
    assert done.returncode != 0
    for rank in (0, 1):
        [said] = [line for line in done.stderr.splitlines() if line.startswith(f"[{rank}] launch.train: error")]
        assert "expected" in said
        assert found in said
        assert "name another" in said
    assert "Traceback" not in done.stderr


def test_wrong_arguments_are_explained_once(tmp_path: Path) -> None:
    done = execute(launch("--no-such"), environment(), tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("launch.train: error:") == 1
    assert "unrecognized arguments: --no-such" in done.stderr


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--width", "33"], "width: expected an even number"),
        (["--steps", "0"], "steps: expected at least 1, found 0"),
        (["--lr", "-1"], "lr and clip: expected positive numbers"),
        (["--threads", "0"], "threads: expected at least 1"),
        (["--strategy", "zero4"], "invalid choice: 'zero4'"),
    ],
)
def test_wrong_values_say_what_was_expected(options: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert found in capsys.readouterr().err


def test_an_unknown_backend_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"launch.train: error: .*'smoke signals'.* gloo") as ended:
        main(["--backend", "smoke signals"])
    assert isinstance(ended.value.code, str), "a text is printed, and the exit code is 1"


def test_ctrl_c_ends_the_run_with_what_it_has(text: Path, tmp_path: Path) -> None:
    command = launch("--data", str(text), "--steps", "1000000", "--backend", "gloo")
    metrics = tmp_path / "outputs" / "train" / "metrics.jsonl"
    process = subprocess.Popen(
        command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode not in (0, None)
    assert "interrupted after" in output
    assert "Traceback" not in output
    assert all(json.loads(line)["loss"] > 0 for line in metrics.read_text().splitlines())


def read_terminal(fd: int, timeout: float) -> Iterator[bytes]:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not select.select([fd], [], [], 0.5)[0]:
            continue
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # the other end has been closed
            return
        if not chunk:
            return
        yield chunk


@pytest.mark.full
def test_on_a_terminal_one_line_is_redrawn(text: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    variables = {**environment(), "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(
        launch("--data", str(text), "--backend", "gloo"), env=variables, cwd=tmp_path, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        output = b"".join(read_terminal(ours, 60)).decode(errors="replace")
        assert process.wait(30) == 0, output
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "\x1b[" in output
    assert re.search(rf"step .*{STEPS}/{STEPS}", output)
    assert "tokens/s" in output
    assert "communication" in output


def test_without_matplotlib_a_line_says_what_brings_it(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run_ranks(train, config(text, steps=2, folder=str(tmp_path)), world_size=1)
    assert "collectives-fsdp[plot]" in capsys.readouterr().out
    assert not (tmp_path / "loss.png").exists()
    assert (tmp_path / "summary.json").exists()


def test_samples_cannot_steer_a_terminal() -> None:
    shown = report.printable(b"def f():\n\tpass\x1b[2J\x07\r\0\xff \xc3\xbc")
    assert shown == "def f():\n\tpass\ufffd[2J\ufffd\ufffd\ufffd\ufffd \u00fc"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [250, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_the_default_model_beats_the_bigram_entropy(steps: int | None, tmp_path: Path) -> None:
    options = [] if steps is None else ["--steps", str(steps)]
    command = [sys.executable, "-m", "launch", "-n", "2", "-m", "launch.train", *options]
    done = execute(command, environment(), tmp_path, 800)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "outputs" / "train" / "summary.json").read_text())
    assert summary["held_out_loss"] < summary["bigram_entropy"]
    assert 2 < summary["bigram_entropy"] < 2.8
