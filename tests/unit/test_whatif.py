"""Predicted against served, on evaluations written by hand: every verdict fires, and is silent."""

import argparse
import json

import pytest

from pivot.experiments import whatif, whatif_candidates, whatif_command, whatif_figures, whatif_findings
from pivot.findings import Severity

DEPTH = 8
PROMPTS = ["p1", "p2", "p3", "p4"]


def candidate(name, layers, length, repair=None, *, first=0.8, spread=0.02):
    """Predicted accept length; by prompt it lies `spread` around."""
    sequences = []
    for index, _ in enumerate(PROMPTS):
        value = length + spread * (1 if index % 2 else -1)
        sequences.append(
            {"length": value, "reached": [100, 60], "passed": [round(first * 100), 30], "verifications": 40}
        )
    return {
        "name": name,
        "layers": layers,
        "repair": repair or {},
        "length": length,
        "per_position": [first, 0.5],
        "sequences": sequences,
    }


def evaluation(*rows, parts=None):
    return {"sequences": PROMPTS, "candidates": list(rows), "parts": parts or {}, "left_out": [], "notes": []}


def asked(length, *, spread=0.02, count=4):
    prompts = [
        {"id": name, "accept_length": length + spread * (1 if index % 2 else -1)}
        for index, name in enumerate(PROMPTS[:count])
    ]
    return {"accept_length": length, "per_position": [0.8], "prompts": prompts}


RIGHT = [3, 5, 7]


def judge(*rows, served=2.9, layers=RIGHT, contract=RIGHT, parts=None, **more):
    made = asked(served) if isinstance(served, float) else served
    return whatif.judge(
        whatif_figures.Question(
            subject="h",
            evaluation=evaluation(*rows, parts=parts),
            asked=made,
            served=layers,
            contract=contract,
            **more,
        )
    )


def codes(judgement):
    return [finding.code for finding in judgement.findings]


GOOD = candidate("served, contract", RIGHT, 2.9)
WORSE = candidate("contract -1", [2, 4, 6], 2.6)
DEFAULT = candidate("the engine's default", [2, 4, 5], 2.5)


def test_a_good_drafter_with_the_right_layers_gives_no_alarm():
    judgement = judge(GOOD, WORSE, DEFAULT, candidate("rope theta 1e+06", RIGHT, 2.95, {"rope": {"theta": 1e6}}))
    assert codes(judgement) == []
    assert judgement.reference.layers == (3, 5, 7)


# --- what is evaluated


def test_all_wirings_that_people_get_wrong_are_evaluated_once():
    found = whatif_candidates.wirings(8, 3, served=[2, 4, 5], contract=[3, 5, 7], others={"the sample": [1, 3, 5]})
    assert found[(3, 5, 7)] == "contract"
    assert found[(2, 4, 5)] == "served, the engine's default"
    assert found[(2, 4, 6)] == "contract -1"
    assert found[(4, 6, 8)] == "contract +1"
    assert found[(1, 3, 4)] == "served -1"
    assert found[(0, 3, 5)] == "embedding first"
    assert found[(5, 7, 3)] == "order 1 2 0"
    assert found[(1, 3, 5)] == "the sample"
    assert found[(5, 6, 7)] == "the last layers"
    assert found[(3, 5, 6)] == "served +1, slice 2 -1"
    assert all(0 <= layer <= 8 for layers in found for layer in layers)


def test_without_a_contract_the_neighbours_of_the_default_are_tried():
    assert whatif_candidates.wirings(61, 3)[(1, 29, 57)] == "default -1"


def test_repairs_are_tried_at_the_wiring_that_counts_as_right():
    found = whatif_candidates.candidates(8, 3, served=[2, 4, 5], contract=[3, 5, 7])
    assert {tuple(one["layers"]) for one in found if "repair" in one} == {(3, 5, 7)}
    names = [one["name"] for one in found]
    assert len(set(names)) == len(names)
    assert {"fc block 1 x 0.25", "d2t from t2d", "the target's head", "without mlp"} <= set(names)


def test_a_drafter_of_two_states_has_no_default():
    found = whatif_candidates.wirings(8, 2, contract=[3, 5])
    assert "the engine's default" not in ", ".join(found.values())
    assert {len(layers) for layers in found} == {2}


