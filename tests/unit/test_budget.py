"""The memory budget: the field's case and its variations, all numbers worked out by hand beside them."""

import dataclasses
import random
from pathlib import Path

import pytest
import yaml

from pivot.serving import budget
from pivot.serving.budget import Plan

ROOT = Path(__file__).parents[2]
B18 = yaml.safe_load((ROOT / "tests/data/field-cases/B18-budget.yml").read_text())
TARGET = {
    "text_config": {
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
}
MHA = {"num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128}
MLA = {"num_hidden_layers": 1, "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def plan(**changes):
    """B18: 547 and 6 GB over eight cards of 95.6 GiB, the cache of the target alone."""
    values = {
        "subject": "llm01",
        "card_gib": B18["gpu_total_gib"],
        "cards": B18["tp"],
        "fraction": B18["mem_fraction_static"],
        "weights": B18["weights_gb"] * 10**9,
        "drafter": B18["draft_gb"] * 10**9,
        "token": budget.kv_bytes(TARGET, B18["tp"], budget.BYTES[B18["kv_dtype"]]),
        "context": B18["context_length"],
        "requests": B18["max_running_requests"],
    }
    return Plan(**{**values, **changes})


def found(**changes):
    return [f"{finding.code} {finding.severity}" for finding in budget.check(plan(**changes))]


def text(**changes):
    return " ".join(f"{finding.message} | {finding.fix}" for finding in budget.check(plan(**changes)))


# --- B18


def test_b18():
    case = plan()
    assert case.token == 70_272  # (512 + 64) x 2 B x 61
    assert round(case.static, 2) == 81.26  # 0.85 x 95.6
    assert [round(share, 1) for share in case.shares] == [63.7, 0.7]  # 547e9 / 8 / 2^30, 6e9 / 8 / 2^30
    assert round(case.pool, 1) == 16.9
    assert round(case.pool * budget.GIB / 1e9, 1) == 18.1
    # 81.26 x 2^30 = 87,252,260,618; less 68,375,000,000 and 750,000,000 = 18,127,260,618; / 70,272 = 257,958.5
    assert case.tokens == 257_958
    assert found() == ["BUDGET-CONTEXT warning"]
    assert text() == (
        "one request of 262,144 tokens does not fit: 0.85 x 95.6 = 81.3 GiB static less weights of 63.7 GiB and a "
        "drafter of 0.7 GiB leave 16.9 GiB of KV cache, 257,958 tokens of 70,272 B, before overheads | write "
        "context-length: 257958 or less, or make the cache larger"
    )


def test_b18_with_more_of_the_card():
    case = plan(fraction=0.94)
    assert round(case.static, 2) == 89.86
    assert round(case.pool, 1) == 25.5
    assert round(case.room, 1) == 5.7
    assert found(fraction=0.94) == ["BUDGET-ROOM warning"]
    assert "0.94 leaves 5.7 of 95.6 GiB for graphs, NCCL and activations, less than 8 GiB" in text(fraction=0.94)
    # 1 - 8 / 95.6 = 0.9163
    assert "write mem-fraction-static: 0.91 or less" in text(fraction=0.94)
    # as it was reported to serve, without a drafter
    assert found(fraction=0.94, drafter=0) == []
    assert found(fraction=0.95, drafter=0) == ["BUDGET-ROOM warning"]


def test_line():
    assert budget.line(plan()) == (
        "81.3 of 95.6 GiB a card are static: weights 63.7, drafter 0.7, KV cache 16.9 = 257,958 tokens of 70,272 B; "
        "0 requests of 262,144 tokens fit; or 16 of 16,122; 14.3 GiB for graphs, NCCL and activations"
    )
    assert budget.line(plan(cards=4)).endswith("nothing left for the KV cache")
    assert "drafter" not in budget.line(plan(drafter=0))


# --- variations


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"context": 131_072}, []),
        ({"context": 257_958}, []),
        ({"context": 257_959}, ["BUDGET-CONTEXT warning"]),
        ({"context": None}, []),
        ({"context": 131_072, "fraction": 0.9}, []),
        # 95.6 - 0.92 x 95.6 = 7.6
        ({"context": 131_072, "fraction": 0.92}, ["BUDGET-ROOM warning"]),
        # 547e9 / 4 = 127.4 GiB
        ({"cards": 4}, ["BUDGET-WEIGHTS error"]),
        # 0.6 x 95.6 = 57.4
        ({"fraction": 0.6}, ["BUDGET-WEIGHTS error"]),
        # a card of 24 GiB: 1.2 left, less than a tenth
        ({"card_gib": 24, "weights": 8e9, "context": 8192, "fraction": 0.95}, ["BUDGET-ROOM warning"]),
        ({"card_gib": 24, "weights": 8e9, "context": 8192, "fraction": 0.88}, []),
        ({"cards": 4, "fraction": 0.97}, ["BUDGET-WEIGHTS error", "BUDGET-ROOM warning"]),
        # fp8: twice the tokens
        ({"token": 35_136}, []),
        # 257,958 / 256 = 1,007
        ({"context": 131_072, "requests": 256}, ["BUDGET-REQUESTS warning"]),
        ({"context": 131_072, "requests": 251}, []),
        ({"context": 131_072, "limit": 4096, "requests": 4}, ["BUDGET-CONTEXT warning"]),
        ({"context": 4096, "limit": 4096, "requests": 4}, []),
        ({"context": 4096, "limit": 4096, "requests": 5}, ["BUDGET-REQUESTS warning"]),
    ],
)
def test_variations(changes, expected):
    assert found(**changes) == expected


