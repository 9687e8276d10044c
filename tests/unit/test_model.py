"""Which layers reach a drafter, and everything else that its files give away."""

import random

import pytest

from pivot.drafters.layers import default_layers, ids_for, kept_layers
from pivot.drafters.model import check

from .drafter_pairs import (
    ALWAYS,
    FIRST,
    FLAGS,
    HEADER,
    IDS,
    MLA,
    MLA_HEADER,
    NEW,
    OLD,
    case,
    changed,
    contract,
    found,
    lab,
    pair,
    text,
    with_ids,
)

# --- which ids become which layers


@pytest.mark.parametrize(
    ("ids", "rule", "layers"),
    [
        ([2, 30, 58], ALWAYS, (3, 31, 59)),
        ([1, 29, 57], ALWAYS, (2, 30, 58)),
        ([2, 30, 58], FIRST, (2, 30, 58)),
        ([1, 29, 57], FIRST, (2, 30, 58)),
        ([57, 29, 1], FIRST, (57, 29, 1)),
        ([1], FIRST, (2,)),
        ([-1, 3], ALWAYS, (0, 4)),
    ],
)
def test_ids_become_layers_by_the_rule(ids, rule, layers):
    assert kept_layers(ids, rule) == layers


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="not known"):
        kept_layers([1], "plus_two")


@pytest.mark.parametrize(
    ("layers", "rule", "ids"),
    [
        ([2, 30, 58], ALWAYS, (1, 29, 57)),
        ([3, 31, 59], FIRST, (3, 31, 59)),
        ([2, 30, 58], FIRST, (2, 30, 58)),
        ([1, 30, 58], FIRST, (30, 1, 58)),  # as written, the first would shift all of them
        ([1, 4], FIRST, (4, 1)),
        ([2], FIRST, (2,)),
        ([1], FIRST, None),  # [1] means 2 and [0] means 0
        ([0, 30, 58], FIRST, (0, 30, 58)),
        ([0, 30, 58], ALWAYS, None),
    ],
)
def test_the_ids_to_write_are_those_that_the_rule_turns_back(layers, rule, ids):
    assert ids_for(layers, rule) == ids
    if ids is not None:
        assert sorted(kept_layers(ids, rule)) == layers


def test_the_ids_to_write_are_right_for_any_layers():
    rng = random.Random(4)  # noqa: S311 - a test that is the same in every run
    for _ in range(500):
        layers = sorted(rng.sample(range(rng.choice([8, 61])), rng.choice([2, 3, 5])))
        for rule in (ALWAYS, FIRST):
            ids = ids_for(layers, rule)
            assert (ids is None) == (rule == ALWAYS and layers[0] == 0)
            assert ids is None or sorted(kept_layers(ids, rule)) == layers


def test_the_default():
    assert default_layers(61) == (2, 30, 58)
    assert default_layers(8) == (2, 4, 5)


# --- the field's cases

B01 = {  # ids, findings on an old SGLang, findings on a new one
    "a": (None, [], []),
    "b": ([2, 30, 58], [("SHIFTED", "warning")], []),
    "c": ([1, 29, 57], [], [("FIRST-IS-1", "info")]),
    "d": ([2, 30, 60], [("RANGE", "error")], []),
    "e": ([2, 30, 61], [("RANGE", "error")], [("RANGE", "error")]),
    "f": (
        [0, 29, 57],
        [("SHIFTED", "warning"), ("MIXED", "warning")],
        [("EMBEDDING", "warning"), ("MIXED", "warning")],
    ),
    "g": (
        [1, 30, 58],
        [("SHIFTED", "warning"), ("MIXED", "warning")],
        [("FIRST-IS-1", "warning"), ("MIXED", "warning")],
    ),
    "h": ([2, 30], [("COUNT", "error"), ("SHIFTED", "warning")], [("COUNT", "error")]),
    "j": ([57, 29, 1], [("ORDER", "warning")], [("ORDER", "warning")]),
}
EFFECTIVE = {
    "a": ((2, 30, 58), (2, 30, 58)),
    "b": ((3, 31, 59), (2, 30, 58)),
    "c": ((2, 30, 58), (2, 30, 58)),
    "d": ((3, 31, 61), (2, 30, 60)),
    "e": ((3, 31, 62), (2, 30, 61)),
    "f": ((1, 30, 58), (0, 29, 57)),
    "g": ((2, 31, 59), (2, 31, 59)),
    "h": ((3, 31), (2, 30)),
    "j": ((2, 30, 58), (1, 29, 57)),
}