def test_a_contract_that_fc_cannot_take_is_passed_over():
    found = whatif_candidates.candidates(8, 2, served=[3, 5], contract=[3, 5, 7])
    assert {tuple(one["layers"]) for one in found if "repair" in one} == {(3, 5)}


# --- serving


def test_served_far_below_the_prediction_is_the_fault_of_serving():
    judgement = judge(GOOD, WORSE, served=1.1)
    assert codes(judgement) == ["WHATIF-SERVED-LESS"]
    assert "served is 1.10, far below the 2.90 predicted for the layers that reach fc (3, 5, 7)" in (
        judgement.findings[0].message
    )
    assert "no flag of the launch explains it" in judgement.findings[0].fix


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        ({"speculative-algorithm": "EAGLE"}, {}, "write speculative-algorithm: EAGLE3"),
        ({"speculative_algorithm": "EAGLE"}, {}, "write speculative-algorithm: EAGLE3"),
        ({}, {"SGLANG_SIMULATE_ACC_LEN": "1"}, "remove it: its figures mean nothing"),
        ({"--speculative-draft-window-size": 64}, {}, "serve once without speculative-draft-window-size"),
        ({"kv-cache-dtype": "fp8_e4m3"}, {}, "serve once with kv-cache-dtype: auto"),
    ],
)
def test_the_setting_that_makes_serving_lose_is_named(flags, environment, words):
    judgement = judge(GOOD, served=1.1, flags=flags, environment=environment)
    assert words in judgement.findings[0].fix


def test_settings_of_a_good_launch_are_not_blamed():
    flags = {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-quantization": "unquant",
        "kv-cache-dtype": "auto",
    }
    assert list(whatif_findings.launch_reasons(flags, {"SGLANG_SIMULATE_ACC_LEN": "-1"}, below=True)) == []


def test_what_would_lose_as_much_is_said():
    moved = candidate("slice 1 from the position before", RIGHT, 2.25, {"shift": [0, 1, 0]})
    judgement = judge(GOOD, moved, served=2.24)
    assert "as much as with slice 1 from the position before" in judgement.findings[0].message


def test_served_above_the_prediction_is_made_up():
    judgement = judge(GOOD, served=3.6, environment={"SGLANG_SIMULATE_ACC_LEN": "3.6"})
    assert codes(judgement) == ["WHATIF-SERVED-MORE"]
    flags = {"speculative-accept-threshold-single": 0.5}
    assert "accepts drafts that the target would not choose" in judge(GOOD, served=3.6, flags=flags).findings[0].message


def test_a_tree_may_accept_more_than_a_chain_or_less_where_it_is_wide():
    tree = {**GOOD, "at_most": 3.4}
    assert codes(judge(tree, served=3.3)) == []
    assert codes(judge(tree, served=2.0)) == []
    assert codes(judge(tree, served=3.8)) == ["WHATIF-SERVED-MORE"]
    assert codes(judge(tree, served=1.5)) == ["WHATIF-SERVED-LESS"]


def test_what_lies_within_the_evaluators_accuracy_or_the_spread_is_not_said():
    assert codes(judge(GOOD, served=2.8)) == []
    noisy = asked(2.5, spread=0.9)
    assert codes(judge(GOOD, served=noisy)) == []


def test_prompts_that_were_not_evaluated_are_left_out_of_the_comparison():
    record = asked(2.9)
    record["prompts"].append({"id": "p5", "accept_length": 1.0})
    assert codes(judge(GOOD, served={**record, "accept_length": 2.4})) == []
    record = asked(1.2)
    record["prompts"].append({"id": "p5", "accept_length": 9.0})
    judgement = judge(GOOD, served={**record, "accept_length": 2.9})  # as much as predicted, but not where it was
    assert codes(judgement) == ["WHATIF-SERVED-LESS"]
    assert judgement.findings[0].message.startswith("served is 1.20, far below the 2.90 predicted")


def only(number, row):
    """A candidate that could be evaluated on some of the prompts alone."""
    kept = [one if index < number else {**one, "length": None} for index, one in enumerate(row["sequences"])]
    return {**row, "sequences": kept}


