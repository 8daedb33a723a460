"""A checkpoint as the files that everybody's tools open: ``model.safetensors``, with an index where it is large."""

from __future__ import annotations

import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from fsdp.checkpoint import tensor_file
from fsdp.checkpoint.directory import sync_folder
from fsdp.checkpoint.sources import Source, Stored, open_source

MAX_SHARD = 5 * 10**9  # bytes of one file; hubs refuse much larger ones
MODEL, INDEX, OPTIMIZER = "model.safetensors", "model.safetensors.index.json", "optimizer.pt"


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = MAX_SHARD,
    optimizer: bool = False,
    trust_pickle: bool = False,
) -> list[Path]:
    """Write a checkpoint's model as safetensors, under its original names. Needs no ranks, and one tensor's memory.

    Args:
        path: a checkpoint, the folder of a run, or anything that ``load_full_state_dict`` reads.
        out: a folder, made if it is not there; files of the same names in it are replaced.
        dtype: cast floating-point tensors to it.
        max_shard_size: bytes; a larger model becomes several files and an index.
        optimizer: also write ``optimizer.pt``: a plain ``torch.optim`` state dict.
        trust_pickle: see ``load_full_state_dict``.

    Returns:
        The files that were written.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        OSError: it cannot be written; no file is left half.
    """
    source = open_source(path, trust_pickle)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    files = _divide(source, dtype, max_shard_size)
    written = []
    for number, names in enumerate(files, 1):
        name = MODEL if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        items = [_item(source, each, dtype) for each in names]
        written.append(_replace(folder / name, lambda path, items=items: _write(path, items)))
    if len(files) > 1:
        weight_map = {name: path.name for path, names in zip(written, files, strict=True) for name in names}
        total = sum(_nbytes(source, name, dtype) for name in source.tensors)
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        written.append(_replace(folder / INDEX, lambda path: path.write_text(index, encoding="utf-8")))
    if optimizer:
        state = optimizer_state_dict(source)
        written.append(_replace(folder / OPTIMIZER, lambda path: torch.save(state, path)))
    sync_folder(folder)
    return written


def _target(source: Source, name: str, dtype: torch.dtype | None) -> torch.dtype:
    own = source.tensors[name].dtype
    return dtype if dtype is not None and own.is_floating_point else own


def _nbytes(source: Source, name: str, dtype: torch.dtype | None) -> int:
    return math.prod(source.tensors[name].shape) * _target(source, name, dtype).itemsize


def _divide(source: Source, dtype: torch.dtype | None, limit: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for name in source.tensors:
        nbytes = _nbytes(source, name, dtype)
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def _item(source: Source, name: str, dtype: torch.dtype | None) -> tensor_file.Item:
    target = _target(source, name, dtype)
    return tensor_file.Item(name, target, source.tensors[name].shape, lambda: source.whole(name).to(target))


def _write(path: Path, items: list[tensor_file.Item]) -> None:
    tensor_file.write(path, items, {"format": "pt"})  # transformers asks whose tensors these are


def _replace(path: Path, write: Any) -> Path:
    """Write beside, then rename."""
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        write(beside)
        os.rename(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def optimizer_state_dict(source: Source) -> dict[str, Any]:
    """The optimizer's state in a checkpoint, as the ``state_dict()`` that one process has; parameters by number."""
    found = source.optimizer()
    state: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for group in found.groups:
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        groups.append({**group, "params": numbers})
        for index, name in zip(numbers, group["params"], strict=True):
            if values := found.state.get(name):
                state[index] = {k: v.whole() if isinstance(v, Stored) else v for k, v in values.items()}
    return {"state": state, "param_groups": groups}
