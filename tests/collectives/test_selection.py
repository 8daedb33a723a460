"""The choice of algorithms: a table that all ranks share, what outranks it, and what is wrong with a bad one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import collectives
from collectives import Communicator
from collectives.collective import NATIVE, Collective
from collectives.rendezvous import environment
from collectives.schedules import SCHEDULES
from collectives.schedules.executor import Chunks, even_cuts
from collectives.selection import Entry, Table, agree_on_table
from collectives.types import ReduceOp
from tests.ranks import grid, run_ranks

CIRCULANT_FROM_4K = Table([Entry("threads", "all_reduce", 2, {0: "doubling", 4096: "circulant"})])
WHERE = "collectives.bench --tune"


def call_of(numel: int, dtype: torch.dtype = torch.float32, op: ReduceOp = ReduceOp.SUM, size: int = 2) -> Collective:
    chunks = Chunks(torch.empty(numel, dtype=dtype), even_cuts(numel, size))
    return Collective("all_reduce", dtype, chunks, chunks, op)


def choice(comm: Communicator, *args: object, algorithm: str | None = None) -> object:
    return comm._selection.choose(call_of(*args, size=comm.world_size), algorithm)  # type: ignore[arg-type]


def choices(comm: Communicator) -> list[object]:
    """Of many sizes, for comparison between ranks."""
    return [choice(comm, numel) for numel in (1, 255, 1023, 1024, 8191, 100_000)]


def test_the_table_chooses_by_size_from_each_entry_on() -> None:
    for found in collectives.run(choices, n=2, table=CIRCULANT_FROM_4K):
        assert found == ["doubling"] * 3 + ["circulant"] * 3


@pytest.mark.parametrize(("world_size", "known"), [(1, False), (2, True), (3, True), (4, True), (5, False)])
def test_an_entry_holds_up_to_twice_its_world_size(world_size: int, known: bool) -> None:
    for found in collectives.run(choice, 16, n=world_size, table=CIRCULANT_FROM_4K):
        assert found == ("doubling" if known else "direct")


def test_the_entry_of_the_largest_world_size_that_fits_holds() -> None:
    sizes = {2: "direct", 3: "circulant", 4: "doubling"}
    table = Table([Entry("threads", "all_reduce", size, {0: name}) for size, name in sizes.items()])
    for size, name in {**sizes, 6: "doubling"}.items():
        assert collectives.run(choice, 16, n=size, table=table) == [name] * size


def test_a_reduce_op_may_have_an_entry_of_its_own_and_avg_is_a_sum() -> None:
    table = Table(
        [
            Entry("threads", "all_reduce", 2, {0: "ring"}),
            Entry("threads", "all_reduce", 2, {0: "circulant"}, op="SUM"),
        ]
    )
    wanted = {ReduceOp.SUM: "circulant", ReduceOp.AVG: "circulant", ReduceOp.MAX: "ring"}
    for op, name in wanted.items():
        assert collectives.run(choice, 16, torch.float32, op, n=2, table=table) == [name] * 2


def test_the_rule_holds_where_the_table_says_nothing() -> None:
    later = Table([Entry("threads", "all_reduce", 2, {4096: "circulant"})])
    assert collectives.run(choice, 16, n=2, table=later) == ["direct"] * 2
    # Sums of 16-bit floats travel as float32 along a ring, which no table knows about.
    assert collectives.run(choice, 100_000, torch.bfloat16, n=2, table=later) == ["direct"] * 2
    # Layers have entries of their own.
    assert collectives.run(choice, 100_000, n=2, backend="ring+threads", table=later) == ["ring"] * 2


def test_arguments_outrank_the_table() -> None:
    assert collectives.run(choice, 16, n=2, table=CIRCULANT_FROM_4K, algorithm="ring") == ["ring"] * 2
    assert (
        collectives.run(lambda comm: choice(comm, 16, algorithm="direct"), n=2, table=CIRCULANT_FROM_4K)
        == ["direct"] * 2
    )


def sub_group_choices(comm: Communicator) -> list[object]:
    half = comm.split(comm.rank % 2)
    assert half is not None
    return choices(half)


def test_groups_inherit_the_table() -> None:
    assert (
        collectives.run(sub_group_choices, n=4, table=CIRCULANT_FROM_4K) == [["doubling"] * 3 + ["circulant"] * 3] * 4
    )


def different_tables(comm: Communicator, folder: str) -> tuple[list[object], list[object], list[float]]:
    """Every rank asks for another table, as an argument and in its environment; sums with both."""
    backend = comm.backend
    names = ["circulant", "ring"]
    tables = [Table([Entry(backend, "all_reduce", 2, {0: name})]) for name in names]
    path = Path(folder) / f"{backend}-{comm.rank}.json"
    path.write_text(tables[1 - comm.rank].dump())
    sums = []
    with collectives.init(backend, table=tables[comm.rank]) as given:
        by_argument = choices(given)
        sums.append(summed(given))
    before = environment().get("COLLECTIVES_TABLE")
    os.environ["COLLECTIVES_TABLE"] = str(path)
    try:
        with collectives.init(backend) as found:
            by_environment = choices(found)
            sums.append(summed(found))
    finally:
        del os.environ["COLLECTIVES_TABLE"]
        if before is not None:
            os.environ["COLLECTIVES_TABLE"] = before
    return by_argument, by_environment, sums


def summed(comm: Communicator) -> float:
    tensor = torch.full((1000,), float(comm.rank + 1))
    comm.all_reduce(tensor)
    return float(tensor.sum())


@grid(["ring+gloo", "ring+mpi"], [2], threads=(), full=lambda backend, world_size: False)
def test_rank_0s_table_holds_on_all_ranks(backend: str, world_size: int, tmp_path: Path) -> None:
    results = run_ranks(different_tables, str(tmp_path), world_size=world_size, backend=backend)
    for by_argument, by_environment, sums in results:
        assert by_argument == ["circulant"] * 6
        assert by_environment == ["ring"] * 6
        assert sums == [3000.0] * 2


def bad_table_on_rank_0(comm: Communicator, path: str) -> str:
    try:
        collectives.init(comm.backend, table=path if comm.rank == 0 else None)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@grid(["gloo", "mpi"], [2], threads=())
def test_a_table_that_rank_0_cannot_read_raises_on_every_rank(backend: str, world_size: int) -> None:
    for text in run_ranks(bad_table_on_rank_0, "/nowhere/table.json", world_size=world_size, backend=backend):
        assert "/nowhere/table.json" in text
        assert "No such file" in text


@grid(["mpi"], [2], threads=())
def test_native_in_the_table_means_the_library_where_it_can(backend: str, world_size: int) -> None:
    """MPI has no reductions of 16-bit integers here: the next best is what was measured for schedules."""
    results = run_ranks(native_choices, world_size=world_size, backend=backend)
    assert results == [[NATIVE, "doubling", "doubling"]] * 2


def native_choices(_: Communicator) -> list[object]:
    table = Table(
        [Entry("mpi", "all_reduce", 2, {0: NATIVE}), Entry("ring+mpi", "all_reduce", 2, {0: "doubling"})],
    )
    with collectives.init("mpi", table=table) as comm, collectives.init("ring+mpi", table=table) as ring:
        return [choice(comm, 16), choice(comm, 16, torch.int16), choice(ring, 16)]


def test_the_shipped_table_is_valid_and_dumps_to_itself() -> None:
    table = Table.shipped()
    again = Table.parse(table.dump(), table.origin)
    assert again == table


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["is no JSON", WHERE]),
        ("[]", ["expected", "schema", "list"]),
        ('{"schema": 9, "entries": []}', ["schema 9"]),
        ('{"schema": 1}', ["entries"]),
        ({"algorithm": "x"}, ["entry 1", "unknown names: algorithm"]),
        ({"backend": None}, ["entry 1", "backend (str)"]),
        ({"operation": "sort"}, ["unknown operation 'sort'", "all_reduce"]),
        ({"from_bytes": {"0": "fastest"}}, ["no algorithm 'fastest'", "ring", "native"]),
        ({"from_bytes": {"4K": "ring"}}, ["whole numbers of bytes", "4K"]),
        ({"from_bytes": {"64": "ring", "0": "direct"}}, ["ascending"]),
        ({"from_bytes": {}}, ["at least one"]),
        ({"from_bytes": {"0": ["ring"]}}, ["no algorithm", "['ring']"]),
        ({"op": ["SUM"]}, ["unknown reduce op", "['SUM']"]),
        ({"op": "AVG"}, ["unknown reduce op 'AVG'", "SUM"]),
        ({"world_size": 0}, ["world_size is 0"]),
        ({"backend": "ring+mpi", "from_bytes": {"0": "native"}}, ["never uses the library"]),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str | dict[str, object], words: list[str], tmp_path: Path) -> None:
    good = {"backend": "mpi", "operation": "all_reduce", "world_size": 2, "from_bytes": {"0": "native"}}
    path = tmp_path / "table.json"
    path.write_text(text if isinstance(text, str) else json.dumps({"schema": 1, "entries": [{**good, **text}]}))
    with pytest.raises(ValueError, match=r"table\.json") as caught:
        Table.load(path)
    for word in words:
        assert word in str(caught.value)


def test_two_entries_for_one_thing_are_refused() -> None:
    entry = Entry("mpi", "all_reduce", 2, {0: "ring"})
    with pytest.raises(ValueError, match="entry 2 repeats entry 1"):
        Table([entry, entry])


def test_every_algorithm_may_stand_in_a_table() -> None:
    Table([Entry(f"backend{n}", operation, 2, {0: name}) for n, (operation, name) in enumerate(SCHEDULES)])


def test_a_table_is_agreed_on_without_a_launcher() -> None:
    assert agree_on_table(CIRCULANT_FROM_4K, 0, lambda told: told or b"").entries == CIRCULANT_FROM_4K.entries