@pytest.mark.parametrize(
    ("row", "count", "words"),
    [
        (GOOD, 1, "one prompt was both"),
        (only(1, GOOD), 4, "one prompt was both"),
        (only(0, GOOD), 4, "no prompt was both"),
    ],
)
def test_one_prompt_proves_nothing(row, count, words):
    judgement = judge(row, served=asked(1.1, count=count))
    assert codes(judgement) == ["WHATIF-FEW"]
    assert judgement.findings[0].severity is Severity.WARNING
    assert judgement.findings[0].message.startswith(words)
    assert not judgement.tells
    assert judge(GOOD).tells


def test_unknown_slices_are_compared_with_the_contract():
    judgement = judge(GOOD, WORSE, served=2.2, layers=[3, None, 7])
    assert "predicted for the layers that should reach fc (3, 5, 7)" in judgement.findings[0].message


# --- the choice of layers


def test_wrong_layers_are_shown_with_what_they_cost():
    judgement = judge(
        candidate("contract", RIGHT, 2.9), candidate("served", [2, 4, 5], 2.5), served=2.5, layers=[2, 4, 5]
    )
    assert codes(judgement) == ["WHATIF-LAYERS"]
    assert "2.90 is predicted with the inputs of layers 3, 5, 7, 2.50 with those that reach fc (2, 4, 5)" in (
        judgement.findings[0].message
    )


def test_without_a_contract_the_better_layers_are_found():
    rows = candidate("served", [2, 4, 5], 2.5), candidate("slice 2 +2", RIGHT, 2.9)
    assert codes(judge(*rows, served=2.5, layers=[2, 4, 5], contract=None)) == ["WHATIF-LAYERS"]


def test_a_contract_that_is_wrong_itself_is_doubted():
    judgement = judge(
        candidate("served, contract", [2, 4, 5], 2.5),
        candidate("x", RIGHT, 2.9),
        served=2.5,
        layers=[2, 4, 5],
        contract=[2, 4, 5],
    )
    assert codes(judgement) == ["WHATIF-CONTRACT"]


# --- the drafter


def repaired(name, repair, length=2.9):
    return candidate(name, RIGHT, length, repair)


POOR = candidate("served, contract", RIGHT, 1.4, first=0.3)


@pytest.mark.parametrize(
    ("row", "code", "words"),
    [
        (candidate("order 1 2 0", [5, 7, 3], 2.9), "WHATIF-FC-ORDER", "in the order [1, 2, 0] of the layers"),
        (repaired("fc block 0 x 0.25", {"fc_scale": [0.25, 1, 1]}), "WHATIF-FC-SCALE", "norms of its blocks: [6.31"),
        (repaired("the target's head", {"head": "target"}), "WHATIF-HEAD", "same tokens: 0.02"),
        (repaired("d2t from t2d", {"d2t": "t2d"}), "WHATIF-D2T", "does not lead to the tokens"),
        (repaired("rope theta 10000", {"rope": {"theta": 1e4}}), "WHATIF-ROPE", "theta 10)"),
        (repaired("norm.weight of ones", {"ones": ["norm.weight"]}), "WHATIF-NORM", "norm.weight does more harm"),
        (repaired("next step fed normed", {"norm_output": True}), "WHATIF-NORM", "from one draft step to the next"),
        (repaired("without mlp", {"off": ["mlp"]}), "WHATIF-PART", "the drafter's MLP"),
    ],
)
def test_the_repair_that_gains_most_names_the_part(row, code, words):
    parts = {"fc": {"blocks": [6.31, 5.2, 5.1]}, "head": {"cosine": 0.02}, "rope": {"theta": 10.0}}
    judgement = judge(POOR, repaired("fc x 2", {"fc_scale": [2, 2, 2]}, 1.7), row, served=1.4, parts=parts)
    assert codes(judgement) == [code]
    assert words in judgement.findings[0].message
    assert "less with fc x 2 1.70" in judgement.findings[0].message


def test_order_explains_more_than_other_layers_do():
    rows = candidate("order 1 2 0", [5, 7, 3], 2.9), candidate("the last layers", [5, 6, 7], 1.9)
    assert codes(judge(POOR, *rows, served=1.4)) == ["WHATIF-FC-ORDER"]


