"""The diagnosis, from wirings and evaluations written by hand: who is the first suspect, and what is said."""

import json

import pytest

from pivot.experiments import experiment, whatif
from pivot.findings import Finding, Severity
from pivot.wirings.wiring import Acceptance, Slice, Tally, Wiring

from .test_whatif import DEFAULT, GOOD, POOR, WORSE, candidate, judge, only, repaired

RIGHT = (3, 5, 7)


def slices(*layers):
    return tuple(
        Slice(index, 9, () if layer is None else ((layer, Tally(exact=9, compared=9)),))
        for index, layer in enumerate(layers)
    )


def wired(*layers, expected=RIGHT, asked=None, findings=(), given=0):
    tally = Tally(exact=9, compared=9)
    return Wiring(
        sglang=("0.5.23",),
        ranks=(0,),
        forwards=9,
        calls=9,
        given=given,
        capture=None,
        asked=asked,
        expected=expected,
        depth=8,
        slices=slices(*layers),
        captured=tally,
        packed=tally,
        fed=tally,
        acceptance=Acceptance((1, 2, 3)),
        findings=tuple(Finding(code, Severity.ERROR, "fc input", "what", "change") for code in findings),
    )


def codes(diagnosis):
    return [finding.code for finding in diagnosis.findings]


def test_nothing_wrong_is_said_with_figures():
    diagnosis = experiment.diagnose("h", wired(*RIGHT), judge(GOOD, WORSE, DEFAULT))
    assert diagnosis.suspect == "none"
    assert diagnosis.headline == "h: nothing is wrong"
    assert codes(diagnosis) == []
    assert diagnosis.lines[0] == (
        "wiring   right: fc receives the inputs of layers 3, 5, 7, on which the drafter was trained"
    )
    assert (
        "served 2.90, predicted 2.90 for the inputs of layers 3, 5, 7: serving gets out of the drafter"
        in (diagnosis.lines[4])
    )
    assert diagnosis.lines[5].startswith("drafter  cleared")


def test_wrong_layers_are_blamed_on_the_configuration_and_their_cost_is_said():
    judgement = judge(
        candidate("contract", list(RIGHT), 2.9), candidate("served", [2, 4, 5], 2.5), served=2.5, layers=[2, 4, 5]
    )
    diagnosis = experiment.diagnose("h", wired(2, 4, 5, asked=(2, 4, 5), findings=["WIRE-IDS"]), judgement)
    assert diagnosis.suspect == "config"
    assert codes(diagnosis) == ["WIRE-IDS", "WHATIF-LAYERS"]
    assert "layers   2.90 is predicted with the inputs of layers 3, 5, 7 (+0.40)" in diagnosis.lines


def test_without_a_contract_the_prediction_finds_the_layers():
    rows = candidate("served", [2, 4, 5], 2.5), candidate("further", list(RIGHT), 2.9)
    judgement = judge(*rows, served=2.5, layers=[2, 4, 5], contract=None)
    diagnosis = experiment.diagnose("h", wired(2, 4, 5, expected=None), judgement)
    assert (diagnosis.suspect, codes(diagnosis)) == ("config", ["WHATIF-LAYERS"])


def test_a_contract_that_is_wrong_itself_is_the_configurations_fault():
    rows = candidate("served, contract", [2, 4, 5], 2.5), candidate("further", list(RIGHT), 2.9)
    judgement = judge(*rows, served=2.5, layers=[2, 4, 5], contract=[2, 4, 5])
    diagnosis = experiment.diagnose("h", wired(2, 4, 5, expected=(2, 4, 5)), judgement)
    assert (diagnosis.suspect, codes(diagnosis)) == ("config", ["WHATIF-CONTRACT"])


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (candidate("order 1 2 0", [5, 7, 3], 2.9), "WHATIF-FC-ORDER"),
        (repaired("d2t from t2d", {"d2t": "t2d"}), "WHATIF-D2T"),
        (repaired("states of other positions", {"shuffle": True}, 1.1), "WHATIF-TARGET"),
    ],
)
def test_faults_of_the_drafter_leave_the_wiring_right(row, code):
    diagnosis = experiment.diagnose("h", wired(*RIGHT), judge(POOR, row, served=1.4))
    assert (diagnosis.suspect, codes(diagnosis)) == ("drafter", [code])
    assert diagnosis.lines[0].startswith("wiring   right")
    assert "serving gets out of the drafter what is in it" in diagnosis.lines[4]
    assert diagnosis.lines[-1] == f"drafter  blamed: {code}"


def test_faults_of_the_engine_come_with_their_proof_first():
    diagnosis = experiment.diagnose(
        "h", wired(3, None, 7, findings=["WIRE-POSITION"]), judge(GOOD, served=2.2, layers=[3, None, 7])
    )
    assert (diagnosis.suspect, codes(diagnosis)) == ("serving", ["WIRE-POSITION", "WHATIF-SERVED-LESS"])
    assert "they disagree, so the fault is in serving" in "\n".join(diagnosis.lines)


def test_an_fc_that_is_not_run_is_serving_and_the_flag_is_named():
    judgement = judge(GOOD, served=1.1, layers=None, flags={"speculative_algorithm": "EAGLE"})
    diagnosis = experiment.diagnose("h", wired(given=9, findings=["WIRE-BYPASSED"]), judgement)
    assert diagnosis.suspect == "serving"
    assert "write speculative-algorithm: EAGLE3" in diagnosis.text()


