"""A training sample against what is served: on the evaluator's answers about real samples of the lab's target.

tests/unit/data/training holds what the evaluator said (do: match sample) about samples that capture.py made with
transformers: `right` (SpecForge's names, bfloat16, the inputs of 3, 5, 7), `other` ([2, 4, 6], odd names and packing),
`shifted` (by one token), `stranger` (random numbers), `all` (every layer).
"""

import json
from pathlib import Path

import pytest

from pivot.experiments import training
from pivot.findings import Severity

DATA = Path(__file__).parent / "data/training"
RULE = "plus_one_if_first_is_1"


def matched(name):
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def compare(name, served=(3, 5, 7), **more):
    return training.compare("lab", matched(name), served, **{"rule": RULE, **more})


def codes(comparison):
    return [finding.code for finding in comparison.findings]


def test_a_sample_of_what_is_served_agrees():
    comparison = compare("right", contract=[3, 5, 7])
    assert codes(comparison) == []
    assert comparison.trained == (3, 5, 7)
    assert comparison.headline == ("lab: training used the inputs of layers 3, 5, 7, serving feeds 3, 5, 7: the same")
    lines = comparison.text().splitlines()
    assert lines[0].split("  ")[0] == "stored in the sample"
    assert lines[1].startswith("hidden_state          behind the last layer, after the final norm")
    assert lines[2].startswith("aux_hidden_state[0]   input of layer 3 (output of layer 2)")
    assert lines[2].endswith("slice 0: input of layer 3 (output of layer 2)")


def test_a_sample_of_other_layers_is_found_out_and_the_ids_are_said():
    comparison = compare("other")
    assert codes(comparison) == ["TRAINING-LAYERS"]
    finding = comparison.findings[0]
    assert finding.message == "training used the inputs of layers 2, 4, 6, serving feeds those of 3, 5, 7"
    assert finding.fix == "write sglang_server_eagle_layer_ids: [2, 4, 6], and restart"
    assert comparison.headline.endswith("DIFFERENT")


@pytest.mark.parametrize(
    ("rule", "fix"),
    [
        ("always_plus_one", "write sglang_server_eagle_layer_ids: [1, 3, 5], and restart"),
        ("rule of tomorrow", "make the engine keep the inputs of layers 2, 4, 6"),
        (None, "make the engine keep the inputs of layers 2, 4, 6"),
    ],
)
def test_the_ids_are_those_of_the_engine(rule, fix):
    assert compare("other", rule=rule).findings[0].fix == fix


def test_a_slice_that_is_no_layer_is_not_the_same():
    assert codes(compare("right", served=(3, None, 7))) == ["TRAINING-LAYERS"]
    assert "serving feeds those of 3, ?, 7" in compare("right", served=(3, None, 7)).findings[0].message


def test_the_same_layers_in_another_order_are_another_fault():
    comparison = compare("right", served=(5, 7, 3))
    assert codes(comparison) == ["TRAINING-ORDER"]
    assert "training packed the inputs of layers 3, 5, 7 in this order, serving packs 5, 7, 3" in (
        comparison.findings[0].message
    )


def test_a_contract_that_says_something_else_is_doubted():
    comparison = compare("other", served=(2, 4, 6), contract=[3, 5, 7])
    assert codes(comparison) == ["TRAINING-CONTRACT"]
    assert comparison.findings[0].severity is Severity.WARNING


def test_states_of_another_target_are_nobodys():
    comparison = compare("stranger")
    assert codes(comparison) == ["TRAINING-UNKNOWN"]
    assert comparison.trained is None
    assert "3 of 3 stored states are no layer's state of the served target" in comparison.findings[0].message
    assert "cannot be told" in comparison.headline
    assert "no state of this target (nearest: " in comparison.text()


def test_a_sample_of_all_layers_does_not_say_which_were_used():
    comparison = compare("all")
    assert codes(comparison) == ["TRAINING-UNDECIDED"]
    assert [one.layer for one in comparison.stored] == list(range(9))


def test_states_that_stand_a_token_late_are_recognised():
    comparison = compare("shifted")
    assert [(finding.code, finding.severity) for finding in comparison.findings] == [("TRAINING-SHIFT", Severity.INFO)]
    assert comparison.trained == (3, 5, 7)
    early = matched("shifted")
    for piece in early["tensors"][0]["pieces"]:
        piece["shift"] = -1
    found = training.compare("lab", early, (3, 5, 7)).findings
    assert [(finding.code, finding.severity) for finding in found] == [("TRAINING-SHIFT", Severity.WARNING)]


def test_what_a_sample_suggests_is_a_wiring_to_evaluate():
    assert training.suggested(matched("other"), 3) == [2, 4, 6]
    assert training.suggested(matched("all"), 3) is None
    assert training.suggested(matched("stranger"), 3) is None


def piece(layer, **more):
    values = {"index": 0, "layer": layer, "normed": False, "distance": 0.001, "second": 1, "second_distance": 0.3}
    return {**values, "shift": 0, **more}


def of_tensors(*pieces):
    return {
        "layers": 8,
        "rows": 9,
        "tensors": [
            {"name": f"t{n}", "shape": [9, 4], "dtype": "bfloat16", "pieces": [one]} for n, one in enumerate(pieces)
        ],
    }