def test_layers_that_only_make_up_for_a_part_are_not_doubted():
    rows = repaired("fc block 0 x 0.25", {"fc_scale": [0.25, 1, 1]}), candidate("slice 0 -1", [2, 5, 7], 1.8)
    assert codes(judge(POOR, *rows, served=1.4)) == ["WHATIF-FC-SCALE"]


def test_a_proof_is_not_outweighed_by_layers_that_make_up_for_it():
    parts = {"fc": {"blocks": [6.3, 0.0, 5.1]}}
    assert codes(judge(POOR, candidate("x", [2, 4, 6], 1.8), served=1.4, parts=parts)) == ["WHATIF-FC-ZERO"]


def test_layers_that_explain_more_leave_no_stranger():
    assert codes(judge(POOR, candidate("x", [2, 4, 6], 2.9), served=1.4)) == ["WHATIF-CONTRACT"]


@pytest.mark.parametrize(
    ("parts", "code", "words"),
    [
        ({"fc": {"blocks": [6.3, 0.0, 5.1]}}, "WHATIF-FC-ZERO", "block 1 of fc.weight is zero"),
        ({"zero": ["norm.weight"]}, "WHATIF-ZERO", "norm.weight of the drafter is all zero"),
        ({"not_finite": ["lm_head.weight"]}, "WHATIF-ZERO", "not finite"),
        (
            {"d2t": {"present": True, "zero": True, "rows": 512, "vocabulary": 1024, "agrees_with_t2d": False}},
            "WHATIF-D2T",
            "only the first 512 tokens can be drafted",
        ),
        ({"d2t": {"present": False, "rows": 512, "vocabulary": 1024}}, "WHATIF-D2T", "d2t is missing"),
        ({"d2t": {"present": True, "outside": 9, "rows": 512, "vocabulary": 1024}}, "WHATIF-D2T", "leads 9 draft ids"),
    ],
)
def test_what_a_part_shows_by_itself(parts, code, words):
    judgement = judge(POOR, served=1.4, parts=parts)
    assert codes(judgement) == [code]
    assert words in judgement.findings[0].message


@pytest.mark.parametrize(
    "parts",
    [
        {"zero": ["fc.bias"]},  # a bias may be
        {"d2t": {"present": True, "zero": True, "rows": 1024, "vocabulary": 1024}},  # the whole vocabulary
        {"d2t": {"present": False, "rows": 1024, "vocabulary": 1024}},
        # the first tokens may be the drafter's vocabulary: it predicts well
        {"d2t": {"present": True, "zero": True, "rows": 512, "vocabulary": 1024, "agrees_with_t2d": None}},
    ],
)
def test_what_only_looks_wrong_in_a_part(parts):
    assert codes(judge(GOOD, parts=parts)) == []


def test_a_proof_says_what_its_repair_would_gain():
    parts = {"d2t": {"present": True, "zero": True, "rows": 512, "vocabulary": 1024, "agrees_with_t2d": False}}
    judgement = judge(POOR, repaired("d2t from t2d", {"d2t": "t2d"}), served=1.4, parts=parts)
    assert codes(judgement) == ["WHATIF-D2T"]
    assert judgement.findings[0].message == (
        "d2t is all zero, so that only the first 512 tokens can be drafted; 2.90 is predicted with d2t from t2d, "
        "1.40 with the drafter as it is"
    )


def test_a_drafter_that_nothing_helps_is_a_stranger():
    control = candidate("states of other positions", RIGHT, 1.1, {"shuffle": True})
    parts = {"head": {"cosine": 0.1}, "embedding": {"distance": 1.3}}
    judgement = judge(POOR, control, served=1.4, parts=parts)
    assert codes(judgement) == ["WHATIF-TARGET"]
    message = judgement.findings[0].message
    assert "predicts more than 1.40 (30% of first drafts are right)" in message
    assert "with states of other positions it would be 1.10" in message
    assert "0.10 the target's way" in message
    assert "1.3 away from the target's" in message


