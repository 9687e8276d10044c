"""Pairs of target and drafter for the contract's tests: right ones, and how one is changed in one place."""

import copy
import json
from pathlib import Path
from typing import Any

from pivot.drafters.model import check
from pivot.drafters.pair import Pair, tensors_of
from pivot.engines import descriptions

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests/data/field-cases"
ENGINES = {version: descriptions.load(version) for version in ("0.5.9", "0.5.12", "0.5.13", "0.5.23")}
OLD, NEW = "0.5.12", "0.5.23"
ALWAYS, FIRST = "always_plus_one", "plus_one_if_first_is_1"
IDS = "eagle_aux_hidden_state_layer_ids"

# the numbers of Kimi-K2.5
TARGET: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    },
}
FLAGS = {"speculative-algorithm": "EAGLE3", "context-length": 131072}


def case(name: str) -> Any:
    return json.loads((CASES / name).read_text())


DRAFTER: dict[str, Any] = case("B01b-drafter-config.json")
HEADER: dict[str, Any] = {
    "d2t": {"dtype": "I64", "shape": [32000]},
    "t2d": {"dtype": "BOOL", "shape": [163840]},
    "fc.weight": {"dtype": "BF16", "shape": [7168, 21504]},
    "norm.weight": {"dtype": "BF16", "shape": [7168]},
    "lm_head.weight": {"dtype": "BF16", "shape": [32000, 7168]},
    "midlayer.self_attn.q_proj.weight": {"dtype": "BF16", "shape": [8192, 14336]},
    "midlayer.mlp.gate_proj.weight": {"dtype": "BF16", "shape": [18432, 7168]},
    "midlayer.hidden_norm.weight": {"dtype": "BF16", "shape": [7168]},
}
MLA: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "num_hidden_layers": 1,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "max_position_embeddings": 262144,
    "eagle_config": {IDS: [1, 29, 57], "use_aux_hidden_state": True},
}
MLA_HEADER: dict[str, Any] = {
    "fc.weight": {"dtype": "BF16", "shape": [7168, 21504]},
    "norm.weight": {"dtype": "BF16", "shape": [7168]},
    "lm_head.weight": {"dtype": "BF16", "shape": [163840, 7168]},
    "layers.0.self_attn.q_a_proj.weight": {"dtype": "BF16", "shape": [1536, 14336]},
    "layers.0.self_attn.kv_b_proj.weight": {"dtype": "BF16", "shape": [16384, 512]},
}


def contract(layers: list[int], convention: str | None, **changes: Any) -> dict[str, Any]:
    return {"target": "moonshotai/Kimi-K2.5", "layers": layers, "convention": convention, "source": "x", **changes}


def pair(version: str = NEW, **changes: Any) -> Pair:
    values: dict[str, Any] = {"subject": "llm01", "target": TARGET, "drafter": DRAFTER, "flags": FLAGS, **changes}
    return Pair(version=version, engine=ENGINES.get(version), **values)


def with_ids(ids: Any, **changes: Any) -> dict[str, Any]:
    eagle_config = {"use_aux_hidden_state": True} if ids is None else {IDS: ids, "use_aux_hidden_state": True}
    return {**DRAFTER, "eagle_config": eagle_config, **changes}


def found(pair: Pair) -> list[tuple[str, str]]:
    return [(finding.code.removeprefix("DRAFTER-"), str(finding.severity)) for finding in check(pair).findings]


def text(pair: Pair) -> str:
    return " ".join(f"{finding.message} | {finding.fix}" for finding in check(pair).findings)


def changed(base: Any, path: str, value: Any) -> Any:
    """A copy with one place changed; ... removes it."""
    result = copy.deepcopy(base)
    place = result
    *parents, last = path.split("/")
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return result


def lab(**changes: Any) -> Pair:
    manifests = ROOT / "inventory/lab/manifests"
    target = json.loads((manifests / "kimi-k25-tiny.json").read_text())
    drafter = json.loads((manifests / "kimi-k25-tiny-eagle3.json").read_text())
    values: dict[str, Any] = {
        "target": target["config"],
        "drafter": drafter["config"],
        "tensors": tensors_of(drafter),
        "layer_ids": [3, 5, 7],
        "flags": {"speculative-algorithm": "EAGLE3", "context-length": 1024, "device": "cpu"},
        "contract": {"target": "pivot-lab/kimi-k25-tiny", "layers": [3, 5, 7], "convention": "input", "source": "x"},
        "served": "pivot-lab/kimi-k25-tiny",
        "revisions": {item["repository"]: item["revision"] for item in (target, drafter)},
    }
    return pair(**{**values, **changes})
