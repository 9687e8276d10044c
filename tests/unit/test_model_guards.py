"""The drafter contract's guards, each alone: what is changed in a clean pair, and what is said about it."""

import copy
import json
import random
import time
from typing import Any

import pytest
import yaml

from pivot.drafters.model import check
from pivot.drafters.pair import deployed, drafts, facts, quantisation, tensors_of
from pivot.drafters.pair_weights import NORMS
from pivot.findings import Severity

from .drafter_pairs import (
    DRAFTER,
    ENGINES,
    FLAGS,
    HEADER,
    IDS,
    MLA,
    MLA_HEADER,
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

# --- every other guard, alone: what is changed in a clean drafter, and what it says

DRAFTER_FAULTS = [
    ("num_hidden_layers", 0, [("CONFIG", "error")], "positive whole number"),
    ("num_hidden_layers", "1", [("CONFIG", "error")], "num_hidden_layers in the drafter's config.json is '1' (str)"),
    (
        "hidden_size",
        4096,
        [("FC", "error"), ("HIDDEN", "error"), ("HEAD", "error"), ("SHAPE", "error")],
        "hidden_size of the drafter is 4096",
    ),
    ("target_hidden_size", 4096, [("FC", "error"), ("HIDDEN", "error")], "target_hidden_size of the drafter is 4096"),
    ("vocab_size", 32000, [("VOCAB", "error"), ("T2D", "warning")], "the target's is 163840"),
    ("draft_vocab_size", 200000, [("VOCAB", "error"), ("D2T", "error"), ("HEAD", "error")], "larger than vocab_size"),
    ("draft_vocab_size", ..., [("VOCAB", "error"), ("HEAD", "error")], "would not start"),
    ("draft_vocab_size", 16000, [("D2T", "error"), ("HEAD", "error")], "not [16000] of draft_vocab_size"),
    ("max_position_embeddings", 4096, [("CONTEXT", "error")], "write context-length: 4096"),
    ("rope_theta", 10, [("ROPE", "warning")], "rope_theta of the drafter is 10"),
    ("rope_theta", -1.0, [("ROPE", "warning")], "-1.0"),
    ("rope_theta", "1e6", [("ROPE", "warning")], "'1e6'"),
    (
        "rope_scaling",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        [("ROPE", "warning")],
        "reaches 16384 tokens",
    ),
    (  # Llama 3.1 itself: it stretches by frequency, and reaches max_position_embeddings
        "rope_scaling",
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        [],
        "",
    ),
    ("architectures", ["LlamaForCausalLM3"], [("ARCHITECTURE", "error")], "has no class LlamaForCausalLM3"),
    ("architectures", ["LlamaForCausalLMEagle"], [("ALGORITHM", "error")], "is none for EAGLE-3"),
    ("architectures", ["LlamaForCausalLM"], [("ALGORITHM", "error")], "but LlamaForCausalLM, the class of"),
    ("architectures", [], [("CONFIG", "error")], "a list with the name of a class"),
    ("model_type", "novel", [("MODEL-TYPE", "warning")], "'novel'"),
    ("num_aux_hidden_states", 4, [("COUNT", "error")], "takes 4 states"),
    ("quantization_config", {"quant_method": "fp8"}, [("QUANTISED", "warning")], "'fp8'"),
    ("eagle_config/use_aux_hidden_state", False, [("NO-AUX", "error")], "no states are kept"),
    ("eagle_config/use_aux_hidden_state", "false", [("CONFIG", "error")], "'false' (str), which counts as true"),
    (
        "eagle_config",
        {"eagle_aux_hidden_state_layers_ids": [4, 20, 40]},
        [("KEY", "error")],
        "the default would be used",
    ),
    ("eagle_config", {"aux_hidden_state_layer_ids": [4, 20, 40]}, [("KEY", "error")], "layer_ids: [4, 20, 40], which"),
    ("eagle_config", {"aux_layers": [4, 20, 40], "use_aux_hidden_state": True}, [], ""),
    ("eagle_config", {"use_aux_hidden_state": True}, [], ""),
    ("eagle_config", [1], [("CONFIG", "error")], "a JSON object"),
    (f"eagle_config/{IDS}", [], [("IDS", "error")], "not a list of layer numbers"),
    (f"eagle_config/{IDS}", "2,30,58", [("IDS", "error")], "'2,30,58'"),
    (f"eagle_config/{IDS}", [2, "30", 58], [("IDS", "error")], "holds '30' (str)"),
    (f"eagle_config/{IDS}", [2, True, 58], [("IDS", "error")], "holds True (bool)"),
    (f"eagle_config/{IDS}", [2, 30.0, 58], [("IDS", "error")], "holds 30.0 (float)"),
    (f"eagle_config/{IDS}", [2, 10**5000, 58], [("IDS", "error")], "no layer number"),
    (f"eagle_config/{IDS}", [2, 30, 30], [("IDS", "error")], "names 30 more than once"),
]


@pytest.mark.parametrize(("path", "value", "expected", "said"), DRAFTER_FAULTS)
def test_a_fault_in_the_drafters_config(path, value, expected, said):
    given = pair(drafter=changed(DRAFTER, path, value), tensors=HEADER)
    assert found(given) == expected
    assert said in text(given)


HEADER_FAULTS = [
    ("d2t", ..., [("D2T", "error")], "d2t is missing"),
    ("d2t", {"dtype": "F32", "shape": [32000]}, [("D2T", "error")], "d2t is F32"),
    ("d2t", {"dtype": "I32", "shape": [32000]}, [("D2T", "warning")], "I32 instead of I64"),
    ("d2t", {"dtype": "I64", "shape": [31999]}, [("D2T", "error")], "[31999], not [32000]"),
    ("d2t", {"dtype": "I64", "shape": [32000, 1]}, [("D2T", "error")], "[32000, 1]"),
    ("t2d", {"dtype": "BOOL", "shape": [32000]}, [("T2D", "warning")], "not [163840] of vocab_size"),
    ("t2d", ..., [], ""),
    ("t2d", {"dtype": "U8", "shape": [163840]}, [("T2D", "warning")], "t2d is U8 instead of BOOL"),
    ("lm_head.weight", ..., [("HEAD", "error")], "lm_head.weight is missing"),
    ("lm_head.weight", {"dtype": "BF16", "shape": [163840, 7168]}, [("HEAD", "error")], "not [32000, 7168]"),
    ("lm_head.weight/dtype", "I8", [("HEAD", "error")], "lm_head.weight is I8, but the config names no"),
    ("fc.weight", ..., [("WEIGHTS", "error")], "finds no fc.weight"),
    ("fc.weight", {"dtype": "BF16", "shape": [7168, 28672]}, [("FC", "error")], "(4 x 7168)"),
    ("fc.weight", {"dtype": "BF16", "shape": [7168, 20000]}, [("FC", "error")], "no multiple of 7168"),
    ("surprise.weight", {"dtype": "BF16", "shape": [1]}, [("WEIGHTS", "warning")], "no place for surprise.weight"),
    ("fc_norm.0.weight", {"dtype": "BF16", "shape": [7168]}, [("WEIGHTS", "warning")], "fc_norm.0.weight"),
    ("midlayer.self_attn.rotary_emb.inv_freq", {"dtype": "F32", "shape": [64]}, [], ""),
    ("d2t", {"dtype": "I64", "shape": "32000"}, [("HEADER", "error")], "not dtype and shape"),
    ("d2t", {"dtype": "I64", "shape": [-1]}, [("HEADER", "error")], "not dtype and shape"),
    ("d2t", "I64", [("HEADER", "error")], "'I64'"),
    ("d2t", {"dtype": "I" * 20, "shape": [32000]}, [("HEADER", "error")], "not dtype and shape"),
    ("d2t", {"dtype": "I64", "shape": [1] * 9}, [("HEADER", "error")], "not dtype and shape"),
]


@pytest.mark.parametrize(("name", "value", "expected", "said"), HEADER_FAULTS)
def test_a_fault_in_the_drafters_header(name, value, expected, said):
    given = pair(tensors=changed(HEADER, name, value))
    assert found(given) == expected
    assert said in text(given)


def test_ids_in_an_object_where_nobody_looks():
    config = {**with_ids(None), "speculators_config": {IDS: [4, 20, 40]}}
    assert found(pair(drafter=config)) == [("KEY", "error")]
    assert f"speculators_config.{IDS}" in text(pair(drafter=config))
    assert found(pair(drafter=config, layer_ids=[4, 20, 40])) == []


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([2, 47, 93], []),
        ([-1, 47, 94], []),  # what the class makes of them nobody has read
        ([2, 47, 95], [("RANGE", "error")]),
        ([-3, 47, 90], [("RANGE", "error")]),
    ],
)
def test_ids_that_no_rule_can_make_layers_of(ids, expected):
    """Qwen3-MoE, whose setter nobody has verified."""
    target = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        **{key: TARGET["text_config"][key] for key in ("hidden_size", "vocab_size", "max_position_embeddings")},
    }
    assert found(pair(target=target, drafter=with_ids(ids))) == [("RULE", "warning"), *expected]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_nextn_predict_layers": 1}, True),  # DeepSeek-V3
        ({"num_nextn_predict_layers": 0}, False),  # Kimi-K2
        ({"text_config": {"mtp_num_hidden_layers": 1}}, True),  # Qwen3.5
        ({"text_config": []}, False),
        (TARGET, False),
        (None, False),
    ],
)
def test_checkpoints_that_bring_layers_that_draft(config, expected):
    assert drafts(config) is expected


