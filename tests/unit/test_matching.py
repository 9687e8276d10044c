"""What a handed-over state is told to be, on fingerprints made by hand."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pivot.findings import Severity
from pivot.wirings import wiring, wiring_command
from pivot.wirings.matching import Match
from pivot.wirings.records import parse
from pivot.wirings.wiring_findings import codes

from .probe_run import LAYERS, Row, Run, delayed, printed, row, usual


def test_the_right_wiring_is_right_and_asks_for_nothing() -> None:
    answer = usual().analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert (answer.verdict, codes(answer.findings)) == ("right", [])
    assert [piece.match for piece in answer.slices] == [Match("same", layer) for layer in (2, 3, 5)]
    assert usual().analyse().verdict == "consistent"


def test_a_slice_of_the_position_before_is_named_with_its_layer() -> None:
    answer = usual(delayed).analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert answer.slices[1].match == Match("moved", 3, "-1")
    assert (
        str(answer.slices[1]) == "fc slice 1 = input of layer 3 (output of layer 2), of the position before, in 5 calls"
    )
    assert (answer.verdict, codes(answer.findings)) == ("engine", ["WIRE-POSITION", "WIRE-FED"])


def test_a_slice_of_a_later_position_too() -> None:
    answer = usual(lambda states: [states[0], states[1], [*states[2][2:], *states[2][:2]]]).analyse(expected=[2, 3, 5])
    assert str(answer.slices[2].match) == "input of layer 5 (output of layer 4), of 2 positions after"


def test_one_row_at_a_time_the_position_before_is_found_in_the_forward_before() -> None:
    run = Run()
    run.forward("EXTEND", [("a", range(4))], fed=delayed)
    for position in range(4, 8):
        before = [row(3, "a", position - 1, 0)]
        run.forward("DECODE", [("a", [position])], fed=lambda states, late=before: [states[0], late, states[2]])
    assert run.analyse(expected=[2, 3, 5]).slices[1].match == Match("moved", 3, "-1")


def test_another_requests_rows_do_not_count_as_neighbours() -> None:
    run = Run()
    # the rows of b follow those of a in the forward, and its positions follow a's too
    run.forward(
        "EXTEND", [("a", [0]), ("b", [1])], fed=lambda states: [states[0], [states[1][1], states[1][0]], states[2]]
    )
    assert run.analyse().slices[1].match == Match("none")


@pytest.mark.parametrize(("factor", "said"), [(0.25, "0.25"), (-1.0, "-1"), (1.1, "1.1")])
def test_a_scaled_slice_is_named_with_its_factor(factor: float, said: str) -> None:
    def change(states: list[list[Row]]) -> list[list[Row]]:
        return [states[0], states[1], [[factor * number for number in numbers] for numbers in states[2]]]

    answer = usual(change, "packed").analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert answer.slices[2].match == Match("scaled", 5, said)
    assert (answer.verdict, codes(answer.findings)) == ("engine", ["WIRE-SCALED", "WIRE-PACKED"])


def test_a_normed_slice_is_scaled_row_by_row() -> None:
    def change(states: list[list[Row]]) -> list[list[Row]]:
        return [[[number / sum(map(abs, numbers)) for number in numbers] for numbers in states[0]], *states[1:]]

    answer = usual(change).analyse(expected=[2, 3, 5])
    assert str(answer.slices[0].match) == "input of layer 2 (output of layer 1), times another factor in each row"


def test_a_state_that_is_nobodys_says_whose_it_is_nearest_to() -> None:
    dice = random.Random(1)  # noqa: S311 - as above

    def change(states: list[list[Row]]) -> list[list[Row]]:
        return [states[0], [[number + dice.gauss(0, 0.3) for number in row] for row in states[1]], states[2]]

    answer = usual(change).analyse(expected=[2, 3, 5])
    assert codes(answer.findings) == ["WIRE-UNKNOWN", "WIRE-FED"]
    assert str(answer.slices[1]) == (
        "fc slice 1 = none of the recorded states, nearest to the input of layer 3 (output of layer 2), in 5 calls"
    )


@pytest.mark.parametrize(("error", "said"), [(2e-4, "float16"), (1.7e-3, "bfloat16"), (3e-2, "an 8-bit type")])
def test_a_rounded_slice_is_a_warning_with_the_type_it_went_through(error: float, said: str) -> None:
    dice = random.Random(1)  # noqa: S311 - as above

    def change(states: list[list[Row]]) -> list[list[Row]]:
        rounded = [[number * (1 + dice.choice((-error, error))) for number in numbers] for numbers in states[0]]
        return [rounded, *states[1:]]

    answer = usual(change, "packed").analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert answer.slices[0].match == Match("rounded", 2, said)
    assert codes(answer.findings) == ["WIRE-ROUNDED", "WIRE-PACKED"]
    assert {finding.severity for finding in answer.findings} == {Severity.WARNING}


def test_a_cleared_slice_is_zero() -> None:
    def change(states: list[list[Row]]) -> list[list[Row]]:
        return [states[0], [[0.0] * 16 for _ in states[1]], states[2]]

    answer = usual(change).analyse(expected=[2, 3, 5])
    assert answer.slices[1].match == Match("zero")
    assert codes(answer.findings) == ["WIRE-ZERO", "WIRE-FED"]


def test_a_buffer_of_the_forward_before_is_stale() -> None:
    kept: list[list[Row]] = []

    def change(states: list[list[Row]]) -> list[list[Row]]:
        old = list(kept) or [[9.0] * 16 for _ in states[1]]
        kept[:] = states[1]
        return [states[0], old[: len(states[1])], states[2]]

    run = Run()
    for request in range(6):
        run.forward("EXTEND", [(f"r{request}", range(4))], fed=change)
    answer = run.analyse(expected=[2, 3, 5])
    assert answer.slices[1].match is None  # the first call holds nothing that was ever recorded
    assert codes(answer.findings) == ["WIRE-UNSTABLE", "WIRE-FED"]
    assert "of an earlier forward 5 times in EXTEND" in str(answer.slices[1])
    run.lines = [
        line for line in run.lines if line["n"] == 1 or line.get("target", line["n"]) != 2 or line["point"] == "target"
    ]
    assert codes(run.analyse(expected=[2, 3, 5]).findings) == ["WIRE-STALE", "WIRE-FED"]


def test_a_slice_that_is_there_twice() -> None:
    answer = usual(lambda states: [states[0], states[2], states[2]], "packed").analyse(
        expected=[2, 3, 5], asked=[2, 3, 5]
    )
    assert (answer.verdict, codes(answer.findings)) == ("engine", ["WIRE-TWICE", "WIRE-PACKED"])
    assert "made of layers [2, 5, 5]" in answer.findings[0].message


def test_an_order_that_is_not_the_engines_is_found_without_a_contract_too() -> None:
    answer = usual(lambda states: [states[1], states[0], states[2]]).analyse()
    assert (answer.verdict, codes(answer.findings)) == ("engine", ["WIRE-ORDER", "WIRE-FED"])
    assert "the engine is told to keep [2, 3, 5]" in answer.findings[0].message


def test_a_capture_that_keeps_other_layers_than_it_was_told() -> None:
    run = usual(capture=(1, 2, 4))
    for line in run.lines:
        if line["point"] == "target":
            line["capture"] = [2, 3, 5]
    answer = run.analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert (answer.verdict, answer.layers) == ("engine", (1, 2, 4))
    assert codes(answer.findings) == ["WIRE-CAPTURED"]
    assert "captured = inputs of layers [2, 3, 5], exact in 0 of 5 forwards" in answer.text()


def test_forced_ids_are_the_engines_fault_and_not_the_configs() -> None:
    answer = usual(capture=(1, 2, 4)).analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert (answer.verdict, codes(answer.findings)) == ("engine", ["WIRE-ASKED"])
    assert "asks for the inputs of layers [2, 3, 5], the engine keeps [1, 2, 4]" in answer.findings[0].message
    default = usual(capture=(2, 3, 3)).analyse(expected=[2, 4, 5], asked=[2, 4, 5])
    assert "its default: the ids did not reach it" in default.findings[0].message


def test_wrong_ids_say_what_they_look_like_and_what_to_write() -> None:
    low = usual(capture=(1, 2, 4)).analyse(expected=[2, 3, 5], asked=[1, 2, 4])
    assert (low.verdict, codes(low.findings)) == ("config", ["WIRE-IDS"])
    assert "each is 1 too low" in low.findings[0].message
    assert low.findings[0].fix.startswith("set the layer ids to [2, 3, 5], ")
    first = usual(capture=(0, 2, 3)).analyse(expected=[2, 3, 5])
    assert "one of them is the embedding" in first.findings[0].message
    lost = usual(capture=(2, 3, 4)).analyse(expected=[2, 3, 5], asked=[2, 3, 4])
    assert "each is" not in lost.findings[0].message


def test_what_a_config_asks_for_is_read_by_the_rule_of_the_recorded_engine() -> None:
    recordings = [parse("a.jsonl", usual().text())]

    def asked(eagle_config: object) -> tuple[int, ...] | None:
        return wiring.asked_layers(recordings, {"eagle_config": eagle_config})

    assert asked({wiring.IDS: [5, 2, 3]}) == (2, 3, 5)
    assert asked({wiring.IDS: [1, 2, 4]}) == (2, 3, 5)
    assert asked({}) == (2, 3, 3)
    assert wiring.asked_layers(recordings, {wiring.IDS: [2, 3, 5]}) == (2, 3, 3)
    assert asked({wiring.IDS: ["2", 3, 5]}) is None
    assert asked("no mapping") == (2, 3, 3)
    assert wiring.asked_layers([], {}) is None


def given(run: Run, count: int = 3) -> Run:
    for number in range(count):
        target = run.add("target", **target_without_capture(number))
        # where the target keeps nothing, the logits processor packs its last state
        run.add("packed", target=target, rows=2, prints=[printed([row(8, "g", number), row(8, "g2", number)])])
        run.add("given", target=target, rows=2, rank=0, prints=[printed([row(9, "g", number), row(9, "g2", number)])])
    return run


def target_without_capture(number: int) -> dict[str, Any]:
    states = {str(layer): printed([row(layer, "g", number), row(layer, "g2", number)]) for layer in range(LAYERS)}
    return {"rank": 0, "rows": 2, "capture": [], "captured": {"prints": []}, "inputs": states, "layers": LAYERS}


def test_a_drafter_that_is_fed_past_its_fc_is_bypassed() -> None:
    answer = given(Run()).analyse(expected=[2, 3, 5], asked=[2, 3, 5])
    assert (answer.verdict, codes(answer.findings)) == ("bypassed", ["WIRE-BYPASSED"])
    assert "--speculative-algorithm EAGLE3" in answer.findings[0].fix
    assert answer.text().splitlines()[1:] == ["past its fc, the drafter was given one state of its own width 3 times"]
    unsure = given(Run()).analyse()
    assert unsure.findings[-1].severity is Severity.WARNING


def test_acceptance_is_counted_by_position_and_over_the_fixed_prompts() -> None:
    run = usual()
    run.verify(2, {"pivot-prompt-a": 3, "someone": 0})
    run.verify(2, {"pivot-prompt-a": 0, "pivot-replay-a": 0})
    run.verify(2, {"pivot-prompt-b": 1})
    answer = run.analyse(
        meta={"pivot-prompt-a": {"spec_accept_length": 2.5}, "pivot-prompt-b": {"spec_accept_length": 2.0}}
    )
    assert answer.acceptance.histogram == (1, 1, 0, 1)
    assert answer.acceptance.length == pytest.approx(1 + 4 / 3)
    assert answer.acceptance.per_position == pytest.approx((2 / 3, 1 / 3, 1 / 3))
    assert answer.text().splitlines()[-1] == "accept length 2.33 over 3 verifications, by position 0.67 0.33 0.33"
    assert codes(answer.findings) == []


def test_a_server_that_reports_another_acceptance_is_found() -> None:
    run = usual()
    for _ in range(20):
        run.verify(2, {"pivot-prompt-a": 2})
    answer = run.analyse(meta={"pivot-prompt-a": {"spec_accept_length": 1.0}, "pivot-prompt-b": {}})
    assert codes(answer.findings) == ["WIRE-ACCEPTANCE"]
    assert "pivot-prompt-a: recorded 3.00, reported 1.00" in answer.findings[0].message

    def said(**meta: object) -> list[str]:
        return codes(run.analyse(meta={"pivot-prompt-a": meta}).findings)

    # the prefill's token counts and the end cuts the last verification off, so a length alone may differ by that
    assert said(spec_accept_length=2.9) == []
    assert said(spec_accept_length=2.9, spec_correct_drafts_histogram=[0, 0, 20]) == []
    assert said(spec_accept_length=3.0, spec_correct_drafts_histogram=[0, 1, 19]) == ["WIRE-ACCEPTANCE"]
    assert said(spec_accept_histogram=[20]) == ["WIRE-ACCEPTANCE"]
    assert said(spec_accept_length="3", spec_accept_histogram=[]) == []


def test_what_the_draft_steps_consume() -> None:
    run = Run()
    number = run.forward("EXTEND", [("a", range(4))])
    own = printed([row(9, "own", 1)])
    run.add("draft", target=number, requests=["a"], step=0, rows=None, positions=None, hidden=None, tokens=None)
    run.add("draft", target=number, requests=["a"], step=1, rows=1, positions=[4], hidden=own, tokens=None)
    answer = run.analyse(expected=[2, 3, 5])
    assert (answer.drafts, codes(answer.findings)) == (((1, "its own state", 1),), [])
    assert "the draft steps 1 consume the drafter's own states" in answer.text()
    for hidden, said in (
        (own, "the state of the step before"),
        (printed([row(5, "a", 3, 0)]), "the target's input of layer 5 (output of layer 4)"),
        (printed([[0.0] * 16]), "zero"),
    ):
        run.add("draft", target=number, requests=["a"], step=2, rows=1, positions=[5], hidden=hidden, tokens=None)
        wrong = run.analyse(expected=[2, 3, 5])
        assert codes(wrong.findings) == ["WIRE-DRAFT"]
        assert f"draft step 2 consumed {said} 1 times" in wrong.findings[0].message
        run.lines.pop()


def test_ranks_that_agree_are_one_answer_and_their_verifications_count_once() -> None:
    runs = []
    for rank in range(2):
        run = Run(rank=rank)
        run.forward("TARGET_VERIFY", [("a", range(4))])
        run.verify(2, {"a": 1})
        runs.append(run)
    answer = runs[0].analyse(runs[1], expected=[2, 3, 5])
    assert (answer.verdict, answer.ranks, answer.acceptance.histogram) == ("right", (0, 1), (0, 1, 0, 0))
    assert "on 2 ranks" in answer.text()


def test_of_two_starts_that_kept_other_layers_the_later_one_is_judged() -> None:
    before, after = usual(capture=(1, 3, 5)), usual()
    answer = before.analyse(after, expected=[2, 3, 5], asked=[2, 3, 5])
    assert (answer.verdict, answer.layers, answer.forwards) == ("right", (2, 3, 5), 5)
    assert codes(answer.findings) == ["WIRE-STARTS"]
    assert "1 files (0.jsonl) are of other starts, which were told to keep the inputs of layers [1, 3, 5]" in (
        answer.findings[0].message
    )
    # the same layers, and another rank's: one service
    other = Run(capture=(1, 3, 5), rank=1)
    other.forward("EXTEND", [("a", range(4))])
    assert "WIRE-STARTS" not in codes(usual().analyse(usual(), other).findings)


def test_ranks_that_disagree_are_named() -> None:
    one, other = Run(rank=0), Run(rank=1)
    one.forward("EXTEND", [("a", range(4))])
    other.forward("EXTEND", [("a", range(4))], fed=delayed)
    answer = one.analyse(other, expected=[2, 3, 5])
    assert codes(answer.findings) == ["WIRE-UNSTABLE", "WIRE-FED", "WIRE-RANKS"]
    assert "rank 1: input of layer 2 (output of layer 1), input of layer 3 (output of layer 2), of the" in (
        answer.findings[2].message
    )


@pytest.mark.parametrize("capture", [(2,), (2, 5), (0, 1, 3, 5)])
def test_any_number_of_slices(capture: tuple[int, ...]) -> None:
    answer = usual(capture=capture).analyse(expected=capture, asked=capture)
    assert (answer.verdict, answer.layers) == ("right", capture)


def test_the_output_of_the_last_layer_is_a_state_too() -> None:
    def change(states: list[list[Row]]) -> list[list[Row]]:
        return [states[0], states[1], [row(LAYERS, "a", position, 0) for position in range(4)]]

    run = Run()
    run.forward("EXTEND", [("a", range(4))], fed=change)
    answer = run.analyse(expected=[2, 3, 5])
    assert answer.layers == (2, 3, LAYERS)
    assert "input of layer 6 (output of layer 5)" in answer.text()


def test_prefill_and_verification_that_are_fed_differently_are_told_apart() -> None:
    run = Run()
    run.forward("EXTEND", [("a", range(4))])
    for step in range(3):
        run.forward(
            "TARGET_VERIFY", [("a", range(4 + step, 8 + step))], fed=lambda states: [states[0], states[2], states[2]]
        )
    answer = run.analyse(expected=[2, 3, 5])
    assert str(answer.slices[1]) == (
        "fc slice 1 = not always the same state in 4 calls: input of layer 5 (output of layer 4) 3 times in "
        "TARGET_VERIFY; input of layer 3 (output of layer 2) 1 times in EXTEND"
    )


def test_two_runs_are_compared_in_words() -> None:
    one = usual().analyse(expected=[2, 3, 5])
    assert wiring.compare(one, one) == "nothing differs"
    other = usual(delayed, capture=(1, 3, 5)).analyse(expected=[2, 3, 5])
    assert wiring.compare(one, other).splitlines() == [
        "verdict: right → engine",
        "captured: [2, 3, 5] → [1, 3, 5]",
        "fc slice 0: input of layer 2 (output of layer 1) → input of layer 1 (output of layer 0)",
        "fc slice 1: input of layer 3 (output of layer 2) → "
        "input of layer 3 (output of layer 2), of the position before",
    ]
    assert "fc slice 2: input of layer 5 (output of layer 4) → not there" in wiring.compare(
        one, usual(capture=(2, 3)).analyse()
    )


def test_lost_records_and_odd_values_are_no_reason_to_stop() -> None:
    run = usual()
    run.add("dropped", count=7)
    run.add("verify", target=2, requests=["a"], accepted=["3"], steps=3, drafted=None)
    run.add("target", rank=0, rows="many", capture=[2], captured={"prints": []}, inputs={})
    answer = run.analyse(expected=[2, 3, 5])
    assert codes(answer.findings) == ["WIRE-DAMAGED", "WIRE-DROPPED"]
    assert answer.verdict == "right"


def test_records_of_schema_1_are_read_and_said_to_be_old() -> None:
    run = usual()
    run.lines[0]["schema"] = 1
    for line in run.lines[1:]:
        for key in ("requests", "positions", "lengths", "outputs"):
            line.pop(key, None)
    answer = run.analyse(expected=[2, 3, 5])
    assert (answer.verdict, codes(answer.findings)) == ("right", ["WIRE-SCHEMA"])
    assert "they are old and know no positions" in answer.findings[0].message
    assert answer.findings[0].severity is Severity.WARNING


def test_the_command_reads_a_directory_and_compares_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, run in (("one", usual()), ("two", usual(delayed))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(run.text())
    (tmp_path / "config.json").write_text(json.dumps({"eagle_config": {wiring.IDS: [2, 3, 5]}}))
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    trained = ["--expected", "1,2,4", "--convention", "output"]
    assert wiring_command.main([one, *trained, "--drafter", str(tmp_path)]) == 0
    assert "expected are the inputs of layers [2, 3, 5]: they agree" in capsys.readouterr().out
    assert wiring_command.main([two, *trained]) == 1
    assert "WIRE-POSITION" in capsys.readouterr().out
    assert wiring_command.main([one, two]) == 0
    assert capsys.readouterr().out.startswith("verdict: consistent → engine\n")
    assert wiring_command.main([one, two, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is no directory with records"),
        ([".", "--expected", "3;5"], "is no list of layers, such as 3,5,7"),
        ([".", "--drafter", "nowhere"], "nowhere cannot be read as a config.json"),
    ],
)
def test_the_command_says_what_it_cannot_use(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(usual().text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        wiring_command.main(arguments)
    assert said in capsys.readouterr().err