@pytest.mark.parametrize("name", B01)
def test_b01_ids(name):
    ids, old, new = B01[name]
    for version, expected, layers in ((OLD, old, EFFECTIVE[name][0]), (NEW, new, EFFECTIVE[name][1])):
        given = pair(version, drafter=with_ids(ids))
        assert found(given) == expected, version
        assert check(given).layers == layers
    # the same ids from the deployment instead of the drafter's own config
    if ids is not None:
        assert found(pair(NEW, layer_ids=ids)) == new


def test_b01_a_says_that_the_default_is_used():
    assert check(pair(drafter=with_ids(None))).line == (
        "no ids on 0.5.23 → its default, inputs of layers 2, 30, 58 (outputs of 1, 29, 57); no contract to compare with"
    )


def test_b01_b_suggests_the_ids_and_fails_by_the_contract():
    given = pair(OLD)
    assert "inputs of layers 3, 31, 59" in check(given).line
    assert "write [1, 29, 57]" in text(given)
    recorded = pair(OLD, contract=contract([2, 30, 58], "input"))
    assert found(recorded) == [("LAYERS", "error")]
    assert "sglang_server_eagle_layer_ids: [1, 29, 57]" in text(recorded)
    assert found(pair(OLD, contract=contract([2, 30, 58], "output"))) == []
    assert found(pair(NEW, contract=contract([2, 30, 58], "input"))) == []


def test_b01_d_counts_the_states_that_are_left():
    given = pair(OLD, drafter=with_ids([2, 30, 60]))
    assert "inputs of layer" not in text(given)
    assert "layers 0 to 60: only 2 of 3 states reach fc" in text(given)


def test_b01_i_two_findings():
    given = pair(drafter=case("B01i-drafter-toplevel-ids.json"))
    assert found(given) == [("KEY", "error"), ("CONTEXT", "error")]
    assert "[4, 20, 40] would be ignored and the default 2, 30, 58 used" in text(given)
    assert "reaches 2048 tokens" in text(given)


def test_b01_k_six_findings_at_once():
    drafter = case("B01k-drafter-mla-bad.json")
    six = {"NUM-LAYERS", "Q-LORA", "HIDDEN", "NO-AUX", "QUANTISED", "NORMS"}
    assert sorted(found(pair(OLD, drafter=drafter))) == sorted((code, "error") for code in six)
    # a newer SGLang reads fc_norm and norm_output
    assert sorted(found(pair(NEW, drafter=drafter))) == sorted((code, "error") for code in six - {"NORMS"})


def test_b01_l_two_findings():
    given = pair(tensors=case("B01l-safetensors-header.json"))
    assert found(given) == [("FC", "error"), ("D2T", "error")]
    assert "fc takes 14336 (2 x 7168), but 3 ids give 21504" in text(given)
    assert "32000 of 163840" in text(given)


# --- the line