# of weights and a config that are not of one revision
SHAPES = [
    ("norm.weight", [4096], "norm.weight is [4096], where hidden_size make [7168]"),
    ("midlayer.self_attn.q_proj.weight", [8192, 7168], "num_attention_heads x head_dim and twice hidden_size make"),
    ("midlayer.self_attn.q_proj.weight", [4096, 14336], "is [4096, 14336], where"),
    ("model.midlayer.self_attn.k_proj.weight", [1024, 14336], "num_key_value_heads x head_dim"),
    ("layers.0.self_attn.o_proj.weight", [7168, 4096], "layers.0.self_attn.o_proj.weight is [7168, 4096]"),
    ("midlayer.mlp.gate_proj.weight", [12288, 7168], "intermediate_size and hidden_size make [18432, 7168]"),
    ("midlayer.mlp.down_proj.weight", [18432, 7168], "make [7168, 18432]"),
    ("midlayer.hidden_norm.weight", [7168, 1], "is [7168, 1]"),
]


@pytest.mark.parametrize(("name", "shape", "said"), SHAPES)
def test_weights_of_another_revision_than_the_config(name, shape, said):
    given = pair(tensors={**HEADER, name: {"dtype": "BF16", "shape": shape}})
    assert found(given) == [("SHAPE", "error")]
    assert said in text(given)


