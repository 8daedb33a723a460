"""The schedules are right, the checker would notice if they were not, and what they promise is what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from collectives.schedules import ACC, IN, OUT, RX, SCHEDULES, Report, Round, Schedule, ScheduleError, Span, Sum, check
from collectives.schedules.__main__ import main
from collectives.schedules.peers import peers_of
from collectives.schedules.task import ROOTED

SMALL = [*range(1, 10), 16, 17, 33]
ALL = range(1, 257)
HUGE = [1000, 4096, 4097]


def prove(
    operation: str,
    algorithm: str,
    size: int,
    root: int | None = None,
    rotations: int | None = None,
    every_root: bool = False,
) -> None:
    entry = SCHEDULES[operation, algorithm]
    promise = Report(entry.rounds(size), entry.volume(size))
    check(
        entry.schedule,
        operation,
        size,
        root,
        in_rank_order=entry.in_rank_order,
        expect=promise,
        rotations=rotations,
        every_root=every_root,
    )


def roots(operation: str, size: int) -> list[int | None]:
    if operation not in ROOTED:
        return [None]
    return list(range(size)) if size <= 9 else [0, size // 3, size - 1]


def first_root(operation: str) -> int | None:
    return 0 if operation in ROOTED else None


@pytest.mark.parametrize(("operation", "algorithm"), SCHEDULES)
def test_every_schedule_is_right_for_small_worlds(operation: str, algorithm: str) -> None:
    for size in SMALL:
        for root in roots(operation, size):
            prove(operation, algorithm, size, root)


@pytest.mark.parametrize(("operation", "algorithm"), SCHEDULES)
def test_schedules_are_right_for_large_worlds(operation: str, algorithm: str) -> None:
    for size in (64, 100, 255, 256):
        prove(operation, algorithm, size, first_root(operation), every_root=operation in ROOTED)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [ALL, HUGE], ids=["up to 256", "thousands"])
@pytest.mark.parametrize(("operation", "algorithm"), SCHEDULES)
def test_schedules_are_right_up_to_256_ranks_and_for_thousands(
    operation: str, algorithm: str, sizes: Iterable[int]
) -> None:
    for size in sizes:
        if size < 10:
            for root in roots(operation, size):
                prove(operation, algorithm, size, root)
        else:
            prove(operation, algorithm, size, first_root(operation), every_root=operation in ROOTED)


@pytest.mark.parametrize(("operation", "algorithm"), [key for key, entry in SCHEDULES.items() if entry.alike])
def test_following_one_rank_and_some_others(operation: str, algorithm: str) -> None:
    for size in [*range(1, 18), 64, 256, 1000]:
        prove(operation, algorithm, size, rotations=3)


def test_whoever_looks_at_its_rank_is_followed_on_every_rank() -> None:
    """One rank may stand for all only where no schedule can tell which one it is."""

    def odd_one_out(rank: int, size: int) -> Iterator[Round]:
        wrong = rank if size < 7 else 3
        for k, round in enumerate(GATHER(rank, size)):
            yield round._replace(sends=()) if k == 2 and rank == wrong else round

    def no_modulo(rank: int, size: int) -> Iterator[Round]:
        for round in GATHER(rank, size):
            yield round._replace(sends=((rank + 1, round.sends[0][1]),))

    def by_index(rank: int, size: int) -> Iterator[Round]:
        yield from list(GATHER(rank, size))[: size - 1 - [0, 0, 1, 0, 0][rank]]

    def to_rank_0(rank: int, size: int) -> Iterator[Round]:
        for round in GATHER(rank, size):
            yield round._replace(sends=((0, round.sends[0][1]),))

    def fixed_chunk(rank: int, size: int) -> Iterator[Round]:
        for round in GATHER(rank, size):
            yield round._replace(sends=((round.sends[0][0], Span(OUT, 0)),))

    assert complaint(odd_one_out, "all_gather", size=8).startswith("round 2, rank 4, chunk")
    assert complaint(no_modulo, "all_gather").startswith("round 0, rank 4: sends to rank 5")
    assert complaint(by_index, "all_gather").startswith("round 3, rank 2: has no such round")
    assert complaint(to_rank_0, "all_gather").startswith("round 0, rank 0: sends to rank 0")
    assert complaint(fixed_chunk, "all_gather").startswith("round 0, rank 1, chunk 0: reads OUT[0]")


def test_whoever_tells_ranks_apart_is_followed_on_every_rank() -> None:
    """A small world may stand for larger ones only where no schedule can tell ranks, or worlds, apart."""
    gather = SCHEDULES["all_gather", "direct"].schedule

    def odd_one_out(rank: int, size: int) -> Iterator[Round]:
        for round in gather(rank, size):
            yield round._replace(sends=()) if rank == 3 else round

    def at_most_five(rank: int, size: int) -> Iterator[Round]:
        for round in gather(rank, size):
            yield round._replace(sends=round.sends[:5], recvs=round.recvs[:5])

    def only_in_small_worlds(rank: int, size: int) -> Iterator[Round]:
        for round in gather(rank, size):
            yield round if size < 8 else round._replace(recvs=())

    def next_ones_chunk(rank: int, size: int) -> Iterator[Round]:
        for round in gather(rank, size):
            yield round._replace(sends=peers_of(rank, size).each(lambda peer: (peer, Span(OUT, (rank + 1) % size))))

    def their_chunks(rank: int, size: int) -> Iterator[Round]:
        for round in gather(rank, size):
            yield round._replace(sends=peers_of(rank, size).each(lambda peer: (peer, Span(OUT, peer))))

    for schedule in (odd_one_out, at_most_five, only_in_small_worlds, next_ones_chunk, their_chunks):
        assert "round 0, rank " in complaint(schedule, "all_gather", size=12), schedule


def test_a_small_world_does_not_stand_for_sums_in_another_order() -> None:
    def own_first(rank: int, size: int) -> Iterator[Round]:
        for round in DIRECT(rank, size):
            theirs = peers_of(rank, size).each(lambda peer: Span(RX, peer))
            yield round._replace(then=(Sum(Span(OUT, rank), (Span(IN, rank),) + theirs),))  # noqa: RUF005

    check(own_first, "reduce_scatter", 12)
    assert "rank 1, chunk 1: is not added in rank order" in complaint(
        own_first, "reduce_scatter", 12, in_rank_order=True
    )


def test_a_root_that_is_told_from_others_is_proved_for_all_roots() -> None:
    def without_root(rank: int, size: int, root: int) -> Iterator[Round]:
        for k, round in enumerate(SCHEDULES["broadcast", "direct"].schedule(rank, size, root)):
            yield round._replace(sends=()) if k and rank == root else round

    assert complaint(without_root, "broadcast", 12, 0).startswith("round 1, rank 1, chunk 0: receives from rank 0")
    for key in (("broadcast", "direct"), ("reduce", "direct"), ("gather", "direct"), ("scatter", "direct")):
        check(SCHEDULES[key].schedule, key[0], 12, 0, in_rank_order=SCHEDULES[key].in_rank_order, every_root=True)


def test_a_root_that_is_not_treated_like_others_is_noticed() -> None:
    def only_from_0(rank: int, size: int, root: int) -> Iterator[Round]:
        yield from TREE(rank, size, 0)

    def other_order(rank: int, size: int, root: int) -> Iterator[Round]:
        yield from (TREE if root == 0 else SCHEDULES["broadcast", "direct"].schedule)(rank, size, root)

    for schedule in (only_from_0, other_order):
        check(schedule, "broadcast", 6, 0)
        with pytest.raises(ScheduleError, match="for every root"):
            check(schedule, "broadcast", 6, 0, every_root=True)
    check(TREE, "broadcast", 6, 0, every_root=True)
    with pytest.raises(ValueError, match="compares with root 0"):
        check(TREE, "broadcast", 6, 2, every_root=True)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
def test_a_ring_needs_two_scratch_slots(size: int) -> None:
    rounds = SCHEDULES["all_reduce", "ring"].schedule(0, size)
    spans = [total.into for round in rounds for total in round.then]
    assert {span.first for span in spans if span.buf is ACC} <= {0, 1}
    assert size > 2 or not [span for span in spans if span.buf is ACC], "two ranks add straight into the result"


Change = Callable[[int, int, Round], Round]


def mutant(schedule: Schedule, change: Change) -> Schedule:
    """``schedule`` with every round of every rank passed through ``change(rank, round number, round)``."""

    def mutated(*arguments: int) -> Iterator[Round]:
        for k, round in enumerate(schedule(*arguments)):
            yield change(arguments[0], k, round)

    return mutated


def at(rank: int, k: int, **fields: object) -> Change:
    return lambda r, i, round: round._replace(**fields) if (r, i) == (rank, k) else round  # type: ignore[arg-type]


def complaint(schedule: Schedule, operation: str, size: int = 5, root: int | None = None, **options: bool) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(schedule, operation, size, root, **options)  # type: ignore[arg-type]
    return str(caught.value)


RING = SCHEDULES["all_reduce", "ring"].schedule
GATHER = SCHEDULES["all_gather", "ring"].schedule
SCATTER = SCHEDULES["reduce_scatter", "ring"].schedule
DIRECT = SCHEDULES["reduce_scatter", "direct"].schedule
CIRCULANT = SCHEDULES["all_reduce", "circulant"].schedule
PAIRWISE = SCHEDULES["all_to_all", "pairwise"].schedule
TREE = SCHEDULES["broadcast", "tree"].schedule


def test_a_dropped_send_is_named() -> None:
    found = complaint(mutant(RING, at(2, 3, sends=())), "all_reduce")
    assert found.startswith("round 3, rank 3, chunk ")
    assert "receives from rank 2, which sends it nothing" in found


def test_a_dropped_receive_is_named() -> None:
    found = complaint(mutant(PAIRWISE, at(2, 1, recvs=())), "all_to_all")
    assert found.startswith("round 1, rank 0, chunk 2: sends to rank 2, which takes nothing from it")


def test_a_wrong_peer_is_named() -> None:
    found = complaint(mutant(GATHER, at(1, 2, sends=((4, Span(OUT, 4)),))), "all_gather")
    assert found.startswith("round 2, rank 1, chunk 4: sends to rank 4, which takes nothing from it")


@pytest.mark.parametrize("peer", [3, 5, -1])
def test_a_message_to_oneself_or_to_nobody_is_named(peer: int) -> None:
    found = complaint(mutant(GATHER, at(3, 0, sends=((peer, Span(OUT, 3)),))), "all_gather")
    assert found.startswith(f"round 0, rank 3: sends to rank {peer}")


def test_swapped_chunks_are_named() -> None:
    found = complaint(mutant(GATHER, at(3, 1, recvs=((2, Span(OUT, 0)),))), "all_gather")
    assert found == "round 1, rank 3, chunk 0: expected chunk 0 of rank 0 in OUT[0], found chunk 1 of rank 1"


def test_the_wrong_chunk_sent_is_named() -> None:
    found = complaint(mutant(GATHER, at(3, 2, sends=((4, Span(OUT, 3)),))), "all_gather")
    assert found.startswith("round 2, rank 4, chunk 1: expected chunk 1 of rank 1")


def test_a_contribution_added_twice_is_named() -> None:
    def twice(rank: int, k: int, round: Round) -> Round:
        if (rank, k) != (4, 2):
            return round
        (total,) = round.then
        return round._replace(then=(total._replace(terms=(*total.terms, total.terms[1])),))

    assert complaint(mutant(SCATTER, twice), "reduce_scatter") == "round 2, rank 4, chunk 0: adds rank 4 twice"


def test_a_contribution_left_out_is_named() -> None:
    def forget(rank: int, k: int, round: Round) -> Round:
        if (rank, k) != (0, 0):
            return round
        return round._replace(then=(Sum(Span(OUT, 0), round.then[0].terms[:-1]),))

    found = complaint(mutant(DIRECT, forget), "reduce_scatter")
    assert found == "round 0, rank 0, chunk 0: expected chunk 0 of ranks 0-4 in OUT[0], found chunk 0 of ranks 0-3"


def test_chunks_that_do_not_belong_together_are_named() -> None:
    def stray(rank: int, k: int, round: Round) -> Round:
        if (rank, k) != (2, 1):
            return round
        (total,) = round.then
        return round._replace(then=(total._replace(terms=(total.terms[0], Span(IN, 0))),))

    assert complaint(mutant(SCATTER, stray), "reduce_scatter").startswith("round 1, rank 2, chunk 0: adds chunk 0 of")


def test_sums_out_of_rank_order_are_named() -> None:
    def backwards(rank: int, k: int, round: Round) -> Round:
        (total,) = round.then
        return round._replace(then=(total._replace(terms=total.terms[::-1]),)) if rank == 3 else round

    check(mutant(DIRECT, backwards), "reduce_scatter", 5)
    found = complaint(mutant(DIRECT, backwards), "reduce_scatter", in_rank_order=True)
    assert found == "round 0, rank 3, chunk 3: is not added in rank order"
    assert "rank order" in complaint(SCATTER, "reduce_scatter", in_rank_order=True)


def test_a_circle_of_blocking_sends_is_named() -> None:
    def first_send_then_receive(rank: int, size: int) -> Iterator[Round]:
        for round in GATHER(rank, size):
            yield round._replace(recvs=())
            yield round._replace(sends=())

    found = complaint(first_send_then_receive, "all_gather", size=3)
    assert found.startswith("round 0, rank 0, chunk 0: sends to rank 1")
    assert found.endswith("a circle: rank 0 waits for 1 waits for 2 waits for 0")


def test_a_circle_of_receives_is_named() -> None:
    def first_receive_then_send(rank: int, size: int) -> Iterator[Round]:
        for round in PAIRWISE(rank, size):
            yield round._replace(sends=())
            yield round._replace(recvs=())

    found = complaint(first_receive_then_send, "all_to_all", size=4)
    assert found.startswith("round 0, rank 0, chunk 3: receives from rank 3, which sends it nothing")
    assert "a circle: rank 0 waits for 3" in found


def test_a_rank_that_ends_early_is_named() -> None:
    def short(rank: int, size: int) -> Iterator[Round]:
        rounds = list(GATHER(rank, size))
        yield from rounds[:-1] if rank == 2 else rounds

    assert complaint(short, "all_gather").startswith("round 3, rank 2: has no such round")


def test_everyone_ending_early_is_named() -> None:
    def short(rank: int, size: int) -> Iterator[Round]:
        yield from list(GATHER(rank, size))[:-1]

    found = complaint(short, "all_gather")
    assert found == "after round 2, rank 0, chunk 1: expected chunk 1 of rank 1 in the end, found nothing"


def test_writing_to_the_input_is_named() -> None:
    def into_input(rank: int, k: int, round: Round) -> Round:
        then = tuple(total._replace(into=total.into._replace(buf=IN)) for total in round.then)
        return round._replace(then=then) if (rank, k) == (1, 3) else round

    assert complaint(mutant(SCATTER, into_input), "reduce_scatter") == "round 3, rank 1, chunk 1: writes to IN"
    received = mutant(GATHER, at(0, 0, recvs=((4, Span(IN, 4)),)))
    assert complaint(received, "all_gather") == "round 0, rank 0, chunk 4: writes to IN"


def test_reading_what_is_not_there_is_named() -> None:
    found = complaint(mutant(GATHER, at(2, 0, sends=((3, Span(OUT, 0)),))), "all_gather")
    assert found == "round 0, rank 2, chunk 0: reads OUT[0], which holds nothing yet"
    found = complaint(mutant(TREE, at(1, 1, sends=((3, Span(IN, 0, 5)),))), "broadcast", root=0)
    assert found == "round 1, rank 1, chunk 0: reads IN[0], which does not exist here"


def test_reading_an_input_that_the_result_has_replaced_is_named() -> None:
    def late(rank: int, k: int, round: Round) -> Round:
        return round._replace(sends=((1, Span(IN, 0)),)) if (rank, k) == (0, 4) else round

    found = complaint(mutant(RING, late), "all_reduce")
    assert found == "round 4, rank 0, chunk 0: reads IN[0], which the result has taken the place of"


def test_a_receive_into_what_is_being_sent_is_named() -> None:
    one_slot = mutant(SCATTER, lambda rank, k, round: _in_slot_0(round))
    assert complaint(one_slot, "reduce_scatter").endswith("receives into ACC[0], which is in use in the same round")


def _in_slot_0(round: Round) -> Round:
    def move(span: Span) -> Span:
        return span._replace(first=0) if span.buf is ACC else span

    return Round(
        sends=tuple((peer, move(span)) for peer, span in round.sends),
        recvs=tuple((peer, move(span)) for peer, span in round.recvs),
        then=tuple(Sum(move(total.into), tuple(map(move, total.terms))) for total in round.then),
    )


def test_dtypes_that_do_not_meet_are_named() -> None:
    def narrow(rank: int, k: int, round: Round) -> Round:
        if (rank, k) != (3, 2):
            return round
        (peer, span), (total,) = round.recvs[0], round.then
        here = span._replace(buf=RX)
        return round._replace(recvs=((peer, here),), then=(total._replace(terms=(here, total.terms[1])),))

    found = complaint(mutant(SCATTER, narrow), "reduce_scatter")
    assert found.startswith("round 2, rank 3, chunk 0: rank 2 sends the accumulation dtype, RX[0] holds the tensor's")


def test_lengths_that_do_not_meet_are_named() -> None:
    found = complaint(mutant(TREE, at(3, 1, recvs=((1, Span(OUT, 0, 4)),))), "broadcast", root=0)
    assert found == "round 1, rank 3, chunk 0: rank 1 sends 5 chunks, OUT[0] takes 4"


def test_scratch_of_unknown_length_is_named() -> None:
    found = complaint(mutant(SCATTER, at(2, 0, then=())), "reduce_scatter")
    assert found == "round 0, rank 2, chunk 0: receives into RX[0], which no sum of this round reads or measures"
    copied = mutant(SCATTER, at(2, 0, then=(Sum(Span(ACC, 0), (Span(RX, 0),)),)))
    assert (
        complaint(copied, "reduce_scatter") == "round 0, rank 2, chunk 0: nothing says how long the sum into ACC[0] is"
    )


def test_a_scratch_slot_below_0_is_named() -> None:
    below = mutant(SCATTER, at(2, 0, recvs=((1, Span(RX, -1)),)))
    assert complaint(below, "reduce_scatter") == "round 0, rank 2, chunk -1: names RX[-1]; scratch slots count from 0"


def test_partial_sums_outside_the_accumulator_are_named() -> None:
    early = mutant(RING, lambda rank, k, round: _into(round, Span(OUT, rank - k - 2)))
    assert "expected chunk 3 of ranks 0-4 in OUT[3], found chunk 3 of ranks 0, 4" in complaint(early, "all_reduce")
    rounded = mutant(RING, lambda rank, k, round: _into(round, Span(RX, 1)))
    assert "a partial sum in RX would be rounded" in complaint(rounded, "all_reduce")


def _into(round: Round, span: Span) -> Round:
    return round._replace(then=tuple(total._replace(into=span) for total in round.then))


def test_adding_where_nothing_is_added_is_named() -> None:
    adds = mutant(GATHER, at(0, 0, then=(Sum(Span(OUT, 0), (Span(OUT, 0), Span(OUT, 4))),)))
    assert complaint(adds, "all_gather") == "round 0, rank 0, chunk 0: adds, but all_gather only moves"


def test_adding_to_a_finished_result_is_named() -> None:
    again = mutant(RING, at(1, 4, then=(Sum(Span(OUT, 1), (Span(OUT, 1),)),)))
    assert complaint(again, "all_reduce").startswith("round 4, rank 1, chunk 1: adds to a finished result")


def test_a_barrier_that_lets_someone_through_is_named() -> None:
    def short(rank: int, size: int) -> Iterator[Round]:
        yield from list(SCHEDULES["barrier", "dissemination"].schedule(rank, size))[:-1]

    found = complaint(short, "barrier")
    assert (
        found
        == "after round 1, rank 0, chunk 0: expected chunk 0 of ranks 0-4 in the end, found chunk 0 of ranks 0, 2-4"
    )


def test_more_rounds_or_volume_than_promised_are_named() -> None:
    with pytest.raises(
        ScheduleError, match=r"expected Report\(rounds=3, volume=4\) for 5 ranks, found Report\(rounds=4"
    ):
        check(GATHER, "all_gather", 5, expect=Report(3, 4))

    def idle(rank: int, size: int) -> Iterator[Round]:
        yield from GATHER(rank, size)
        yield Round()

    with pytest.raises(ScheduleError, match="rounds=5"):
        check(idle, "all_gather", 5, expect=Report(4, 4))


def test_rotations_notice_ranks_that_are_not_alike() -> None:
    with pytest.raises(ScheduleError, match="does not send what rank 0 sends, rotated"):
        check(SCHEDULES["all_reduce", "doubling"].schedule, "all_reduce", 8, rotations=7)
    for fault in (at(3, 1, sends=((4, Span(OUT, 3)),)), at(3, 1, recvs=((2, Span(OUT, 0)),))):
        with pytest.raises(ScheduleError, match="round 1, rank 3"):
            check(mutant(GATHER, fault), "all_gather", 8, rotations=7)
    with pytest.raises(ValueError, match="leave out rotations"):
        check(TREE, "broadcast", 8, 0, rotations=2)


@pytest.mark.parametrize(
    ("operation", "size", "root", "message"),
    [
        ("all_reduced", 4, None, "expected one of all_gather"),
        ("all_reduce", 0, None, "at least 1, got 0"),
        ("all_reduce", 4, 1, "takes no root, got 1"),
        ("broadcast", 4, None, "takes a root of 0 to 3, got None"),
        ("broadcast", 4, 4, "takes a root of 0 to 3, got 4"),
    ],
)
def test_wrong_questions_are_refused(operation: str, size: int, root: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(RING, operation, size, root)


@pytest.mark.parametrize(("operation", "algorithm"), SCHEDULES)
@pytest.mark.parametrize("size", [1, 2, 5, 11])
def test_every_schedule_can_be_drawn(
    operation: str, algorithm: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    name = SCHEDULES[operation, algorithm].schedule.__name__
    assert main(["show", name, "-p", str(size)]) == 0
    drawn = capsys.readouterr().out
    assert f"{name}, {size} ranks" in drawn
    assert drawn.count("after round") == SCHEDULES[operation, algorithm].rounds(size)


def test_a_drawing_shows_who_holds_what(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "ring_all_reduce", "-p", "3"])
    rounds = capsys.readouterr().out.split("\n\n")
    assert rounds[2].splitlines() == [
        "after round 0",
        "        chunk 0  chunk 1  chunk 2  sent",
        "rank 0  0        0+2*     0        2 to 1",
        "rank 1  1        1        0..1*    0 to 2",
        "rank 2  1..2*    2        2        1 to 0",
    ]
    assert rounds[-1].count("0..2=") == 9


def test_an_image_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="images need matplotlib")
    assert main(["show", "circulant_all_reduce", "-p", "9", "--png", str(tmp_path / "it.png")]) == 0
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_checks_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tree_reduce", "-p", "6", "--root", "5"]) == 0
    assert "tree_reduce is right for 6 ranks: 3 rounds" in capsys.readouterr().out
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(entry.schedule.__name__ in listed for entry in SCHEDULES.values())


@pytest.mark.parametrize(
    "arguments",
    [["show", "nonsense"], ["show", "ring_all_reduce", "-p", "0"], ["check", "tree_reduce", "-p", "4", "--root", "4"]],
)
def test_the_command_refuses_nonsense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