def test_a_drafter_that_does_not_notice_its_neighbours_is_a_stranger():
    weak = candidate("served, contract", RIGHT, 1.6, first=0.5)  # fewer than one of two drafts in three
    blind = candidate("contract -1", [2, 4, 6], 1.65), candidate("contract +1", [4, 6, 8], 1.6)
    assert codes(judge(weak, *blind, served=1.6)) == ["WHATIF-TARGET"]
    seeing = candidate("contract -1", [2, 4, 6], 1.4), candidate("contract +1", [4, 6, 8], 1.3)
    assert codes(judge(weak, *seeing, served=1.6)) == []
    strong = candidate("served, contract", RIGHT, 1.8, first=0.6)
    assert codes(judge(strong, candidate("contract -1", [2, 4, 6], 1.8), served=1.8)) == []


def test_neighbouring_thetas_are_no_fault():
    good = candidate("served, contract", RIGHT, 2.7)
    assert codes(judge(good, repaired("rope theta 50000", {"rope": {"theta": 5e4}}, 2.95), served=2.7)) == []
    assert codes(judge(good, repaired("rope theta 50000", {"rope": {"theta": 5e4}}, 3.05), served=2.7)) == [
        "WHATIF-ROPE"
    ]


def test_what_is_expected_at_least_counts_as_little_too():
    fair = candidate("served, contract", RIGHT, 2.2, first=0.7)
    assert codes(judge(fair, served=2.2)) == []
    assert codes(judge(fair, served=2.2, least=2.6)) == ["WHATIF-TARGET"]


# --- the table, and the command


def test_the_table_has_the_served_row_and_the_best_first():
    lines = judge(WORSE, GOOD).text().splitlines()
    assert lines[1].split()[:2] == ["2.90", "0.80"]
    assert lines[1].endswith("SERVED")
    assert lines[2].endswith("served, contract")


def test_a_long_table_is_cut_but_keeps_what_counts():
    many = [candidate(f"x{number}", [0, 1, number], 3.0 + number / 10) for number in range(2, 8)]
    lines = judge(*many, GOOD).text(most=3).splitlines()
    assert [line.split()[-1] for line in lines[2:5]] == ["x7", "x6", "x5"]
    assert lines[5].endswith("served, contract")
    assert lines[6] == "… and 3 more"


def test_the_answer_is_plain_values():
    data = json.loads(json.dumps(judge(GOOD, WORSE).as_dict()))
    assert data["reference"] == data["base"] == "served, contract"
    assert data["rows"][1]["layers"] == [2, 4, 6]


def test_the_evaluator_is_asked_for_what_was_replayed():
    record = {
        "server": {"speculative_num_steps": 5, "speculative_eagle_topk": 2},
        "prompts": [
            {"id": "a", "rid": "pivot-replay-a", "prompt_tokens": 3, "output_ids": [1, 2], "replayed": True},
            {"id": "b", "rid": "pivot-replay-b", "prompt_tokens": 3, "output_ids": [1, 2], "replayed": False},
        ],
    }
    made = whatif_command.question_for(tensors=["/t"], drafter="/d", target=None, asked=record, candidates=[])
    assert (made["steps"], made["topk"]) == (5, 2)
    assert made["sequences"] == [{"id": "a", "rid": "pivot-replay-a", "prompt_tokens": 3, "tokens": 5}]


def test_layers_on_the_command_line():
    assert whatif_command.layers_of("3,5,7") == [3, 5, 7]
    with pytest.raises(argparse.ArgumentTypeError, match="no list of layers"):
        whatif_command.layers_of("3;5")


def test_an_evaluator_that_cannot_run_is_one_sentence(tmp_path, capsys):
    record = tmp_path / "asked.json"
    record.write_text(json.dumps({"prompts": []}))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no torch' >&2\nexit 1\n")
    python.chmod(0o755)
    line = ["--python", str(python), "--tensors", "t", "--asked", str(record), "--drafter", "d", "--depth", "8"]
    assert whatif_command.main(line) == 2
    assert capsys.readouterr().err == f"pivot whatif: {python} could not run the evaluator: no torch\n"
    assert whatif_command.main([*line[:4], "--asked", str(tmp_path / "none"), *line[6:]]) == 2
    assert "No such file" in capsys.readouterr().err