def test_several_shapes_are_one_finding():
    given = pair(drafter=changed(DRAFTER, "intermediate_size", 12288), tensors={**HEADER, "norm.weight": {
        "dtype": "BF16", "shape": [1]}})  # fmt: skip
    assert found(given) == [("SHAPE", "error")]
    assert "and 1 more differ" in text(given)


def test_sizes_that_a_config_does_not_say_are_not_guessed():
    bare = {key: value for key, value in DRAFTER.items() if key not in ("intermediate_size", "head_dim")}
    # without head_dim, 7168 / 64 = 112 a head
    assert found(pair(drafter=bare, tensors=HEADER)) == [("SHAPE", "error")]
    fewer = {key: value for key, value in bare.items() if key != "num_attention_heads"}
    assert found(pair(drafter=fewer, tensors=HEADER)) == []
    packed = {**bare, "quantization_config": {"quant_method": "fp8"}}
    assert found(pair(drafter=packed, tensors=HEADER)) == [("QUANTISED", "warning")]


@pytest.mark.parametrize(
    ("drafter", "flags", "expected"),
    [
        (DRAFTER, {"attention-backend": "trtllm_mla"}, [("BACKEND", "warning")]),
        (DRAFTER, {"prefill-attention-backend": "flashmla"}, [("BACKEND", "warning")]),
        (DRAFTER, {"attention-backend": "flashinfer"}, []),
        (DRAFTER, {"attention-backend": "trtllm_mla", "speculative-draft-attention-backend": "trtllm_mha"}, []),
        (DRAFTER, {"attention-backend": ["trtllm_mla"]}, []),
        ({**MLA, "eagle_config": DRAFTER["eagle_config"]}, {"attention-backend": "trtllm_mla"}, []),
    ],
)
def test_the_backend_that_a_drafter_inherits(drafter, flags, expected):
    assert found(pair(drafter=drafter, flags={**FLAGS, **flags})) == expected


