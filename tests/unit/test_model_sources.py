"""What a drafter's contract is made of: the engine's description, the contract, files of others, a host's variables."""

import copy
import json
import random
from typing import Any

import pytest
import yaml

from pivot.drafters.model import check
from pivot.drafters.pair import deployed, facts, quantisation, tensors_of
from pivot.drafters.pair_weights import NORMS

from .drafter_pairs import (
    DRAFTER,
    ENGINES,
    FLAGS,
    HEADER,
    IDS,
    MLA,
    NEW,
    OLD,
    ROOT,
    TARGET,
    changed,
    contract,
    found,
    lab,
    pair,
    text,
    with_ids,
)

# --- the engine


def test_a_target_without_a_setter():
    given = pair("0.5.9")
    assert ("TARGET-CLASS", "error") in found(given)
    assert "KimiK25ForConditionalGeneration of SGLang 0.5.9 has no EAGLE-3 setter" in text(given)


def test_a_rule_nobody_verified_is_a_finding_and_no_guess():
    target = {**TARGET["text_config"], "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    given = pair(target=target, contract=contract([2, 30, 58], "input"))
    assert found(given) == [("RULE", "warning")]
    assert check(given).layers is None
    assert check(pair(target=target, drafter=with_ids(None))).layers is None


def test_an_engine_without_a_description():
    assert found(pair("0.5.7")) == [("ENGINE", "warning")]
    assert "pivot engine describe WHEEL" in text(pair("0.5.7"))


def test_kimi_k2_has_to_be_registered():
    deepseek = {**TARGET["text_config"], "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    assert ("MODEL-TYPE", "error") in found(pair("0.5.9", target=deepseek, drafter=MLA))
    assert ("MODEL-TYPE", "error") not in found(pair(OLD, target=deepseek, drafter=MLA))


@pytest.mark.parametrize(
    ("ids", "embedding"), [([0, 30, 58], "0.5.13"), ([-1, 29, 57], "0.5.12"), ([-1, 29, 57], "0.5.9")]
)
def test_the_embedding_ends_older_engines(ids, embedding):
    deepseek = {**TARGET["text_config"], "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    agreed = contract([0, 30, 58], "input")
    codes = found(pair(embedding, target=deepseek, layer_ids=ids, contract=agreed))
    assert ("EMBEDDING", "error") in codes
    assert found(pair(NEW, target=deepseek, layer_ids=[0, 30, 58], contract=agreed)) == []


def test_known_faults_of_versions():
    deepseek = {**TARGET["text_config"], "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    agreed = contract([2, 30, 58], "output")
    given = pair("0.5.9", target=deepseek, contract=agreed)
    assert found(given) == [("ENGINE-FAULT", "error")]
    assert [item.code for item in check(given).findings] == ["DRAFTER-ENGINE-FAULT"]
    assert "captured before the drafter's ids are applied" in text(given)
    eager = {**FLAGS, "disable-cuda-graph": True}
    assert found(pair("0.5.9", target=deepseek, contract=agreed, flags=eager)) == []
    assert found(pair("0.5.9", target=deepseek, drafter=with_ids([1, 29, 57]))) == []


def test_facts_of_a_deployment():
    assert facts(pair()) == {"eagle3", "cuda-graphs", "draft-model-type-llama"}
    assert facts(lab(layer_ids=[3, 5])) == {
        "eagle3",
        "cpu",
        "ids-not-default",
        "ids-not-three",
        "draft-model-type-llama",
    }
    assert "eagle3" not in facts(pair(flags={"speculative-algorithm": "NGRAM"}))


# --- the contract


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", [("CONTRACT", "error")]),
        (contract([2, 30, 58], "both"), [("CONTRACT", "error")]),
        (contract([2, 30, 99], "input"), [("CONTRACT", "error")]),
        (contract([58, 30, 2], "input"), [("CONTRACT", "warning")]),
        (contract("2", "input"), [("IDS", "error")]),  # type: ignore[arg-type]  # what a person may write
        (contract([2, 30, 58], None), []),
        ({}, []),
    ],
)
def test_a_contract_that_cannot_be_used(value, expected):
    assert found(pair(contract=value)) == expected


# --- input that is broken


@pytest.mark.parametrize("value", [None, [], "text", 7, True, [[]]])
def test_what_is_no_config_is_one_sentence(value):
    assert ("CONFIG", "error") in found(pair(target=value))
    assert ("CONFIG", "error") in found(pair(drafter=value))
    assert "not a JSON object" in text(pair(drafter=value))


def test_a_small_target_says_that_the_default_names_a_layer_twice():
    given = pair(target=changed(TARGET, "text_config/num_hidden_layers", 5), drafter=with_ids(None))
    assert ("RANGE", "error") in found(given)


JUNK: list[Any] = [
    None, True, 0, -1, 3, 10**30, 10**5000, -(10**5000), 1.5, float("nan"), float("inf"), "", "1", "x" * 9999,
    "\ud800", [], {}, [None], [[]], {"a": 1}, [1, 2, 3], [10**5000], {"factor": float("nan")}, b"bytes", {1: 2},
    {"shape": [2]},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place within nested mappings and lists."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def test_random_damage_gives_findings_and_no_traceback():
    rng = random.Random(20261129)  # noqa: S311 - the same in every run
    keys = [IDS, "target_hidden_size", "num_aux_hidden_states", "rope_parameters", "quantization_config", *NORMS]
    base = {
        "target": TARGET,
        "drafter": {**DRAFTER, **dict.fromkeys(keys)},
        "tensors": HEADER,
        "layer_ids": [2, 30, 58],
        "contract": contract([2, 30, 58], "input"),
        "revisions": {"a/b": "54383e83fa34"},
    }
    for _ in range(1500):
        given = copy.deepcopy(base)
        if rng.random() < 0.4:
            given["drafter"] = copy.deepcopy(MLA)
        for _ in range(rng.randint(1, 4)):
            *parents, last = rng.choice([place for place in places(given) if place])
            place: Any = given
            for key in parents:
                place = place[key]
            place[last] = copy.deepcopy(rng.choice(JUNK))
        if not isinstance(given["revisions"], dict):
            given["revisions"] = {}
        verdict = check(pair(rng.choice([*ENGINES, "0.5.7", "odd"]), **given))
        assert all(finding.message and finding.fix is not None for finding in verdict.findings)
        assert all(len(finding.message) < 1000 for finding in verdict.findings)
        assert verdict.text()


# --- from the variables of a host


def lab_variables(**changes: Any) -> dict[str, Any]:
    pins = yaml.safe_load((ROOT / "inventory/lab/group_vars/all/pins.yml").read_text())["pivot_pins"]
    server = yaml.safe_load((ROOT / "inventory/lab/group_vars/inference/server.yml").read_text())
    models = [pins["models"]["kimi-k25-tiny"], pins["models"]["kimi-k25-tiny-eagle3"]]
    return {
        "pivot_pins": pins,
        "sglang_engine_version": pins["engines"]["sglang-0.5.23-cpu"]["version"],
        "model_weights_models": models,
        "sglang_server_model_path": f"/models/{models[0]['repository']}/{models[0]['revision']}",
        "sglang_server_drafter_path": f"/models/{models[1]['repository']}/{models[1]['revision']}/",
        "sglang_server_eagle_layer_ids": models[1]["contract"]["layers"],
        "sglang_server_launch": server["sglang_server_launch"],
        "sglang_server_environment": server["sglang_server_environment"],
        **changes,
    }


def read(path: str) -> Any:
    return json.loads((ROOT / "inventory/lab" / path).read_text())


def test_the_labs_variables_describe_a_clean_pair():
    given = deployed("infer1", lab_variables(), read)
    assert given is not None
    assert found(given) == []
    assert check(given).line.endswith("contract: inputs of 3, 5, 7; agrees")
    assert given.served == "pivot-lab/kimi-k25-tiny"


def test_the_config_of_the_deployment_counts():
    without = dict(read("manifests/kimi-k25-tiny-eagle3.json")["config"])
    del without["eagle_config"]
    variables = lab_variables(sglang_server_drafter_config=without, sglang_server_eagle_layer_ids=None)
    given = deployed("infer1", variables, read)
    assert given is not None
    assert found(given) == [("LAYERS", "error")]
    assert "inputs of layers 2, 4, 5" in check(given).line


@pytest.mark.parametrize(
    "changes",
    [
        {"sglang_server_drafter_path": None},
        {"sglang_server_drafter_path": ""},
        {"sglang_server_model_path": "/models/another/1"},
        {"model_weights_models": None},
        {"model_weights_models": [None, 7, {}]},
        {"pivot_pins": None, "sglang_server_drafter_path": "/elsewhere"},
    ],
)
def test_variables_without_a_pair(changes):
    assert deployed("infer1", lab_variables(**changes), read) is None


def test_a_manifest_that_cannot_be_read_is_no_pair():
    assert deployed("infer1", lab_variables(), lambda _: None) is None
    odd = deployed("infer1", lab_variables(pivot_pins={"models": [1]}, sglang_server_launch=3), read)
    assert odd is not None
    assert odd.contract is None


@pytest.mark.parametrize(
    ("target", "method"),
    [
        (None, ""),
        ({}, ""),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_algo": "NVFP4"}}}, "NVFP4"),
        ({"quantization_config": {"bits": 4}}, "unnamed"),
    ],
)
def test_how_a_target_is_quantised(target, method):
    assert quantisation(target) == method


def test_the_tensors_of_a_manifest_come_together():
    files = {"a.safetensors": {"fc.weight": {}}, "b.safetensors": {"d2t": {}}}
    assert tensors_of({"safetensors": files}) == {"fc.weight": {}, "d2t": {}}
    assert tensors_of({"safetensors": {}}) is None
    assert tensors_of({}) is None
    assert tensors_of({"safetensors": [1]}) is None
