"""Which rows of a call can tell what a slice is: trees of drafts, prefix caches, layers that are alike."""

from collections.abc import Sequence
from typing import Any

import pytest

from pivot.wirings.matching import Match
from pivot.wirings.wiring_findings import codes

from . import probe_run
from .probe_run import Row, Run, delayed, row, usual


def test_a_row_without_a_source_does_not_outvote_those_that_have_one() -> None:
    # a prefix cache leaves one row of a prompt to be forwarded: what lies before it was never recorded
    for lost in ([0.0] * 16, row(3, "d", 8, 0)):
        run = usual(delayed)
        run.forward("EXTEND", [("d", [8])], fed=lambda states, lost=lost: [states[0], [lost], states[2]])
        answer = run.analyse(expected=[2, 3, 5], asked=[2, 3, 5])
        assert answer.slices[1].match == Match("moved", 3, "-1")
        assert codes(answer.findings) == ["WIRE-POSITION", "WIRE-FED"]
        # where the rows can tell, another state is another state
        run.forward("EXTEND", [("c", [8, 9])], fed=lambda states: [states[0], [[0.0] * 16] * 2, states[2]])
        assert run.analyse(expected=[2, 3, 5]).slices[1].match is None


def tree(run: Run, places: Sequence[tuple[str, Sequence[int]]], accepted: int | None, fed: Any = None) -> None:
    """A verification of trees; fc is fed as many rows, their positions from each request's root on."""
    number = run.forward("TARGET_VERIFY", places, fed=fed)
    run.lines[-1]["positions"] = [positions[0] + row for _, positions in places for row in range(len(positions))]
    if accepted is not None:
        run.verify(number, dict.fromkeys([request for request, _ in places], accepted))
        run.lines[-1]["topk"] = 2


def test_a_slice_of_the_position_before_is_found_with_trees_of_drafts() -> None:
    run = Run()
    run.forward("EXTEND", [("a", range(4))], fed=delayed)  # of a longer prompt: what lies before the root is not there
    tree(run, [("a", [9, 10, 10, 11])], 2, fed=delayed)
    tree(run, [("a", [11, 12, 12, 13])], 0, fed=lambda states: [states[0], [[9.0] * 16, *states[1][:3]], states[2]])
    answer = run.analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert answer.slices[1].match == Match("moved", 3, "-1")
    assert codes(answer.findings) == ["WIRE-POSITION", "WIRE-FED"]


def behind(rows: int) -> Any:
    """Whatever lies behind the first rows, in all slices alike."""
    return lambda states: [[*state[:rows], *[state[0]] * (len(state) - rows)] for state in states]


@pytest.mark.parametrize(
    ("positions", "accepted", "kept"),
    [
        ([9, 10, 11, 12], 1, 2),  # a tree that is a chain: its positions are those of the accepted path
        ([9, 10, 11, 11], 0, 1),  # one draft for the next position, and it is not accepted
        ([9, 10, 11, 11], None, 1),  # an engine whose verifications are not recorded
    ],
)
def test_what_lies_behind_an_accepted_path_is_no_alarm(positions: list[int], accepted: int, kept: int) -> None:
    run = usual()
    tree(run, [("a", positions)], accepted, fed=behind(kept))
    answer = run.analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert (answer.verdict, codes(answer.findings)) == ("right", [])
    assert all(piece.calls == 6 for piece in answer.slices)


def test_requests_at_the_same_positions_keep_their_roots_apart() -> None:
    run = Run()
    both = [("a", [9, 10, 10]), ("b", [9, 10, 10])]
    tree(run, both, 0, fed=lambda states: [states[0], [states[1][3], *states[1][:2], *states[1][3:]], states[2]])
    assert run.analyse(expected=[2, 3, 5]).verdict == "engine"


def test_rows_have_their_positions_where_the_engine_names_no_requests() -> None:
    for accepted, fed, verdict in ((0, behind(1), "right"), (2, delayed, "engine")):
        run = usual(delayed if fed is delayed else None)
        tree(run, [("a", [9, 10, 10])], accepted, fed=fed)
        for line in run.lines[1:]:
            line["lengths"], line["requests"] = None, None if line["point"] != "verify" else line["requests"]
        answer = run.analyse(expected=[2, 3, 5], asked=[2, 3, 5])
        assert answer.verdict == verdict
        assert answer.slices[1].match == (Match("moved", 3, "-1") if fed is delayed else Match("same", 3))


