"""What a communicator says that its backend can do, and that README.md says the same.

Whether it is so is tried by the conformance suite.
"""

from __future__ import annotations

import pytest
import torch

from collectives import Communicator, ReduceOp, backends, info
from collectives.backends.threads import ThreadsBackend
from collectives.capabilities import Key, Support, keys
from collectives.capability_table import BEGIN, COLUMNS, END, render
from tests.ranks import ROOT, run_ranks


def test_readme_holds_the_table() -> None:
    text = (ROOT / "README.md").read_text()
    held = text[text.index(BEGIN) : text.index(END) + len(END)] + "\n"
    assert held == render(), "README.md is behind; put there what python -m collectives.info --table prints"


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main(["--table"]) == 0
    assert capsys.readouterr().out == render()


def answers(comm: Communicator) -> dict[Key, Support]:
    return dict(comm.capabilities())


@pytest.mark.parametrize(("backend", "world_size"), [("threads", 2), ("gloo", 2), ("mpi", 2), ("ring+gloo", 3)])
def test_every_question_is_answered(backend: str, world_size: int) -> None:
    first, second = run_ranks(answers, backend=backend, world_size=world_size)[:2]
    assert first == second
    assert set(first) == set(keys())
    assert set(first.values()) <= {"native", "emulated", "no"}
    assert first[Key("all_reduce", torch.int64, ReduceOp.AVG)] == "no"
    native = {key.operation for key, support in first.items() if support == "native"} - {"send"}
    assert bool(native) == (backend in ("gloo", "mpi"))


def test_columns_are_backends() -> None:
    assert {*COLUMNS, "ring+X"} == {*backends.REGISTRY, *(f"{layer}+X" for layer in backends.LAYERS)}
    assert COLUMNS["threads"].endswith(ThreadsBackend.__name__)
