"""The wiring bench's table and its judging; the rows themselves are served by `make bench-wiring`."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from pivot.experiments import experiment
from pivot.wirings import wiring
from pivot.wirings.records import parse

from .test_project import tracked

ROOT = Path(__file__).resolve().parents[2]
ROWS = yaml.safe_load((ROOT / "lab/faults/rows.yml").read_text())["rows"]
CHANGES = {"config", "weights", "target", "flags", "environment", "fault", "contract", "least"}
EXPECTED = {"wiring", "slices", "findings", "suspect", "first", "predicted", "says"}


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wiring_bench", ROOT / "lab/faults/bench.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_has_every_class_and_says_what_to_expect(bench: ModuleType) -> None:
    assert {row["class"] for row in ROWS} == set(bench.CLASSES)
    assert len({bench.slug(row) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert set(row) <= {"name", "class", "expect"} | CHANGES, row["name"]
        assert set(row["expect"]) <= EXPECTED, row["name"]
        assert row["expect"]["wiring"] in ("right", "config", "engine", "bypassed", "stopped"), row["name"]
        assert row["expect"].get("suspect", "none") in experiment.SUSPECTS, row["name"]
        assert row["class"] == "none" or set(row) & (CHANGES - {"contract"}), row["name"]


def test_right_rows_and_look_alikes_expect_no_alarm() -> None:
    for row in ROWS:
        if row["class"] in ("none", "look-alike"):
            assert (row["expect"]["wiring"], row["expect"]["findings"]) == ("right", []), row["name"]


def test_the_faults_are_known_to_what_makes_them() -> None:
    mutations = (ROOT / "lab/faults/mutate.py").read_text()
    kinds = (ROOT / "lab/faults/plugin/src/lab_broken_engine/faults.py").read_text()
    for row in ROWS:
        for name in [*row.get("weights", {}), *row.get("target", {})]:
            assert f"def {name}(" in mutations, row["name"]
        if "fault" in row:
            assert f'"{row["fault"]["kind"]}"' in kinds, row["name"]


def test_an_answer_that_differs_from_the_table_is_wrong(bench: ModuleType) -> None:
    answer = wiring.analyse([parse("a.jsonl", "")])
    row = {"name": "x", "class": "none", "expect": {"wiring": "unseen", "slices": [], "predicted": None}}
    assert list(bench.differences(bench.Result(row, answer), answer)) == []
    row["expect"] = {"wiring": "right", "slices": [3], "findings": [], "predicted": "served"}
    wrong = list(bench.differences(bench.Result(row, answer), answer))
    assert [item.split(":")[0] for item in wrong] == ["wiring", "slices", "findings", "what-if"]
    assert wrong[0] == "wiring: unseen, expected right"


def test_the_fault_plugin_is_nowhere_in_the_product() -> None:
    pattern = re.compile("lab.broken.engine", re.IGNORECASE)
    places = ("src", "roles", "playbooks", "plugins", "probe", "inventory", "requirements", "templates")
    texts = tracked(*places)
    assert len(texts) > 100
    assert [path for path in texts if pattern.search(path.read_bytes().decode(errors="replace"))] == []
