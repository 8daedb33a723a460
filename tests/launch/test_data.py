"""The text: what counts as text, how it is cut, and who computes which part of a batch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from collectives import Communicator
from launch import data
from launch.entry import InputError, on_rank_0
from tests.ranks import run_ranks


def test_bigram_entropy_is_the_conditional_entropy_of_the_counts() -> None:
    text = b"the cat sat on the mat; a bat at that. " * 3
    pairs, firsts = Counter(itertools.pairwise(text)), Counter(text[:-1])
    expected = -sum(n / (len(text) - 1) * math.log(n / firsts[a]) for (a, _), n in pairs.items())
    assert data.bigram_entropy(torch.tensor(list(text), dtype=torch.uint8)) == pytest.approx(expected, rel=1e-12)


def test_bigram_entropy_of_what_is_known_and_of_what_is_not() -> None:
    assert data.bigram_entropy(torch.tensor([1, 2] * 50, dtype=torch.uint8)) == 0
    uniform = torch.randint(0, 2, (200_000,), generator=torch.Generator().manual_seed(0)).byte()
    assert data.bigram_entropy(uniform) == pytest.approx(math.log(2), rel=1e-3)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 12, 13])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_shares_are_the_global_batch_in_order(batch_size: int, world_size: int) -> None:
    rows = list(range(batch_size))
    shares = [rows[data.share(batch_size, rank, world_size)] for rank in range(world_size)]
    assert [row for share in shares for row in share] == rows
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_batches_are_a_function_of_seed_and_step() -> None:
    text = torch.arange(1000).byte()
    draw = {
        (seed, step): tuple(data.train_starts(text, 12, 16, seed=seed, step=step).tolist())
        for seed in (0, 1)
        for step in (1, 2, 3)
    }
    torch.manual_seed(5)
    again = tuple(data.train_starts(text, 12, 16, seed=1, step=2).tolist())
    assert again == draw[1, 2]
    assert len(set(draw.values())) == len(draw)


def test_windows_are_bytes_and_the_bytes_after_them() -> None:
    text = torch.arange(100).byte()
    inputs, targets = data.windows(text, torch.tensor([0, 7, 95]), 4)
    assert inputs.tolist() == [[0, 1, 2, 3], [7, 8, 9, 10], [95, 96, 97, 98]]
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("length", [17, 18, 33, 100, 1000])
@pytest.mark.parametrize("count", [1, 2, 10, 500])
def test_held_out_windows_do_not_overlap_and_stay_inside(length: int, count: int) -> None:
    starts = data.held_out_starts(torch.zeros(length), count, 16).tolist()
    assert len(starts) == min(count, (length - 1) // 16) >= 1
    assert starts[0] == 0
    assert all(b - a >= 16 for a, b in itertools.pairwise(starts))
    assert starts[-1] + 16 + 1 <= length


@pytest.mark.parametrize("count", [1, 10, 63, 64, 200])
def test_split_loses_nothing_and_repeats_nothing(count: int) -> None:
    documents = [b"document %d;" % i for i in range(count)]
    train, held_out = data.split(documents)
    assert len(train) + len(held_out) == sum(map(len, documents))
    assert 0 < len(held_out) < len(train)
    if count >= data.FEW_DOCUMENTS:
        assert all((d in train) != (d in held_out) for d in documents)
    else:
        assert train + held_out == b"".join(documents)


def test_copies_of_a_document_count_once() -> None:
    assert data.distinct([b"a", b"b", b"a", b"", b"b"]) == [b"a", b"b"]


def test_the_default_text_is_the_standard_library() -> None:
    documents, source = data.standard_library()
    assert sum(map(len, documents)) > 4_000_000
    assert "Python" in source
    assert all(data.not_text(document) is None for document in documents)
    assert len(set(documents)) == len(documents)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "nothing"),
        (b" \n\t ", "nothing"),
        (b"\x7fELF\x02\x01\x01\0\0", "NUL"),
        ("text in UTF-16".encode("utf-16"), "NUL"),
        (bytes(range(128, 256)) * 4, "undecodable"),
        (bytes(range(1, 9)) * 20, "control"),
    ],
)
def test_what_is_not_text(content: bytes, why: str) -> None:
    assert why in (data.not_text(content) or "")


@pytest.mark.parametrize("content", ["ascii\r\n", "grüße, 世界", "ein paar Größen in Latin-1 ".encode("latin-1")])
def test_what_is_text(content: str | bytes) -> None:
    assert data.not_text(content if isinstance(content, bytes) else content.encode()) is None


def test_folders_give_their_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "z.bin").write_bytes(b"\0\1\2")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("no")
    assert data.documents_of([str(tmp_path)])[0] == [b"first", b"second"]
    assert data.documents_of([str(tmp_path / "b"), str(tmp_path / "a.txt")])[0] == [b"second", b"first"]


def outcome(comm: Communicator, paths: list[str], window: int) -> tuple[str, bytes, str]:
    try:
        corpus = data.load(comm, paths, window=window)
    except InputError as error:
        return f"error: {error}", b"", ""
    return corpus.sha256, corpus.train.numpy().tobytes() + corpus.held_out.numpy().tobytes(), corpus.source


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_has_the_bytes_that_rank_0_read(tmp_path: Path, world_size: int) -> None:
    (tmp_path / "text").write_text("some text\n" * 50)
    results = run_ranks(outcome, [str(tmp_path)], 10, world_size=world_size)
    assert results == [results[0]] * world_size
    assert results[0][1] == b"some text\n" * 50


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("missing", "found nothing at"),
        ("empty", "found nothing in"),
        ("binary", "found binary data"),
        ("folder", "found 1 files, none of them text"),
        ("short", "found 9 and 1 in"),
    ],
)
def test_every_rank_says_what_is_wrong_with_the_data(tmp_path: Path, name: str, found: str, world_size: int) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "short").write_text("ten bytes.")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "program").write_bytes(b"\0\1\2\3")
    results = run_ranks(outcome, [str(tmp_path / name)], 50, world_size=world_size)
    assert results == [results[0]] * world_size
    message = results[0][0]
    assert message.startswith("error: ")
    assert "expected" in message
    assert found in message
    assert any(remedy in message for remedy in ("name another", "give more text"))


def rank_0_fails(comm: Communicator, kind: type[Exception]) -> str:
    def fail() -> None:
        raise kind("words for the user")

    try:
        on_rank_0(comm, fail)
    except InputError as error:
        return str(error)
    return "nothing raised"


def test_what_rank_0_raises_for_the_user_reaches_every_rank() -> None:
    assert run_ranks(rank_0_fails, InputError, world_size=3) == ["words for the user"] * 3


def test_what_rank_0_did_not_expect_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_ranks(rank_0_fails, ZeroDivisionError, world_size=3)