# of a good d2t and t2d, as `pivot manifest` writes them; and what else they can be
GOOD = {"least": 0, "most": 163839, "distinct": 32000, "ascending": True, "moved": 31990, "like_ids": False}
VALUES = [
    ({"most": 163840}, [("D2T", "error")], "d2t leads to the token 163840, but vocab_size is 163840"),
    ({"least": -5}, [("D2T", "error")], "d2t leads to the token -5"),
    (
        {"most": 195839, "like_ids": True},
        [("D2T", "error")],
        "token 195839, but vocab_size is 163840; its values ascend",
    ),
    ({"like_ids": True}, [("D2T", "warning")], "ascend as token ids do, where differences have to stand"),
    ({"moved": 0}, [("D2T", "error")], "d2t is all zero, so the 32000 draft tokens stand for the target's first 32000"),
    ({"moved": 0, "marked": 31000}, [("D2T", "error")], "d2t is all zero"),
    # t2d says the same, so these are the right tokens
    ({"moved": 0, "marked": 32000}, [], ""),
    ({"marked": 31000}, [("D2T", "warning")], "of 32000 tokens that d2t leads to, t2d marks 31000"),
    ({"distinct": 31999, "ascending": False}, [("D2T", "error")], "32000 draft tokens to 31999 of the target's"),
    ({"ascending": False}, [("D2T", "warning")], "do not ascend"),
    ({"marked": 32000}, [], ""),
    ({}, [], ""),
    # several at once
    ({"most": 200000, "moved": 0, "distinct": 5}, [("D2T", "error")] * 3, "5 of the target's"),
    # what somebody wrote by hand shows nothing
    ({"most": "200000"}, [], ""),
    ({"most": 10**5000}, [], ""),
]


@pytest.mark.parametrize(("changes", "expected", "said"), VALUES)
def test_a_fault_in_the_values_of_d2t(changes, expected, said):
    given = pair(tensors=changed(HEADER, "d2t/values", {**GOOD, **changes}))
    assert found(given) == expected
    assert said in text(given)


@pytest.mark.parametrize(("marked", "expected"), [(32000, []), (31999, [("T2D", "warning")])])
def test_t2d_marks_as_many_tokens_as_are_drafted(marked, expected):
    assert found(pair(tensors=changed(HEADER, "t2d/values", {"marked": marked}))) == expected


@pytest.mark.parametrize("values", [None, 7, [], {}, {"least": None}, "text"])
def test_values_that_cannot_be_used_are_as_if_missing(values):
    given = pair(tensors=changed(HEADER, "d2t/values", values))
    assert found(given) == []
    assert any("values of d2t cannot be seen" in note for note in check(given).notes)


def renamed(header: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new): entry for name, entry in header.items()}