def test_numbers_stand_in_the_sentences():
    assert "weights of 127.4 GiB and a drafter of 1.4 GiB a card (tp-size 4) do not fit" in text(cards=4)
    # 553e9 / 81.26 GiB = 6.34
    assert "they alone need 7 cards" in text(cards=4)
    assert "max-running-requests is 256, and the KV cache of 257,958 tokens has 1007 for each" in text(
        context=131_072, requests=256
    )
    # 257,958 / 1,024 = 251.9
    assert "write max-running-requests: 251 or less" in text(context=131_072, requests=256)
    assert "max-total-tokens is 4,096" in text(limit=4096)


# --- bytes of a token


@pytest.mark.parametrize(
    ("config", "cards", "width", "expected"),
    [
        (TARGET, 8, 2, 70_272),
        (TARGET, 1, 2, 70_272),  # the same on every card
        (TARGET, 8, 1, 35_136),
        (MLA, 8, 2, 1_152),
        (MHA, 8, 2, 4_096),  # 2 x 8 heads x 128 x 2 B
        (MHA, 1, 2, 32_768),
        ({**MHA, "num_key_value_heads": 4}, 8, 2, 512),  # one head a card at least
        ({"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 1024}, 2, 2, 4_096),  # 2 x 4 x 128 x 2 x 2
        ({**MLA, "qk_rope_head_dim": None}, 8, 2, None),
        ({"num_hidden_layers": 61}, 8, 2, None),
        ({**MHA, "num_hidden_layers": "sixty"}, 8, 2, None),
        ({**MHA, "num_hidden_layers": True}, 8, 2, None),
        (None, 8, 2, None),
        ([], 8, 2, None),
    ],
)
def test_kv_bytes(config, cards, width, expected):
    assert budget.kv_bytes(config, cards, width) == expected


def test_weight_bytes():
    files = {"a.safetensors": {"size": 5}, "b.safetensors": {"size": 7}, "tokenizer.json": {"size": 1000}}
    assert budget.weight_bytes({"files": files}) == 12
    assert budget.weight_bytes({"files": {**files, "c.safetensors": {"sha256": ""}}}) is None
    assert budget.weight_bytes({"files": {"config.json": {"size": 5}}}) is None
    assert budget.weight_bytes({}) is None


# --- from a host's variables

MANIFESTS = {
    "target.json": {"config": TARGET, "files": {"w.safetensors": {"size": 547 * 10**9}}},
    "drafter.json": {"config": MHA, "files": {"w.safetensors": {"size": 6 * 10**9}}},
}
VALUES = {
    "gpu_runtime_memory_gib": 95.6,
    "gpu_runtime_accelerator": "cuda",
    "sglang_server_model_path": "/models/lab/target/abc",
    "sglang_server_drafter_path": "/models/lab/drafter/def",
    "model_weights_models": [
        {"repository": "lab/target", "revision": "abc", "manifest": "target.json"},
        {"repository": "lab/drafter", "revision": "def", "manifest": "drafter.json"},
    ],
    "sglang_server_launch": {
        "tp-size": 8,
        "mem-fraction-static": 0.85,
        "kv-cache-dtype": "bf16",
        "context-length": 131072,
        "max-running-requests": 16,
    },
}


def deployed(launch=None, **changes):
    flags = {**VALUES["sglang_server_launch"], **(launch or {})}
    return budget.deployed("llm01", {**VALUES, "sglang_server_launch": flags, **changes}, MANIFESTS.get)


def test_deployed():
    made, wrong = deployed()
    assert wrong == []
    # 70,272 + 4,096; 18,127,260,618 / 74,368 = 243,750.8
    assert (made.token, made.tokens, made.cards, made.requests) == (74_368, 243_750, 8, 16)
    assert budget.check(made) == []
    assert budget.check(deployed({"context-length": 262144})[0])[0].code == "BUDGET-CONTEXT"
    assert deployed({"kv-cache-dtype": "fp8_e4m3"})[0].token == 37_184
    assert deployed({"context-length": "128k"})[0].context == 128_000
    assert deployed({"context-length": "128Ki"})[0].context == 131_072
    assert deployed({"pp-size": 1, "dp-size": "1", "cpu-offload-gb": 0, "enable-dp-attention": False})[0] == made
    off = {"offload-group-size": -1, "kt-weight-path": "", "torchao-config": "", "ple-offload-embedding": False}
    assert deployed(off)[0] == deployed({"offload-group-size": "-1"})[0] == made
    alone, _ = deployed(sglang_server_drafter_path="")
    assert (alone.drafter, alone.token) == (0, 70_272)


@pytest.mark.parametrize(
    ("launch", "changes"),
    [
        ({}, {"gpu_runtime_memory_gib": 0}),
        ({}, {"gpu_runtime_memory_gib": None}),
        ({}, {"gpu_runtime_accelerator": "cpu"}),
        ({}, {"gpu_runtime_accelerator": None}),
        ({}, {"sglang_server_model_path": "/models/other"}),
        ({}, {"sglang_server_drafter_path": "/models/other"}),
        ({"mem-fraction-static": None}, {}),
        ({"kv-cache-dtype": "nvfp4"}, {}),
        ({"pp-size": 2}, {}),
        ({"enable-dp-attention": True}, {}),
        ({"dcp-size": 8}, {}),
        ({"cpu-offload-gb": 1}, {}),
        ({"offload-group-size": 1}, {}),
        ({"offload-group-size": "8"}, {}),
        ({"kt-weight-path": "/models/int4"}, {}),
        ({"ple-offload-embedding": True}, {}),
        ({"torchao-config": "int4wo-128"}, {}),
        ({"modelopt-quant": "fp8"}, {}),
        ({"quantization": "fp8"}, {}),
        ({"pp-size": "two"}, {}),
        ({"tp-size": "many"}, {}),
    ],
)
def test_what_is_not_known_is_not_worked_out(launch, changes):
    assert deployed(launch, **changes) == (None, [])


def test_weights_that_are_small_already_are_counted():
    """quantization names what the checkpoint is, or makes one smaller that is not."""
    flags = {"tp-size": 1, "mem-fraction-static": 0.8, "quantization": "fp8"}
    small = {**TARGET, "quantization_config": {"quant_method": "fp8"}}
    (finding,) = budget.check(budget.of("h", flags, 80.0, small, 100 * 10**9))
    assert finding.code == "BUDGET-WEIGHTS"
    assert budget.of("h", flags, 80.0, TARGET, 100 * 10**9) is None


@pytest.mark.parametrize(
    ("launch", "changes", "code", "said"),
    [
        ({}, {"gpu_runtime_memory_gib": 97887}, "BUDGET-CARD", "write 95.6 if these are MiB"),
        ({"mem-fraction-static": 85}, {}, "BUDGET-FRACTION", "85, not a part"),
        ({"mem-fraction-static": "0.0"}, {}, "BUDGET-FRACTION", "between 0 and 1"),
        ({"mem-fraction-static": 1}, {}, "BUDGET-FRACTION", "0.85"),
    ],
)
def test_numbers_that_cannot_be_meant(launch, changes, code, said):
    made, wrong = deployed(launch, **changes)
    assert made is None
    assert [finding.code for finding in wrong] == [code]
    assert said in f"{wrong[0].message} {wrong[0].fix}"


def test_random_values_give_findings_and_no_traceback():
    rng = random.Random(18)  # noqa: S311 - the same in every run
    junk = [None, True, -1, 0, 10**400, 10**5000, 1.5, float("nan"), float("inf"), "", "x" * 5000, "9" * 5000, [], {}]
    names = [*VALUES["sglang_server_launch"], "pp-size", "max-total-tokens"]
    for _ in range(3000):
        flags = {rng.choice(names): rng.choice(junk) for _ in range(2)}
        card = rng.choice([95.6, 24, *junk])
        made, wrong = deployed(flags, gpu_runtime_memory_gib=card)
        for finding in [*wrong, *(budget.check(made) if made else [])]:
            assert finding.message and finding.fix
        assert made is None or budget.line(made)


def test_a_plan_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().fraction = 0.9
