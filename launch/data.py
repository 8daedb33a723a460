"""The text: read by rank 0, sent to all ranks as bytes, cut into training and held-out parts and into batches."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from collectives import Communicator
from launch.entry import InputError, on_rank_0

# Not the standard library's own code, its tests, or tables that a program wrote.
SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload", "encodings",
    "pydoc_data",
}  # fmt: skip
SKIPPED_FILES = "_sysconfigdata"  # how this interpreter was built
HELD_OUT_EVERY = 16  # one document in so many is held out
FEW_DOCUMENTS = 64  # with fewer, the end of the text is held out instead: single documents would weigh too much


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, the same on every rank.

    ``train`` and ``held_out`` are 1-D uint8 tensors on the CPU without a byte in common; ``sha256`` is that of
    ``train`` followed by ``held_out``; ``source`` says where the text came from.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    sha256: str
    source: str
    documents: int


def load(comm: Communicator, paths: Sequence[str] = (), *, window: int = 2) -> Corpus:
    """The corpus, on every rank: ``paths`` (files or folders), or the standard library's Python sources.

    Args:
        window: bytes that training and held-out text must have at least, each.

    Raises:
        InputError: on every rank, if there is no such path, no text in it, or too little.
    """
    own: list[torch.Tensor] = []

    def header() -> tuple[int, int, str, str, int]:
        documents, source = documents_of(paths) if paths else standard_library()
        train, held_out = split(documents)
        if min(len(train), len(held_out)) < window:
            raise InputError(
                f"expected at least {window} bytes of text for training and {window} held out; "
                f"found {len(train)} and {len(held_out)} in {source}; give more text, or a smaller --context"
            )
        text = train + held_out
        own.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return len(train), len(held_out), hashlib.sha256(text).hexdigest(), source, len(documents)

    train_bytes, held_out_bytes, sha256, source, count = on_rank_0(comm, header)
    text = own[0] if own else torch.empty(train_bytes + held_out_bytes, dtype=torch.uint8)
    on_device = text.to(comm.device)
    comm.broadcast(on_device, 0)
    text = on_device.cpu()
    return Corpus(text[:train_bytes], text[train_bytes:], sha256, source, count)


def standard_library() -> tuple[list[bytes], str]:
    """The Python sources of the running interpreter's standard library, and a name for them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        f
        for f in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(f.relative_to(root).parts) and not f.name.startswith(SKIPPED_FILES)
    )
    documents = distinct(map(read, files))
    if not documents:
        raise InputError(f"expected the standard library's sources in {root}; found none; give text with --data PATH")
    return documents, f"standard library of Python {sysconfig.get_python_version()}"


def documents_of(paths: Sequence[str]) -> tuple[list[bytes], str]:
    """The text files among ``paths`` and in their folders, in sorted order, and a name for them.

    A file named by itself must be text; in folders, what is not text is passed over.
    """
    documents = []
    for path in map(Path, paths):
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.is_file() and not hidden(f.relative_to(path)))
            texts = [text for f in files if (text := read(f)) and not_text(text) is None]
            if not texts:
                raise InputError(
                    f"--data: expected text files in the folder {path}; found {len(files)} files, none of them text; "
                    "name another folder, or leave --data out to use the standard library's sources"
                )
            documents += texts
        elif path.exists():
            text = read(path)
            why = not_text(text)
            if why is not None:
                raise InputError(f"--data: expected a text file, UTF-8 or alike; found {why} in {path}; name another")
            documents.append(text)
        else:
            raise InputError(
                f"--data: expected a file or folder that rank 0 can read; found nothing at {path} "
                f"(from {Path.cwd()}); name another, or leave --data out to use the standard library's sources"
            )
    return distinct(documents), ", ".join(map(str, paths))


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"--data: expected files that rank 0 can read; found {path} ({error.strerror}); name others"
        ) from error


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def not_text(content: bytes) -> str | None:
    """Why ``content`` is not text; None if it is. One odd character in ten is let pass (Latin-1 prose has fewer)."""
    if not content.strip():
        return "nothing"
    if b"\0" in content:
        return "binary data (NUL bytes)"
    characters = content.decode("utf-8", errors="replace")
    odd = sum(c == "\ufffd" or (c < " " and c not in "\t\n\r\f\v\b\x1b") for c in characters)
    if odd > len(characters) / 10:
        return f"binary data ({odd} of {len(characters)} characters are undecodable or control characters)"
    return None


def distinct(documents: Iterable[bytes]) -> list[bytes]:
    """Without repeated or empty documents, so that no copy of a held-out one is trained on."""
    return [document for document in dict.fromkeys(documents) if document]


def split(documents: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Training and held-out text: whole documents spread evenly, or the last tenth where there are few of them."""
    if len(documents) < FEW_DOCUMENTS:
        text = b"".join(documents)
        cut = len(text) - len(text) // 10
        return text[:cut], text[cut:]
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [d for i, d in enumerate(documents, 1) if i % HELD_OUT_EVERY]
    return b"".join(train), b"".join(held_out)


def bigram_entropy(text: torch.Tensor) -> float:
    """Entropy of a byte given the byte before it, in nats, by the counts of ``text`` (1-D uint8) itself.

    No model that sees one byte of context can have a lower loss on this text.
    """
    pairs = text[:-1].numpy().astype(np.int32) * 256 + text[1:].numpy()
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256).astype(np.float64)
    before, pair = np.nonzero(counts)
    seen = counts[before, pair]
    return float(-(seen * np.log(seen / counts.sum(1)[before])).sum() / counts.sum())


def share(batch_size: int, rank: int, world_size: int) -> slice:
    """The sequences of a global batch that ``rank`` computes; shares differ by at most one."""
    return slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64, (len(starts), context): the bytes from each start on, and those one later."""
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def train_starts(text: torch.Tensor, batch_size: int, context: int, *, seed: int, step: int) -> torch.Tensor:
    """Where the windows of this step's global batch begin: a function of the seed and the step alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(len(text) - context, (batch_size,), generator=generator)


def held_out_starts(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """At most ``count`` windows spread evenly over the text, none overlapping another."""
    count = min(count, (len(text) - 1) // context)
    return torch.arange(count) * ((len(text) - 1 - context) // max(count - 1, 1))
