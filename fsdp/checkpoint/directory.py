"""The folder of a run: one folder a checkpoint, published by one rename, so that each is there whole or not at all.

step-0000000100/       a checkpoint
step-0000000100.1/     the same step saved again; it replaces the first
.partial-...           being written, or left behind by a job that was killed
.deleted-...           being deleted
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from fsdp.checkpoint import manifest as manifests
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.manifest import Manifest

_STEP = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
_PARTIAL, _DELETED = ".partial-", ".deleted-"
_log = logging.getLogger(__name__)


def steps(run: Path) -> list[Path]:
    """The checkpoints of a run by their names, oldest first, whatever is in them."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        found = [(match, entry) for entry in os.listdir(run) if (match := _STEP.fullmatch(entry))]
    return [run / entry for match, entry in sorted(found, key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)))]


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest, once every file that it names is there in full.

    Raises:
        CheckpointError: naming the file that is missing, too short or too long, or is no such manifest.
    """
    path = checkpoint / manifests.NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected the manifest of a checkpoint, found no such file") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected the manifest of a checkpoint, found {error}") from error
    manifest = manifests.parse(text, path)
    for file in manifest.files:
        try:
            size = os.stat(checkpoint / file.name).st_size
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{checkpoint / file.name}: expected {file.nbytes} bytes, found no such file; take another checkpoint"
            ) from error
        if size != file.nbytes:
            raise CheckpointError(
                f"{checkpoint / file.name}: expected {file.nbytes} bytes, found {size}; take another checkpoint"
            )
    return manifest


def is_complete(checkpoint: Path) -> bool:
    """Whether all files are there in full. What is in them, ``verify`` checks."""
    try:
        read_manifest(checkpoint)
    except (CheckpointError, OSError) as error:
        _log.warning("not a complete checkpoint: %s", error)
        return False
    return True


def complete(run: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints of a run, newest first."""
    return [path for path in reversed(steps(Path(run))) if is_complete(path)]


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of a run; or ``path`` itself, where it is a checkpoint. None where there is none.

    Complete means that every file is there in its full size. Needs no ranks, and does not communicate.
    """
    folder = Path(path)
    if (folder / manifests.NAME).exists():
        return folder if is_complete(folder) else None
    while True:
        there = steps(folder)
        found = next((path for path in reversed(there) if is_complete(path)), None)
        if found is not None or all(path.exists() for path in there):
            return found  # otherwise a run that goes on has replaced what was listed


def resolve(path: Path) -> Path:
    """The checkpoint that ``path`` means. Raises ``CheckpointError`` where it has none."""
    if (path / manifests.NAME).exists() or _STEP.fullmatch(path.name):
        return path
    found = latest(path)
    if found is None:
        raise CheckpointError(f"{path}: expected a checkpoint, or a folder with a complete one; found none")
    return found


def begin(run: Path, step: int) -> Path:
    """A new folder to write a checkpoint into."""
    partial = run / f"{_PARTIAL}step-{step:010d}-{secrets.token_hex(4)}"
    try:
        partial.mkdir()
    except FileNotFoundError:
        new = [folder for folder in (run, *run.parents) if not folder.exists()]
        run.mkdir(parents=True, exist_ok=True)
        for folder in new:
            sync_folder(folder.parent)
        partial.mkdir()
    return partial


def publish(partial: Path, step: int, manifest: Manifest) -> Path:
    """Make a folder whose files are all on the disk a checkpoint. Returns its name."""
    for file in manifest.files:
        if os.stat(partial / file.name).st_size != file.nbytes:
            raise CheckpointError(f"{partial / file.name}: expected {file.nbytes} bytes; a rank writes elsewhere")
    path = partial / manifests.NAME
    manifest.check(path)
    with open(path, "x", encoding="utf-8") as stream:
        stream.write(manifest.to_json())
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(partial)
    run = partial.parent
    earlier = [path for path in steps(run) if _step(path) == step]
    revision = 1 + int(earlier[-1].name.partition(".")[2] or 0) if earlier else 0
    final = run / (f"step-{step:010d}" + (f".{revision}" if revision else ""))
    os.rename(partial, final)
    sync_folder(run)
    return final


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tidy(newest: Path, keep: int | None) -> None:
    """Delete what ``newest`` makes superfluous: partial folders, an earlier save of its step, and with ``keep`` all
    complete checkpoints but so many. ``newest`` always stays. What cannot be deleted is logged, and stays."""
    try:
        _tidy(newest, keep)
    except OSError as error:
        _log.warning("cannot look for what to delete in %s: %s", newest.parent, error)


def _tidy(newest: Path, keep: int | None) -> None:
    run = newest.parent
    doomed = [path for path in steps(run) if path != newest and _step(path) == _step(newest)]
    if keep is not None:
        others = [path for path in complete(run) if path != newest and path not in doomed]
        doomed += others[keep - 1 :]
    for path in doomed:
        away = run / f"{_DELETED}{path.name}-{secrets.token_hex(4)}"
        try:
            os.rename(path, away)  # so that nobody finds half of it
        except OSError as error:
            _log.warning("cannot delete %s: %s", path, error)
    for entry in os.listdir(run):
        if entry.startswith((_PARTIAL, _DELETED)):
            remove(run / entry)


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def remove(folder: Path) -> None:
    """Delete a folder; what cannot be deleted is logged, and stays."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("cannot delete %s: %s", folder, error)