def test_a_flag_that_the_records_do_not_show_is_found_by_the_prediction():
    judgement = judge(GOOD, served=1.0, environment={"SGLANG_SIMULATE_ACC_LEN": "1"})
    diagnosis = experiment.diagnose("h", wired(*RIGHT), judgement)
    assert (diagnosis.suspect, codes(diagnosis)) == ("serving", ["WHATIF-SERVED-LESS"])


def test_an_oddity_without_an_error_is_no_suspect():
    rounded = Finding("WIRE-ROUNDED", Severity.WARNING, "fc slice 0", "rounded", "")
    seen = wired(None, 5, 7)
    diagnosis = experiment.diagnose(
        "h", experiment.dataclasses.replace(seen, findings=(rounded,)), judge(GOOD, layers=[None, 5, 7])
    )
    assert (diagnosis.suspect, codes(diagnosis)) == ("none", ["WIRE-ROUNDED"])


def test_nothing_recorded_is_no_answer():
    diagnosis = experiment.diagnose("h", wired(findings=["WIRE-NO-FORWARD"]), None)
    assert diagnosis.headline == "h: too little was recorded for an answer (WIRE-NO-FORWARD)"
    assert diagnosis.lines[-1] == "what-if  was not evaluated: the answer ends at the wiring"


def test_nobody_is_cleared_by_what_was_not_evaluated():
    diagnosis = experiment.diagnose("h", wired(*RIGHT), None)
    assert diagnosis.headline == "h: the wiring is not to blame; for more, too little was evaluated"
    judgement = judge(only(1, GOOD), served=1.05)
    diagnosis = experiment.diagnose("h", wired(*RIGHT), judgement)
    assert (diagnosis.suspect, codes(diagnosis)) == ("wired", ["WHATIF-FEW"])
    assert diagnosis.lines[-2].endswith("for the inputs of layers 3, 5, 7: too few prompts to tell")
    assert diagnosis.lines[-1] == "drafter  too few prompts to tell"
    noted = experiment.dataclasses.replace(judgement, notes=("the states of p2 lack position 0",))
    assert "note: the states of p2 lack position 0" in experiment.diagnose("h", wired(*RIGHT), noted).text()


def test_batches_that_are_padded_convict_nobody():
    odd = wired(3, None, 7, findings=["WIRE-UNSTABLE"])
    diagnosis = experiment.diagnose("h", odd, judge(GOOD, layers=[3, None, 7]), padded=True)
    assert (diagnosis.suspect, codes(diagnosis)) == ("unseen", ["WIRE-UNSTABLE", "WIRE-PADDED"])
    assert experiment.diagnose("h", wired(*RIGHT), judge(GOOD, WORSE), padded=True).suspect == "none"


def test_a_wiring_of_prefills_alone_clears_nobody():
    seen = experiment.dataclasses.replace(wired(*RIGHT, findings=["WIRE-BLIND"]), blind=True)
    diagnosis = experiment.diagnose("h", seen, judge(GOOD, WORSE))
    assert diagnosis.headline == "h: too little was recorded for an answer (WIRE-BLIND)"
    assert diagnosis.lines[0] == "wiring   right in every prefill, and verifications were not seen"


def test_the_answer_is_plain_values_and_two_runs_are_compared(tmp_path, capsys):
    judgement = judge(
        candidate("contract", list(RIGHT), 2.9), candidate("served", [2, 4, 5], 2.5), served=2.5, layers=[2, 4, 5]
    )
    wrong = experiment.diagnose("h", wired(2, 4, 5, asked=(2, 4, 5), findings=["WIRE-IDS"]), judgement)
    right = experiment.diagnose("h", wired(*RIGHT), judge(GOOD))
    paths = []
    for name, diagnosis in (("wrong", wrong), ("right", right)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(diagnosis.as_dict()))
        paths.append(str(path))
    assert experiment.main(paths) == 0
    assert capsys.readouterr().out.splitlines() == [
        "h: the choice of layers is wrong (WIRE-IDS)  →  h: nothing is wrong",
        "layers    2, 4, 5  →  3, 5, 7",
        "served    2.50  →  2.90 (+0.40)",
        "predicted 2.50  →  2.90 (+0.40)",
        "gone      WIRE-IDS, WHATIF-LAYERS",
    ]
    assert experiment.main(paths[:1]) == 1
    assert capsys.readouterr().out.startswith("h: the choice of layers is wrong (WIRE-IDS)\nwiring   wrong, as the")
    assert experiment.main([*paths[:1], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["suspect"] == "config"


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "cannot be read as an answer"), ("[]", "holds no answer"), ('{"suspect": "none"}', "is of format None")],
)
def test_a_file_that_holds_no_answer_is_one_sentence(tmp_path, capsys, content, words):
    path = tmp_path / "answer.json"
    path.write_text(content)
    assert experiment.main([str(path)]) == 2
    assert words in capsys.readouterr().err


def test_every_finding_of_the_prediction_belongs_to_a_suspect():
    assert experiment.family(Finding("WHATIF-CONTRACT", Severity.ERROR, "h", "", "")) == "config"
    assert experiment.family(Finding("WHATIF-SERVED-MORE", Severity.ERROR, "h", "", "")) == "serving"
    assert experiment.family(Finding("WHATIF-ROPE", Severity.ERROR, "h", "", "")) == "drafter"
    assert isinstance(judge(GOOD), whatif.Judgement)


def test_the_states_that_fc_takes_are_counted_as_the_engine_does(tmp_path):
    def count(config):
        return experiment.Experiment(subject="h", records=tmp_path, asked={}, config=config).count()

    assert count({}) == 3
    assert count({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 5]}}) == 2
    assert count({"num_aux_hidden_states": 4, "eagle_config": None}) == 4
