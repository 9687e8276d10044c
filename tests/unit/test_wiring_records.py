"""What the analysis answers on records of real runs (lab/faults/capture.py), against the bench's own table."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pivot.wirings import wiring
from pivot.wirings.records import parse
from pivot.wirings.wiring_findings import codes

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "tests/unit/data/records"
INDEX = json.loads((PLACE / "index.json").read_text())["records"]
ROWS = {row["name"]: row for row in yaml.safe_load((ROOT / "lab/faults/rows.yml").read_text())["rows"]}
CONTRACT = [3, 5, 7]


def analysed(entry: dict[str, Any], **changes: Any) -> wiring.Wiring:
    recordings = [parse(entry["file"], text_of(entry))]
    asked = wiring.asked_layers(recordings, {"eagle_config": entry["eagle_config"]})
    return wiring.analyse(recordings, **{"expected": CONTRACT, "asked": asked, **changes})


def text_of(entry: dict[str, Any]) -> str:
    return gzip.decompress((PLACE / entry["file"]).read_bytes()).decode()


def right() -> dict[str, Any]:
    return next(entry for entry in INDEX if entry["row"] == "right")


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["row"])
def test_the_answer_is_that_of_the_table(entry: dict[str, Any]) -> None:
    expected = ROWS[entry["row"]]["expect"]
    answer = analysed(entry)
    pieces = [
        piece.layer if piece.layer is not None else [piece.match and piece.match.kind, piece.source]
        for piece in answer.slices
    ]
    seen = (answer.verdict, pieces, codes(answer.findings))
    assert seen == (expected["wiring"], expected["slices"], expected["findings"])


def test_every_class_is_there_and_the_files_are_those_that_were_recorded() -> None:
    assert {ROWS[entry["row"]]["class"] for entry in INDEX} >= {"none", "config", "weights", "flags", "engine"}
    hashes = {entry["file"]: entry["sha256"] for entry in INDEX}
    assert {path.name for path in PLACE.glob("*.gz")} == set(hashes)
    for name, digest in hashes.items():
        assert hashlib.sha256((PLACE / name).read_bytes()).hexdigest() == digest
    assert sum(path.stat().st_size for path in PLACE.iterdir()) < 400_000


def test_acceptance_is_what_the_verifications_say() -> None:
    records = [json.loads(line) for line in text_of(right()).splitlines()]
    accepted = [record["accepted"][0] for record in records if record["point"] == "verify"]
    committed = [len(record["committed"][0]) for record in records if record["point"] == "verify"]
    seen = analysed(right()).acceptance
    assert (seen.verifications, seen.length) == (len(accepted), pytest.approx(sum(committed) / len(accepted)))
    assert seen.per_position[0] == sum(count > 0 for count in accepted) / len(accepted)


def test_a_contract_in_the_other_convention_or_for_another_drafter_is_found_out() -> None:
    assert analysed(right(), expected=wiring.as_inputs([2, 4, 6], "output")).verdict == "right"
    other = analysed(right(), expected=[2, 4, 6])
    assert (other.verdict, codes(other.findings)) == ("config", ["WIRE-IDS"])
    assert "each is 1 too high" in other.findings[0].message
    assert other.findings[0].fix.startswith("set the layer ids to [2, 4, 6]")


def test_cut_anywhere_the_rest_still_answers() -> None:
    text = text_of(right())
    for part in range(1, 20):
        answer = wiring.analyse([parse("a.jsonl", text[: len(text) * part // 20])], CONTRACT)
        assert answer.verdict in ("right", "unseen")
        said = {"WIRE-CUT-OFF", "WIRE-NO-FORWARD", "WIRE-POINT-MISSING", "WIRE-NO-RECORDS"}
        assert set(codes(answer.findings)) <= said


def test_without_what_only_schema_2_has_the_layers_are_the_same() -> None:
    lines = []
    for line in text_of(right()).splitlines():
        record = json.loads(line)
        if record["point"] in ("header", "target", "packed", "fc"):
            lines.append(
                {key: value for key, value in record.items() if key not in ("positions", "requests", "lengths")}
            )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    answer = wiring.analyse([parse("a.jsonl", text)], CONTRACT)
    assert (answer.verdict, answer.layers, answer.acceptance.length) == ("right", (3, 5, 7), None)
