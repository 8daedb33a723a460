"""Tensors inside the nested values that modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.nn.Module)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``fn`` applied to the tensors in its tuples, lists, mappings and dataclasses.

    A container in which nothing changed is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
        if all(mapped[key] is value[key] for key in mapped):
            return value
        return type(value)(mapped)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(fn, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        if all(new is getattr(value, name) for name, new in fields.items()):
            return value
        return dataclasses.replace(value, **fields)
    return value


def tensors(value: Any, _seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor reachable from ``value``: containers as above, and the attributes of any other object.

    Raises ``TypeError`` for an object that hides its contents (no ``__dict__``), as a hook would miss what is inside.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (*_PLAIN, type)) or callable(value):
        return
    seen = set() if _seen is None else _seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inside: Any = value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        inside = value
    elif hasattr(value, "__dict__"):
        inside = vars(value).values()
    elif hasattr(value, "__slots__"):
        inside = [getattr(value, name) for name in value.__slots__ if hasattr(value, name)]
    else:
        raise TypeError(f"expected tensors, tuples, lists, mappings, dataclasses or plain objects, got {type(value)}")
    for item in inside:
        yield from tensors(item, seen)