@pytest.mark.parametrize("change", [None, delayed, "scaled"])
def test_a_layer_that_adds_nothing_is_called_what_the_engine_keeps(change: Any) -> None:
    def scaled(states: list[list[Row]]) -> list[list[Row]]:
        return [states[0], [[2 * number for number in numbers] for numbers in states[1]], states[2]]

    run = usual(scaled if change == "scaled" else change, capture=(1, 3, 5))
    for line in run.lines[1:]:
        if line["point"] == "target":  # layers 0, 2 and 4 do nothing: what goes in comes out
            line["inputs"] |= {str(layer - 1): line["inputs"][str(layer)] for layer in (1, 3, 5)}
    answer = run.analyse(expected=[1, 3, 5], asked=[1, 3, 5])
    kinds = {None: [], delayed: ["WIRE-POSITION", "WIRE-FED"], "scaled": ["WIRE-SCALED", "WIRE-FED"]}
    assert [piece.source for piece in answer.slices] == [1, 3, 5]
    assert codes(answer.findings) == kinds[change]


@pytest.mark.parametrize(("kind", "code"), [("rounded", "WIRE-ROUNDED"), ("scaled", "WIRE-SCALED")])
def test_a_first_token_that_outweighs_all_others_hides_nothing(
    kind: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outweighing(layer: int, request: str, position: int, *more: int) -> Row:
        return [number + (3e3 if position == 0 else 0) for number in row(layer, request, position, *more)]

    def changed(numbers: Row) -> Row:
        factors = (1.0017, 0.9983) if kind == "rounded" else (1.3, 1.3)
        return [number * factors[index % 2] for index, number in enumerate(numbers)]

    monkeypatch.setattr(probe_run, "row", outweighing)
    run = Run()
    for request, length in (("a", 6), ("b", 1), ("c", 9)):  # of b there is nothing but its first token
        run.forward(
            "EXTEND", [(request, range(length))], fed=lambda states: [states[0], [*map(changed, states[1])], states[2]]
        )
    answer = run.analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert (answer.slices[1].match, answer.slices[1].calls) == (
        Match(kind, 3, "bfloat16" if kind == "rounded" else "1.3"),
        3,
    )
    assert codes(answer.findings) == [code, "WIRE-FED"]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_taken_for_nothing_else(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflowing(layer: int, *place: object) -> Row:
        return [number, *row(layer, *place)[1:]] if layer > 2 else row(layer, *place)

    def lost(states: list[list[Row]]) -> list[list[Row]]:
        return [[[number, -number] * 8 for _ in states[0]], *states[1:]]

    answer = usual(lost).analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert answer.slices[0].match == Match("none")
    monkeypatch.setattr(probe_run, "row", overflowing)  # the target overflows from layer 2 on: the wiring is right
    assert usual().analyse(expected=[2, 3, 5], asked=[2, 3, 5]).verdict == "right"
    answer = usual(lost).analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert (answer.slices[0].match, answer.layers[1:]) == (Match("none"), (3, 5))


# --- what is not seen


def test_verifications_that_graphs_hide_are_missed_and_clear_nobody() -> None:
    run = Run()
    number = run.forward("EXTEND", [("a", range(5))])
    run.verify(number, {"a": 0})
    found = run.analyse(expected=[2, 3, 5])
    assert found.verdict == "unseen"
    assert [finding.code for finding in found.findings] == ["WIRE-BLIND"]
    assert found.findings[0].message.startswith("1 verifications were recorded and none of the forwards")
    assert run.analyse(expected=[1, 3, 5]).verdict == "config"  # what the prefills prove is proven
    run.verify(run.forward("TARGET_VERIFY", [("a", range(5, 9))]), {"a": 2})
    assert run.analyse(expected=[2, 3, 5]).verdict == "right"