@pytest.mark.parametrize(
    ("version", "ids", "agreed", "line"),
    [
        (
            NEW,
            [2, 30, 58],
            contract([2, 30, 58], "output"),
            "ids [2, 30, 58] on 0.5.23 → inputs of layers 2, 30, 58 (outputs of 1, 29, 57); "
            "contract: outputs of 2, 30, 58; DISAGREES; write [3, 31, 59]",
        ),
        (
            NEW,
            [3, 31, 59],
            contract([2, 30, 58], "output"),
            "ids [3, 31, 59] on 0.5.23 → inputs of layers 3, 31, 59 (outputs of 2, 30, 58); "
            "contract: outputs of 2, 30, 58; agrees",
        ),
        (
            NEW,
            [1, 29, 57],
            contract([2, 30, 58], "input"),
            "ids [1, 29, 57] on 0.5.23 → all raised by 1, as the first is 1: inputs of layers 2, 30, 58 "
            "(outputs of 1, 29, 57); contract: inputs of 2, 30, 58; agrees",
        ),
        (
            NEW,
            [1, 29, 57],
            contract([1, 29, 57], "input"),
            "ids [1, 29, 57] on 0.5.23 → all raised by 1, as the first is 1: inputs of layers 2, 30, 58 "
            "(outputs of 1, 29, 57); contract: inputs of 1, 29, 57; DISAGREES; write [29, 1, 57]",
        ),
        (
            NEW,
            [2, 30, 58],
            contract([2, 30, 58], None),
            "ids [2, 30, 58] on 0.5.23 → inputs of layers 2, 30, 58 (outputs of 1, 29, 57); "
            "contract: layers 2, 30, 58, of inputs or outputs not known; not compared",
        ),
        (
            OLD,
            [2, 30, 58],
            contract([-1, 29, 57], "output"),
            "ids [2, 30, 58] on 0.5.12 → inputs of layers 3, 31, 59 (outputs of 2, 30, 58); "
            "contract: outputs of -1, 29, 57; DISAGREES; SGLang 0.5.12 cannot keep the embedding",
        ),
        (
            "0.5.7",
            [2, 30, 58],
            contract([2, 30, 58], "input"),
            "ids [2, 30, 58] on 0.5.7 → layers not known; contract: inputs of 2, 30, 58; not compared",
        ),
    ],
)
def test_the_line_for_people(version, ids, agreed, line):
    assert check(pair(version, layer_ids=ids, contract=agreed)).line == line


def test_the_line_when_no_state_is_kept():
    off = with_ids([2, 30, 58])
    off["eagle_config"]["use_aux_hidden_state"] = False
    assert "no states reach the drafter, as use_aux_hidden_state is False" in check(pair(drafter=off)).line
    eagle = {**FLAGS, "speculative-algorithm": "EAGLE"}
    assert "no states reach the drafter, as speculative-algorithm is 'EAGLE'" in check(pair(flags=eagle)).line


def test_what_a_header_cannot_show_is_said():
    assert any("values of d2t cannot be seen" in note for note in check(pair(tensors=HEADER)).notes)
    assert not any("d2t" in note for note in check(pair()).notes)
    assert not any("d2t" in note for note in check(lab()).notes)


# --- right configurations have no findings


def test_the_lab_is_clean():
    assert found(lab()) == []
    assert check(lab()).line == (
        "ids [3, 5, 7] on 0.5.23 → inputs of layers 3, 5, 7 (outputs of 2, 4, 6); contract: inputs of 3, 5, 7; agrees"
    )


def test_a_drafter_like_the_public_one_is_clean():
    agreed = contract([2, 30, 58], "input")
    given = pair(tensors=HEADER, contract=agreed, served="moonshotai/Kimi-K2.5", revisions={"a/b": "54383e83fa34"})
    assert found(given) == []
    assert any(note.startswith("rope: theta 1000000.0") for note in check(given).notes)


def test_an_mla_drafter_is_clean():
    agreed = contract([1, 29, 57], "output")
    assert found(pair(NEW, drafter=MLA, tensors=MLA_HEADER, contract=agreed)) == [("FIRST-IS-1", "info")]
    assert found(pair(OLD, drafter=MLA, tensors=MLA_HEADER, contract=agreed)) == []


# --- the lab's planted faults, several at once


