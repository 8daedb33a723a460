"""What every test run needs: the options, an order that keeps worker pools alive, and their end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from collectives import hosts
from tests import ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the expensive tests, as CI does")
    parser.addoption("--exhaustive", action="store_true", help="run every combination there is; takes an hour or more")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # torch is loaded by now and has taken every core; ranks that are threads would fight


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes that run the whole suite: it waits half of the time, for ranks to start and to end.

    Chosen tests run in this process, where a debugger works; so do those that share a Slurm, and ranks of a launcher.
    """
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.markexpr or config.option.keyword
    return 0 if chosen or config.option.usepdb else max(2, min(4, hosts.allowed_cores()))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Not "mpi": pytest-mpi takes a test of that name alone for one of its own, and skips it."""
    return "MPI" if val == "mpi" else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of one pool of workers run in one process."""
    launcher, world_size = _pool(item)
    if launcher:
        item.add_marker(pytest.mark.xdist_group(f"{launcher}-{world_size}"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unwanted = [item for item in items if not _wanted(item, config)]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
    wanted = [item for item in items if _wanted(item, config)]
    items[:] = sorted(wanted, key=_pool)


def _wanted(item: pytest.Item, config: pytest.Config) -> bool:
    if item.get_closest_marker("slurm") and "slurm" not in config.option.markexpr:
        return False
    if item.get_closest_marker("mpich") and "mpich" in config.option.markexpr:
        return True
    # What two parametrizations leave to --full repeats what --full has of each.
    repeats = len(list(item.iter_markers("full"))) > 1
    if item.get_closest_marker("exhaustive") or repeats:
        return bool(config.option.exhaustive)
    return config.option.full or config.option.exhaustive or not item.get_closest_marker("full")


def _pool(item: pytest.Item) -> tuple[str, int]:
    """Tests of one pool of workers run one after another, so that it is started once."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    launcher = ranks.family(str(parameters.get("backend", "threads")))
    return (launcher, int(parameters.get("world_size", 0))) if launcher else ("", 0)


@pytest.fixture(scope="session", autouse=True)
def _worker_pools() -> Generator[None]:
    """At the end every worker has left by itself and with exit code 0, or the run fails."""
    yield
    troubles = ranks.POOLS.close()
    if troubles:
        pytest.fail("\n".join(troubles), pytrace=False)


@pytest.fixture(scope="session")
def mpich(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with bin/mpiexec and lib/libmpi.so.12 of an MPICH.

    One that is on the PATH, or in MPICH_PREFIX; else, where the tests that need it were asked for by their mark, its
    wheel in an environment that holds nothing else.
    """
    if given := os.environ.get("MPICH_PREFIX"):
        return Path(given)
    if (found := shutil.which("mpichversion")) and (Path(found).parents[1] / "lib" / "libmpi.so.12").exists():
        return Path(found).parents[1]
    if request.config.option.markexpr not in ("mpich", "slurm"):
        pytest.skip("no MPICH on the PATH or in MPICH_PREFIX; pytest -m mpich installs one for itself")
    folder = tmp_path_factory.mktemp("mpich")
    venv.create(folder, with_pip=False)
    install = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "mpich"]
    subprocess.run(install, timeout=300, check=True)
    return folder
