"""The drafter contract's guards, each alone: what is changed in a clean pair, and what is said about it."""

from typing import Any

import pytest

from pivot.drafters.model import check
from pivot.drafters.pair import drafts
from pivot.findings import Severity

from .drafter_pairs import (
    DRAFTER,
    FLAGS,
    HEADER,
    IDS,
    MLA,
    MLA_HEADER,
    NEW,
    OLD,
    TARGET,
    changed,
    contract,
    found,
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


def test_every_error_says_what_to_do():
    pairs = [pair(drafter=changed(DRAFTER, path, value), tensors=HEADER) for path, value, _, _ in DRAFTER_FAULTS]
    pairs += [pair(tensors=changed(HEADER, name, value)) for name, value, _, _ in HEADER_FAULTS]
    for given in pairs:
        for finding in check(given).findings:
            assert finding.fix or finding.severity is Severity.INFO, finding.code
