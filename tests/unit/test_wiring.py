"""Records written by hand, and what they prove."""

import base64
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pivot.findings import Severity
from pivot.wirings.wiring import Wiring, agreement, analyse, as_inputs, layer_name, parse, read

LAYERS = 6


def printed(*rows: float) -> str:
    """A fingerprint of rows that are told apart by one number each."""
    return base64.b64encode(b"".join(struct.pack("<16f", *([row] * 16)) for row in rows)).decode()


def state(layer: int, forward: int) -> str:
    """The input of a layer in a forward of two rows."""
    return printed(layer * 100 + forward, layer * 100 + forward + 0.5)


def header(**changes: Any) -> dict[str, Any]:
    return {
        "point": "header",
        "n": 1,
        "schema": 2,
        "probe": "0.1.0",
        "pid": 7,
        "sglang": "0.5.23",
        "hooks": {"sglang.srt.models.deepseek_v2.DeepseekV2Model.forward": "registered"},
        **changes,
    }


def target(number: int, capture: Sequence[int], captured: Sequence[int] | None = None) -> dict[str, Any]:
    kept = capture if captured is None else captured
    return {
        "point": "target",
        "n": number,
        "rank": 0,
        "rows": 2,
        "capture": list(capture),
        "captured": {"count": len(kept), "prints": [state(layer, number) for layer in kept]},
        "embedding": state(0, number),
        "inputs": {str(layer): state(layer, number) for layer in range(LAYERS)},
    }


def handed(point: str, number: int, of: int, layers: Sequence[int]) -> dict[str, Any]:
    return {
        "point": point,
        "n": number,
        "target": of,
        "rows": 2,
        "prints": [state(layer, of) for layer in layers],
    }


def calls(capture: Sequence[int], fed: Sequence[int], count: int = 3) -> list[dict[str, Any]]:
    """A header and some rounds of capture, packing and feeding."""
    records = [header()]
    for first in range(2, 2 + 3 * count, 3):
        records += [
            target(first, capture),
            handed("packed", first + 1, first, capture),
            handed("fc", first + 2, first, fed),
        ]
    return records