def test_names_are_judged_by_the_loader_of_the_version():
    newer = renamed(HEADER, "midlayer.", "layers.0.")
    llama = {**TARGET["text_config"], "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert found(pair(tensors=newer)) == []
    given = pair("0.5.9", target=llama, tensors=newer, contract=contract([2, 30, 58], "output"))
    assert ("WEIGHTS", "error") in found(given)
    assert "finds no weight of its layer among the drafter's tensors; it drops layers.0." in text(given)
    assert ("WEIGHTS", "error") not in found(pair("0.5.9", target=llama, tensors=HEADER))
    # the MLA loader puts model. before every name itself
    wrong = renamed(renamed(MLA_HEADER, "layers.0.", "model.layers.0."), "fc.", "model.fc.")
    assert ("WEIGHTS", "error") in found(pair(drafter=MLA, tensors=wrong))


def test_a_full_draft_vocabulary_needs_neither_d2t_nor_head():
    drafter = changed(DRAFTER, "draft_vocab_size", None)
    header = changed(changed(HEADER, "d2t", ...), "lm_head.weight", ...)
    assert found(pair(drafter=drafter, tensors=header)) == []


def test_a_smaller_drafter_needs_an_embedding_of_its_own():
    drafter = {**DRAFTER, "hidden_size": 4096, "target_hidden_size": 7168}
    smaller = {7168: 4096, 14336: 8192}
    header = {
        name: {**entry, "shape": [smaller.get(size, size) for size in entry["shape"]]} for name, entry in HEADER.items()
    }
    assert found(pair(drafter=drafter, tensors=header)) == [("HIDDEN", "error")]
    assert found(pair(drafter=drafter, tensors={**header, "embed_tokens.weight": HEADER["norm.weight"]})) == []


def test_fc_as_wide_as_the_embedding_is_skipped():
    drafter = {**with_ids([30]), "num_aux_hidden_states": 1}
    header = changed(HEADER, "fc.weight/shape", [7168, 7168])
    assert ("FC", "error") in found(pair(drafter=drafter, tensors=header))
    assert "skipped silently" in text(pair(drafter=drafter, tensors=header))


@pytest.mark.parametrize("asked", [262144, "262144"])
def test_the_context_may_be_forced(asked):
    drafter = changed(DRAFTER, "max_position_embeddings", 131072)
    flags = {**FLAGS, "context-length": asked}
    assert found(pair(drafter=drafter, flags=flags)) == [("CONTEXT", "error")]
    forced = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    assert found(pair(drafter=drafter, flags=flags, environment=forced)) == [("CONTEXT", "warning")]
    assert found(pair(drafter=drafter, flags={**flags, "context-length": 131072})) == []
    # without the flag, the target's own
    assert found(pair(drafter=drafter, flags={})) == [("CONTEXT", "error")]


def test_a_scaled_context_counts():
    drafter = {**DRAFTER, "max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 64.0}}
    assert found(pair(drafter=drafter)) == []


@pytest.mark.parametrize(
    ("flags", "target", "expected"),
    [
        ({"quantization": "modelopt_fp4"}, {}, [("QUANT-INHERITED", "error")]),
        ({}, {"quantization_config": {"quant_algo": "NVFP4"}}, [("QUANT-INHERITED", "error")]),
        ({}, {"quantization_config": {"quant_method": "compressed-tensors"}}, [("QUANT-INHERITED", "warning")]),
        ({"quantization": "unquant"}, {}, []),
        ({"speculative-draft-model-quantization": "unquant"}, {"quantization_config": {"quant_algo": "NVFP4"}}, []),
        ({"quantization": "fp8", "speculative-draft-model-quantization": "unquant"}, {}, []),
    ],
)
def test_inherited_quantisation(flags, target, expected):
    assert found(pair(flags={**FLAGS, **flags}, target={**TARGET, **target})) == expected


MLA_FAULTS = [
    ("num_hidden_layers", 2, [("NUM-LAYERS", "error")]),
    ("q_lora_rank", None, [("Q-LORA", "error")]),
    ("q_lora_rank", ..., [("Q-LORA", "error")]),
    ("target_hidden_size", 4096, [("FC", "error"), ("HIDDEN", "error")]),
    ("quantization_config", {"quant_algo": "NVFP4"}, [("QUANTISED", "error")]),
    ("fc_norm", True, [("NORMS", "error")]),
    ("norm_output", True, [("NORMS", "error")]),
    ("norm_output", False, []),
]


@pytest.mark.parametrize(("path", "value", "expected"), MLA_FAULTS)
def test_the_rules_of_mla_drafters(path, value, expected):
    agreed = contract([1, 29, 57], "output")
    assert found(pair(OLD, drafter=changed(MLA, path, value), tensors=MLA_HEADER, contract=agreed)) == expected


def test_quantised_mla_weights_show_in_the_header():
    header = changed(MLA_HEADER, "fc.weight/dtype", "F8_E4M3")
    agreed = contract([1, 29, 57], "output")
    assert found(pair(OLD, drafter=MLA, tensors=header, contract=agreed)) == [("QUANTISED", "error")]


def test_more_than_one_layer_is_a_matter_of_the_class_and_version():
    drafter = changed(DRAFTER, "num_hidden_layers", 2)
    assert found(pair(NEW, drafter=drafter)) == []
    llama = {**TARGET["text_config"], "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert ("NUM-LAYERS", "error") in found(pair("0.5.9", target=llama, drafter=drafter))


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
    start = time.monotonic()
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
    assert time.monotonic() - start < 60


def test_a_check_takes_milliseconds():
    start = time.monotonic()
    for _ in range(10):
        check(lab())
    assert time.monotonic() - start < 2


def test_every_error_says_what_to_do():
    pairs = [pair(drafter=changed(DRAFTER, path, value), tensors=HEADER) for path, value, _, _ in DRAFTER_FAULTS]
    pairs += [pair(tensors=changed(HEADER, name, value)) for name, value, _, _ in HEADER_FAULTS]
    for given in pairs:
        for finding in check(given).findings:
            assert finding.fix or finding.severity is Severity.INFO, finding.code


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
