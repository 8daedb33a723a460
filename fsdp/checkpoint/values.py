"""Values of any shape as JSON, without pickle: what schedulers, scalers, generators and optimizers call their state.

What JSON has no word for is a mapping of one key that starts with ``$``. Tensors of more than 16 elements are put
aside, under a key, for a file of tensors.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.tensor_file import DTYPES, dtype_name

INLINE = 16  # elements


@dataclass(frozen=True)
class Placeholder:
    """Stands for a value of another kind, which is kept elsewhere under the name ``at``."""

    kind: str
    at: str


_CONTAINERS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def encode(value: Any, where: str, aside: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON; its large tensors go to ``aside`` under keys that begin with ``where``.

    Raises:
        CheckpointError: something in it is neither a plain value nor a tensor, an array or a container of those.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return {"$number": _tensor(torch.from_numpy(np.asarray(value).reshape(1)), where, aside)}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, complex):
        return {"$complex": [encode(value.real, where, aside), encode(value.imag, where, aside)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _tensor(value, where, aside)}
    if isinstance(value, np.ndarray):
        return {"$array": _tensor(torch.from_numpy(np.ascontiguousarray(value)).view(value.shape), where, aside)}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, Counter):
        return {"$counter": _pairs(value, where, aside)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not (len(value) == 1 and next(iter(value))[:1] == "$"):
            return {key: encode(item, f"{where}.{key}", aside) for key, item in value.items()}
        return {"$dict": _pairs(value, where, aside)}
    if isinstance(value, Placeholder):
        return {"$placeholder": [value.kind, value.at]}
    if isinstance(value, list):
        return [encode(item, f"{where}.{i}", aside) for i, item in enumerate(value)]
    for name, container in _CONTAINERS.items():
        if isinstance(value, container):
            items = list(cast("Iterable[Any]", value))
            if name.endswith("set"):
                items.sort(key=repr)
            return {f"${name}": [encode(item, f"{where}.{i}", aside) for i, item in enumerate(items)]}
    raise CheckpointError(
        f"{where}: expected plain values, tensors, arrays and containers of them, found {type(value)}; save its "
        "state_dict(), or leave it out"
    )


def _pairs(value: Mapping[Any, Any], where: str, aside: dict[str, torch.Tensor]) -> list[list[Any]]:
    return [
        [encode(key, f"{where}.key", aside), encode(item, f"{where}.{i}", aside)]
        for i, (key, item) in enumerate(value.items())
    ]


def _tensor(value: torch.Tensor, where: str, aside: dict[str, torch.Tensor]) -> dict[str, Any]:
    value = value.detach().cpu()
    name = dtype_name(value.dtype, where)
    if value.numel() > INLINE:
        key = where
        while key in aside:
            key += "_"
        aside[key] = value
        return {"at": key}
    flat = value.reshape(-1)
    listed = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    numbers = listed.double().tolist() if listed.is_floating_point() else listed.tolist()
    return {"dtype": name, "shape": list(value.shape), "values": encode(numbers, where, aside)}


def decode(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """The value that was encoded. ``fetch`` gives the tensor that was put aside under a key, of its shape."""
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if len(value) != 1 or kind[:1] != "$":
        return {key: decode(item, fetch) for key, item in value.items()}
    inside, kind = value[kind], kind[1:]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](decode(inside, fetch))
    if kind in ("dict", "counter"):
        pairs = {decode(key, fetch): decode(item, fetch) for key, item in inside}
        return pairs if kind == "dict" else Counter(pairs)
    if kind == "float":
        return float(inside)
    if kind == "complex":
        return complex(*decode(inside, fetch))
    if kind == "placeholder":
        return Placeholder(*inside)
    if kind == "bytes":
        return base64.b64decode(inside)
    if kind == "dtype":
        found = getattr(torch, inside, None)
        if isinstance(found, torch.dtype):
            return found
    if kind == "device":
        return torch.device(inside)
    if kind in ("tensor", "array", "number"):
        tensor = fetch(inside["at"]) if "at" in inside else _inline(inside, fetch)
        return tensor if kind == "tensor" else tensor.numpy() if kind == "array" else tensor.numpy()[0]
    raise CheckpointError(f"expected a value as the manifest's version has them, found {{'${kind}': {inside!r:.80}}}")


def _inline(row: dict[str, Any], fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
    dtype, numbers = DTYPES[row["dtype"]], decode(row["values"], fetch)
    if dtype.is_complex:
        return torch.view_as_complex(torch.tensor(numbers, dtype=torch.float32).reshape(-1, 2)).view(row["shape"])
    wide = torch.float64 if dtype.is_floating_point else dtype
    return torch.tensor(numbers, dtype=wide).to(dtype).view(row["shape"])