def test_tensors_of_one_state_each_are_taken_without_what_is_to_be_predicted():
    last = piece(8, normed=True)
    assert training.compare("lab", of_tensors(last, piece(3), piece(5), piece(7)), (3, 5, 7)).trained == (3, 5, 7)
    assert training.compare("lab", of_tensors(piece(3), piece(5), piece(8)), (3, 5, 7)).trained == (3, 5, 8)


def test_tensors_of_one_state_each_have_no_order_by_their_names_but_in_a_list():
    by_name = of_tensors(piece(7), piece(3), piece(5))
    for tensor, name in zip(by_name["tensors"], ("hidden_11", "hidden_3", "hidden_7"), strict=True):
        tensor["name"] = name  # as safetensors sorts them
    comparison = training.compare("lab", by_name, (3, 5, 7))
    assert (comparison.trained, codes(comparison)) == ((3, 5, 7), [])
    assert "hidden_11             input of layer 7 (output of layer 6)" in comparison.text()
    listed = of_tensors(piece(7), piece(3), piece(5))
    for index, tensor in enumerate(listed["tensors"]):
        tensor["name"] = f"states.{index}"
    assert codes(training.compare("lab", listed, (3, 5, 7))) == ["TRAINING-ORDER"]


def packed(name, *pieces):
    numbered = [{**one, "index": index} for index, one in enumerate(pieces)]
    return {"name": name, "shape": [9, 4], "dtype": "bfloat16", "pieces": numbered}


STRANGE = piece(2, distance=0.9, second_distance=1.0)


@pytest.mark.parametrize(
    "tensors",
    [
        [packed("all", piece(3), piece(5), piece(7), piece(8, normed=True))],  # and what is to be predicted
        [packed("all", piece(3), piece(5), piece(7), piece(8))],
        [packed("x", piece(3), piece(5), piece(7)), packed("y", piece(3), piece(5), piece(7))],  # stored twice
        [packed("x", piece(3), piece(5), piece(7)), packed("logits", STRANGE, STRANGE, STRANGE)],
        [packed("x", piece(3), piece(5), piece(7)), packed("noise", STRANGE)],
    ],
)
def test_what_stands_beside_the_states_that_were_used_hides_them_not(tensors):
    comparison = training.compare("lab", {"layers": 8, "rows": 9, "tensors": tensors}, (3, 5, 7))
    assert (comparison.trained, codes(comparison)) == ((3, 5, 7), [])


def test_two_choices_of_which_each_could_have_been_used_are_not_decided():
    tensors = [packed("x", piece(3), piece(5), piece(7)), packed("y", piece(2), piece(4), piece(6))]
    assert codes(training.compare("lab", {"layers": 8, "rows": 9, "tensors": tensors}, (3, 5, 7))) == [
        "TRAINING-UNDECIDED"
    ]


def test_the_next_layer_has_to_be_twice_as_far():
    near = training.compare("lab", of_tensors(piece(3, distance=0.14), piece(5), piece(7)), (3, 5, 7))
    assert codes(near) == []
    far = training.compare("lab", of_tensors(piece(3, distance=0.16), piece(5), piece(7)), (3, 5, 7))
    assert codes(far) == ["TRAINING-UNKNOWN"]


def test_the_answer_is_plain_values_and_printed(capsys):
    answers = [json.loads(json.dumps(compare(name).as_dict())) for name in ("right", "other")]
    assert training.report(answers[:1], as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("the same")
    assert training.report(answers, as_json=False) == 1
    assert "TRAINING-LAYERS" in capsys.readouterr().out
    assert training.report(answers, as_json=True) == 1
    assert [answered["trained"] for answered in json.loads(capsys.readouterr().out)] == [[3, 5, 7], [2, 4, 6]]


def test_a_sample_that_is_not_there_is_one_sentence(capsys):
    assert training.main(["/nowhere/sample.pt"]) == 2
    assert capsys.readouterr().err == "pivot compare-training: /nowhere/sample.pt is no file\n"


@pytest.mark.parametrize(("status", "written"), [(1, False), (0, False)])
def test_a_play_without_an_answer_is_said(tmp_path, monkeypatch, capsys, status, written):
    sample = tmp_path / "s.pt"
    sample.write_bytes(b"x")
    tool = tmp_path / "ansible-playbook"
    tool.write_text(f"#!/bin/sh\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert training.main([str(sample)]) == 2
    assert "ended without an answer" in capsys.readouterr().err


def test_the_play_is_given_the_sample_and_its_answers_are_read(tmp_path, monkeypatch, capsys):
    sample = tmp_path / "s.pt"
    sample.write_bytes(b"x")
    kept = tmp_path / "answer.json"
    kept.write_text(json.dumps(compare("other").as_dict()))
    tool = tmp_path / "ansible-playbook"
    tool.write_text(
        "#!/usr/bin/env python3\nimport json, shutil, sys\n"
        "given = json.loads(sys.argv[sys.argv.index('-e') + 1])\n"
        f"assert given['debug_probes_sample'] == {str(sample)!r}\n"
        "assert sys.argv[-4:] == ['-i', 'inventory/lab', '--limit', 'infer1']\n"
        f"shutil.copy({str(kept)!r}, given['debug_probes_sample_answers'] + '/infer1.json')\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert training.main([str(sample), "-i", "inventory/lab", "-l", "infer1"]) == 1
    assert "training used the inputs of layers 2, 4, 6, serving feeds 3, 5, 7: DIFFERENT" in capsys.readouterr().out
