"""What roles/debug_probes makes of an evaluator and a drafter that are not as they should be: its own variables."""

import base64
import json
from pathlib import Path

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

ROLE = Path(__file__).resolve().parents[2] / "roles/debug_probes"
READ = {"content": base64.b64encode(b'{"a": 1}').decode()}
ASKED = {"asked": {"prompts": [], "server": {"speculative_draft_model_path": "an/id-of-the-hub"}, "accept_length": 2.0}}


def said(evaluated, config):
    """The sentences, the evaluation and the drafter's settings that go into the answer."""
    loader = DataLoader()
    known = loader.load_from_file(str(ROLE / "vars/main.yml"), trusted_as_template=True)
    known |= {"__debug_probes_asked": ASKED, "__debug_probes_evaluated": evaluated}
    if config is not None:
        known["__debug_probes_drafter_config"] = config
    templar = Templar(loader=loader, variables=known)
    experiment = known["__debug_probes_experiment"]
    return (
        templar.template(known["__debug_probes_lines"]),
        templar.template(experiment["evaluation"]),
        templar.template(experiment["config"]),
    )


@pytest.mark.parametrize(
    ("evaluated", "config", "lines", "evaluation"),
    [
        ({"rc": 0, "stdout": '{"rows": 3}'}, READ, [], {"rows": 3}),
        ({"rc": 3, "stdout": '{"failed": "no head"}'}, READ, ["no head"], None),  # its own sentence
        (
            {"rc": -9, "stdout": '{"rows"', "stderr": "loading\nKilled"},
            READ,
            ["the drafter was not evaluated: its evaluator ended with -9: Killed"],
            None,
        ),
        ({"rc": 1, "stdout": ""}, READ, ["the drafter was not evaluated: its evaluator ended with 1: no word"], None),
        ({"skipped": True}, READ, [], None),
        (
            {},
            {"failed": True, "msg": "file not found: an/id-of-the-hub/config.json"},
            [
                "the drafter was not evaluated: an/id-of-the-hub/config.json cannot be read on the host; "
                "set debug_probes_drafter to its directory there"
            ],
            None,
        ),
        ({}, {"skipped": True}, [], None),
        ({}, None, [], None),  # nothing was asked
    ],
)
def test_what_cannot_be_evaluated_costs_its_own_part_of_the_answer_alone(evaluated, config, lines, evaluation):
    settings = json.loads(base64.b64decode(READ["content"])) if config is READ else {}
    assert said(evaluated, config) == (lines, evaluation, settings)
