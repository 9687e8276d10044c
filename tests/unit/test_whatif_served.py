"""Judgements about rows that were really served (SGLang 0.5.23, the lab's pair), and really evaluated.

tests/unit/data/whatif/compact.py made the files from directories that `lab/faults/bench.py --keep` leaves.
"""

import json
from pathlib import Path

import pytest

from pivot.experiments import whatif, whatif_figures

DATA = Path(__file__).parent / "data/whatif"
RIGHT = (3, 5, 7)
# row → the layers that reach fc, and the code of the first finding
ROWS = {
    "right": (RIGHT, None),
    "random-head": (RIGHT, "WHATIF-HEAD"),
    "rope-theta-10": (RIGHT, "WHATIF-ROPE"),
    "drafter-of-another-target": (RIGHT, "WHATIF-TARGET"),
    "another-checkpoint-of-the-target": (RIGHT, "WHATIF-TARGET"),
    "simulated-acceptance": (RIGHT, "WHATIF-SERVED-LESS"),
    "eagle-for-eagle3": (None, "WHATIF-SERVED-LESS"),
}


def judge(name, **more):
    kept = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return whatif.judge(
        whatif_figures.Question(
            subject=name,
            evaluation=kept["evaluation"],
            asked=kept["asked"],
            served=ROWS[name][0],
            contract=RIGHT,
            flags=kept["asked"]["server"],
            **more,
        )
    )


@pytest.mark.parametrize("name", ROWS)
def test_the_first_suspect_of_a_row_that_was_served(name):
    judgement = judge(name)
    assert next((finding.code for finding in judgement.findings), None) == ROWS[name][1]


@pytest.mark.parametrize("name", [name for name, (_, code) in ROWS.items() if code != "WHATIF-SERVED-LESS"])
def test_what_is_predicted_is_what_was_served(name):
    judgement = judge(name)
    assert abs(judgement.served.length - judgement.reference.figures.length) <= 0.15
    for served, predicted in zip(judgement.served.per_position, judgement.reference.figures.per_position, strict=True):
        assert abs(served - predicted) <= 0.05


def test_a_flag_serves_well_below_what_is_predicted_and_is_named():
    finding = judge("eagle-for-eagle3").findings[0]
    assert "speculative-algorithm is EAGLE" in finding.message
    assert finding.fix == "write speculative-algorithm: EAGLE3"


def test_the_repairs_that_help_are_the_right_ones():
    best = {
        name: max((row for row in judge(name).rows if row.is_repair), key=lambda row: row.figures.length).name
        for name in ("random-head", "rope-theta-10")
    }
    assert best["random-head"] == "the target's head"
    assert best["rope-theta-10"] in ("rope theta 10000", "rope theta 50000", "the target's rope")
