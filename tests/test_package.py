"""What is exported, what is in the wheel, and that an installed wheel works from any folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import collectives
import fsdp
from tests.ranks import ROOT, clean_environment


def test_exported_names_of_collectives() -> None:
    assert sorted(collectives.__all__) == [
        "CommError",
        "Communicator",
        "P2P",
        "ReduceOp",
        "SharedBuffer",
        "Work",
        "errors",
        "from_mpi",
        "from_process_group",
        "init",
        "run",
    ]
    for name in collectives.__all__:
        assert getattr(collectives, name) is not None


def test_exported_names_of_fsdp() -> None:
    assert sorted(fsdp.__all__) == [
        "CPUOffloadPolicy",
        "CheckpointError",
        "DistributedDataParallel",
        "Estimate",
        "FSDPModule",
        "LikeParameters",
        "MixedPrecisionPolicy",
        "OtherRanks",
        "PerRank",
        "clip_grad_norm_",
        "convert_sync_batchnorm",
        "estimate",
        "export",
        "full_optimizer_state_dict",
        "full_state_dict",
        "fully_shard",
        "latest",
        "load",
        "load_full_optimizer_state_dict",
        "load_full_state_dict",
        "register_fsdp_forward_method",
        "rng_state",
        "save",
        "set_rng_state",
        "summon_full_params",
        "synced_forwards",
        "unit_statistics",
    ]
    for name in fsdp.__all__:
        assert getattr(fsdp, name) is not None


def test_import_starts_nothing() -> None:
    """No MPI, no process group, no thread, no CUDA."""
    code = (
        "import sys, threading, collectives, fsdp, torch\n"
        "assert 'mpi4py' not in sys.modules and 'mpi4py.MPI' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=clean_environment(), cwd=ROOT)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_tree_holds_nothing_that_a_run_left() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, timeout=60, cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.rstrip("\0").split("\0")
    visible = {name.split("/")[0] for name in names if not name.startswith(".")}
    files = {"pyproject.toml", "constraints.txt", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "SECURITY.md"}
    assert visible == {"collectives", "fsdp", "launch", "tests", *files}
    assert not [name for name in names if (ROOT / name).stat().st_size > 2**20]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the source tree stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "outputs", "build", "dist", "venv")
    shutil.copytree(ROOT, source, ignore=junk)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*pip, str(folder), str(source)], check=True, timeout=120, stdin=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_content(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert wheel.name.startswith("collectives_fsdp-")
    assert tops - {info} == {"collectives", "fsdp", "launch"}
    present = [path for package in ("collectives", "fsdp", "launch") for path in (ROOT / package).rglob("*")]
    wanted = {path.relative_to(ROOT).as_posix() for path in present if path.is_file() and path.suffix != ".pyc"}
    assert wanted <= set(names)
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.full
def test_installed_wheel_works_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, timeout=120, stdin=subprocess.DEVNULL)
    environment = {**clean_environment(), "PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=elsewhere,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = "import collectives, fsdp, launch; print(collectives.__file__, fsdp.__file__, launch.__file__)"
    assert all(Path(path).is_relative_to(site) for path in run(sys.executable, "-c", where).split())
    assert "rank" in run(sys.executable, "-m", "collectives.info")
    for script in ("collectives-launch", "collectives-train", "collectives-demo", "collectives-info"):
        assert "usage" in run(sys.executable, str(site / "bin" / script), "--help").lower(), script
    run(str(site / "bin" / "collectives-launch"), "-n", "2", "-m", "launch.demo", "--num-steps", "2", "--no-write")
    assert list(elsewhere.iterdir()) == []