def lines(records: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def wiring(records: Sequence[dict[str, Any]], expected: Sequence[int] | None = None) -> Wiring:
    return analyse([parse("a.jsonl", lines(records))], expected)


def codes(answer: Wiring) -> list[str]:
    return [finding.code for finding in answer.findings]


def test_the_right_wiring_is_named_and_raises_no_alarm() -> None:
    answer = wiring(calls([3, 4, 5], [3, 4, 5]), expected=[3, 4, 5])
    assert answer.layers == (3, 4, 5)
    assert codes(answer) == []
    assert answer.text().splitlines() == [
        "SGLang 0.5.23: 3 forwards of the target, 3 calls of the drafter's fc",
        "fc slice 0 = input of layer 3 (output of layer 2), exact in 3 of 3 calls",
        "fc slice 1 = input of layer 4 (output of layer 3), exact in 3 of 3 calls",
        "fc slice 2 = input of layer 5 (output of layer 4), exact in 3 of 3 calls",
        "packed = captured, exact in 3 of 3 forwards",
        "fc input = packed, exact in 3 of 3 calls",
        "expected are the inputs of layers [3, 4, 5]: they agree",
    ]


def test_wrong_ids_are_named_with_both_lists() -> None:
    answer = wiring(calls([2, 3, 4], [2, 3, 4]), expected=[3, 4, 5])
    assert codes(answer) == ["WIRE-IDS"]
    assert "receives the inputs of layers [2, 3, 4]" in answer.findings[0].message
    assert "trained on the inputs of [3, 4, 5]" in answer.findings[0].message
    assert "DISAGREE" in answer.text()


def test_the_embedding_is_called_by_its_name() -> None:
    answer = wiring(calls([0, 2, 4], [0, 2, 4]))
    assert answer.layers == (0, 2, 4)
    assert "fc slice 0 = the embedding (input of layer 0), exact in 3 of 3 calls" in answer.text()


def test_without_expected_layers_there_is_nothing_to_disagree_with() -> None:
    answer = wiring(calls([2, 3, 4], [2, 3, 4]))
    assert codes(answer) == []
    assert "expected" not in answer.text()


def test_the_order_of_the_expected_layers_is_the_packing_order() -> None:
    assert codes(wiring(calls([2, 4, 5], [2, 4, 5]), expected=[5, 2, 4])) == []


def test_rotated_slices_are_a_fault_of_order_not_of_ids() -> None:
    answer = wiring(calls([3, 4, 5], [4, 5, 3]), expected=[3, 4, 5])
    assert answer.layers == (4, 5, 3)
    assert codes(answer) == ["WIRE-ORDER", "WIRE-FED"]


def test_packing_that_exchanges_states_is_told_from_feeding_that_does() -> None:
    records = [header(), target(2, [3, 4]), handed("packed", 3, 2, [4, 3]), handed("fc", 4, 2, [4, 3])]
    assert codes(wiring(records, expected=[3, 4])) == ["WIRE-ORDER", "WIRE-PACKED"]


def test_a_slice_that_is_no_recorded_state_is_said_to_be_unknown() -> None:
    records = calls([3, 4, 5], [3, 4, 5])
    for record in records:
        if record["point"] == "fc":
            record["prints"][1] = printed(-1, -2)
    answer = wiring(records, expected=[3, 4, 5])
    assert answer.layers == (3, None, 5)
    assert codes(answer) == ["WIRE-UNKNOWN", "WIRE-FED"]
    assert "fc slice 1 = none of the recorded states, in 3 calls" in answer.text()


def test_a_slice_that_changes_its_layer_is_unstable() -> None:
    records = calls([3, 4], [3, 4])
    records[-1]["prints"][0] = state(2, records[-1]["target"])
    answer = wiring(records, expected=[3, 4])
    assert codes(answer) == ["WIRE-UNSTABLE", "WIRE-FED"]
    assert "input of layer 3 (output of layer 2) 2 times; input of layer 2 (output of layer 1) 1 times" in answer.text()


def test_a_missing_point_is_named_with_the_hooks_that_found_no_place() -> None:
    hooks = {"x.LlamaModel.__init__": "missing: ImportError: no such module"}
    records = [header(hooks=hooks), target(2, [3, 4]), handed("packed", 3, 2, [3, 4])]
    answer = wiring(records, expected=[3, 4])
    assert codes(answer) == ["WIRE-POINT-MISSING"]
    assert answer.findings[0].severity is Severity.ERROR
    assert "x.LlamaModel.__init__ missing: ImportError" in answer.findings[0].message


def test_without_the_packed_point_the_other_two_still_answer() -> None:
    records = [header(), target(2, [3, 4]), handed("fc", 3, 2, [3, 4])]
    answer = wiring(records, expected=[3, 4])
    assert answer.layers == (3, 4)
    assert [(finding.code, finding.severity) for finding in answer.findings] == [
        ("WIRE-POINT-MISSING", Severity.WARNING)
    ]


def test_a_loaded_probe_that_saw_nothing_says_so() -> None:
    assert codes(wiring([header()])) == ["WIRE-NO-FORWARD"]


@pytest.mark.parametrize("recordings", [[], [parse("a.jsonl", "")]])
def test_no_records_are_an_error(recordings: list[Any]) -> None:
    answer = analyse(recordings)
    assert codes(answer) == ["WIRE-NO-RECORDS"]
    assert answer.layers == ()


def test_a_cut_off_last_line_is_reported_and_the_rest_counts() -> None:
    text = lines(calls([3, 4, 5], [3, 4, 5]))
    answer = analyse([parse("a.jsonl", text[:-40])], [3, 4, 5])
    assert codes(answer) == ["WIRE-CUT-OFF"]
    assert answer.layers == (3, 4, 5)
    assert answer.calls == 2


def test_lines_that_are_no_records_are_counted_by_number() -> None:
    records = [json.dumps(record) for record in calls([3, 4], [3, 4])]
    bad_print = json.dumps({**handed("fc", 9, 2, [3]), "prints": [base64.b64encode(b"short").decode()]})
    texts = [records[0], "no json", "[1]", bad_print, *records[1:]]
    recording = parse("a.jsonl", "\n".join(texts) + "\n")
    assert recording.damaged == [2, 3, 4]
    answer = analyse([recording], [3, 4])
    assert codes(answer) == ["WIRE-DAMAGED"]
    assert "3 lines are no records (line 2, 3, 4)" in answer.findings[0].message


def test_failures_quota_and_a_foreign_schema_are_findings() -> None:
    failure = {"point": "failure", "n": 99, "hook": "on_fc", "count": 4, "error": "ValueError: no"}
    end = {"point": "end", "n": 100, "reason": "the records reached their limit"}
    answer = wiring([*calls([3], [3]), failure, end])
    assert codes(answer) == ["WIRE-ENDED", "WIRE-HOOK-FAILED"]
    assert "on_fc failed at least 4 times (ValueError: no)" in answer.findings[1].message
    assert codes(wiring([header(schema=3), *calls([3], [3])[1:]])) == ["WIRE-SCHEMA"]


def test_a_drafter_that_normalises_is_matched_by_what_it_received() -> None:
    records = calls([3, 4], [3, 4])
    for record in records:
        if record["point"] == "fc":
            record["received"], record["prints"] = record["prints"], [printed(-1, -2), printed(-3, -4)]
    assert wiring(records).layers == (3, 4)


def test_a_selection_of_rows_is_found_among_the_rows_of_the_forward() -> None:
    last = [state_row[1] for state_row in ((300, 302.5), (400, 402.5))]
    fed = {"point": "fc", "n": 4, "target": 2, "rows": 1, "prints": [printed(row) for row in last]}
    answer = wiring([header(), target(2, [3, 4]), handed("packed", 3, 2, [3, 4]), fed])
    assert answer.layers == (3, 4)
    unseen = {**fed, "prints": [printed(999), printed(998)]}
    assert wiring([header(), target(2, [3, 4]), unseen]).slices == ()


def tree(layer_of_the_root: int) -> list[dict[str, Any]]:
    """A verification of a tree: the root, and two drafts for the position after it. The second is accepted, so that
    `fc` is fed the root, that draft, and for the rest of its rows whatever lies there."""
    rows = {layer: [layer * 100.0, layer * 100 + 1.0, layer * 100 + 2.0] for layer in range(LAYERS)}
    forward = {
        **target(2, [3, 4]),
        "rows": 3,
        "requests": ["one"],
        "lengths": [3],
        "positions": [10, 11, 11],
        "captured": {"count": 2, "prints": [printed(*rows[3]), printed(*rows[4])]},
        "embedding": printed(*rows[0]),
        "inputs": {str(layer): printed(*rows[layer]) for layer in rows},
    }
    root, first = rows[layer_of_the_root][0], rows[3]
    path = [printed(root, first[2], first[0]), printed(rows[4][0], rows[4][2], rows[4][0])]
    fed = {"point": "fc", "n": 4, "target": 2, "rows": 3, "positions": [10, 11, 12], "prints": path}
    packed = {**handed("packed", 3, 2, [3, 4]), "rows": 3, "prints": forward["captured"]["prints"]}
    return [header(), forward, {**packed, "positions": [10, 11, 11]}, fed]


def test_the_accepted_path_of_a_tree_is_compared_where_its_rows_are_known() -> None:
    answer = wiring(tree(layer_of_the_root=3), [3, 4])
    assert answer.layers == (3, 4)
    assert codes(answer) == []


def test_another_layer_at_the_root_of_a_tree_is_seen() -> None:
    assert wiring(tree(layer_of_the_root=2), [3, 4]).layers == (2, 4)


def test_a_call_whose_forward_was_lost_is_left_out() -> None:
    answer = wiring(
        [header(), target(2, [3]), handed("packed", 3, 2, [3]), handed("fc", 4, 2, [3]), handed("fc", 6, 5, [3])]
    )
    assert "exact in 1 of 1 calls" in answer.text()


def test_rounding_is_close_and_a_layer_is_not() -> None:
    rows = (struct.pack("<16f", *([1.0] * 16)),)
    near = (struct.pack("<16f", *([1.000001] * 16)),)
    far = (struct.pack("<16f", *([1.001] * 16)),)
    assert agreement(rows, rows, aligned=True) == "exact"
    assert agreement(rows, near, aligned=True) == "close"
    assert agreement(rows, far, aligned=True) == "different"
    assert agreement(rows, (), aligned=True) == "unseen"


def test_conventions() -> None:
    assert as_inputs([4, 1, 2], "output") == (2, 3, 5)
    assert as_inputs([-1, 2], "output") == (0, 3)
    assert as_inputs([2, 3], "input") == (2, 3)
    assert layer_name(3) == "input of layer 3 (output of layer 2)"
    with pytest.raises(ValueError, match="neither input nor output"):
        as_inputs([1], "inputs")


def test_a_directory_is_read_by_name_and_the_answer_is_plain(tmp_path: Path) -> None:
    (tmp_path / "20250102T030405Z-2.jsonl").write_text(lines(calls([3, 4], [3, 4])))
    (tmp_path / "20250102T030404Z-1.jsonl").write_text(lines([header()]))
    (tmp_path / "other.txt").write_text("no record")
    recordings = read(tmp_path)
    assert [recording.name for recording in recordings] == ["20250102T030404Z-1.jsonl", "20250102T030405Z-2.jsonl"]
    plain = analyse(recordings, [3, 4]).as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["layers"] == [3, 4]
    assert plain["capture"] == [3, 4]


def test_records_of_earlier_starts_can_be_left_out(tmp_path: Path) -> None:
    for name in ("20261129T170427Z-7.jsonl", "20261129T170526Z-8.jsonl"):
        (tmp_path / name).write_text(json.dumps(header()) + "\n")
    assert [recording.name for recording in read(tmp_path, "2026-11-29T17:05:00Z")] == ["20261129T170526Z-8.jsonl"]
    assert len(read(tmp_path)) == 2