@pytest.mark.parametrize(
    ("changes", "expected", "said"),
    [
        ({"layer_ids": [4, 6, 8]}, ["RANGE", "LAYERS"], "sglang_server_eagle_layer_ids: [3, 5, 7]"),
        ({"layer_ids": [2, 4, 6]}, ["LAYERS"], "sglang_server_eagle_layer_ids: [3, 5, 7]"),
        ({"layer_ids": [0, 5, 7]}, ["LAYERS"], "inputs of layers 0, 5, 7"),
        ({"layer_ids": [3, 5]}, ["FC", "LAYERS"], "fc takes 288 (3 x 96), but 2 ids give 192"),
        ({"layer_ids": [3, 5, 8]}, ["RANGE", "LAYERS"], "layers 0 to 7: only 2 of 3"),
        ({"layer_ids": [-1, 5, 7]}, ["RANGE", "LAYERS"], "-1 does not stand for the embedding"),
        ({"layer_ids": [3, 3, 7]}, ["IDS"], "names 3 more than once"),
        ({"flags": {"speculative-algorithm": "EAGLE"}}, ["ALGORITHM"], "write speculative-algorithm: EAGLE3"),
        ({"served": "pivot-lab/another"}, ["TARGET"], "pivot-lab/another is served"),
        ({"revisions": {"pivot-lab/x": "main"}}, ["UNPINNED"], "revision of pivot-lab/x is 'main'"),
    ],
)
def test_planted_faults_in_the_lab(changes, expected, said):
    assert [code for code, _ in found(lab(**changes))] == expected
    assert said in text(lab(**changes))


@pytest.mark.parametrize("ids", [[5, 3, 7], [7, 5, 3], None])
def test_harmless_look_alikes_in_the_lab(ids):
    assert not any(severity == "error" for _, severity in found(lab(layer_ids=ids)))
    assert check(lab(layer_ids=ids)).layers == (3, 5, 7)


def test_a_first_1_that_shifts_to_the_right_layers_is_explained():
    agreed = {"layers": [2, 4, 6], "convention": "input"}
    given = lab(layer_ids=[1, 3, 5], contract=agreed)
    assert found(given) == [("FIRST-IS-1", "info")]
    assert "raises all by 1, to 2, 4, 6" in text(given)


def test_many_faults_are_one_list():
    drafter = changed(changed(with_ids([2, 30]), "vocab_size", 1000), "max_position_embeddings", 512)
    drafter = changed(drafter, "architectures", ["LlamaForCausalLMEagle9"])
    codes = {code for code, _ in found(pair(drafter=drafter, revisions={"a/b": None}))}
    assert {"COUNT", "VOCAB", "CONTEXT", "ARCHITECTURE", "UNPINNED"} <= codes


# --- the key


@pytest.mark.parametrize(
    ("version", "top", "own", "expected"),
    [
        (NEW, [4, 20, 40], None, [("KEY", "error")]),
        (NEW, [2, 30, 58], None, [("KEY", "warning")]),
        (NEW, [1, 29, 57], None, [("KEY", "warning")]),  # nested, they would be raised to the default
        (OLD, [2, 30, 58], None, [("KEY", "error")]),  # nested, they would be 3, 31, 59
        (OLD, [1, 29, 57], None, [("KEY", "warning")]),
        (NEW, [4, 20, 40], [2, 30, 58], [("KEY", "warning")]),
        (NEW, [2, 30, 58], [2, 30, 58], []),
        (NEW, "4, 20, 40", None, [("IDS", "error")]),
    ],
)
def test_ids_at_the_top_level(version, top, own, expected):
    assert found(pair(version, drafter={**with_ids(own), IDS: top})) == expected


def test_ids_of_the_deployment_make_the_top_level_harmless():
    assert found(pair(drafter={**with_ids(None), IDS: [2, 30, 58]}, layer_ids=[2, 30, 58])) == []
