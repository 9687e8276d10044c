"""Launch settings against the pinned engine and against each other."""

import random
from pathlib import Path

import pytest
import yaml

from pivot.engines import descriptions
from pivot.serving.launch_rules import Launch, check

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests/data/field-cases"
NEW = descriptions.load("0.5.23")
TRIPLE = {"speculative-num-steps": 3, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 4}


def launch(flags=None, environment=None, **changes):
    values = {"version": "0.5.23", "engine": NEW, **changes}
    return Launch(subject="llm01", flags=flags or {}, environment=environment or {}, **values)


def found(*args, **kwargs):
    return [(finding.code, str(finding.severity)) for finding in check(launch(*args, **kwargs))]


def text(*args, **kwargs):
    return " ".join(f"{finding.message} | {finding.fix}" for finding in check(launch(*args, **kwargs)))


# --- the field's cases

B02 = {
    "a": ["LAUNCH-BACKEND error"],
    "b": ["LAUNCH-NO-DRAFTER error"],
    "c": ["LAUNCH-TRIPLE error"],
    "d": ["LAUNCH-TRIPLE error"],
    "e": ["LAUNCH-SPEC-V2 error"],
    "f": ["LAUNCH-PIPELINE error"],
    "g": ["LAUNCH-KV-DTYPE warning"],
    "h": ["LAUNCH-PEERS error"],
    "i": ["LAUNCH-SEGMENTS error"],
    "j": [],  # of the pair, not of the launch: DRAFTER-QUANT-INHERITED
    "k": ["LAUNCH-JSON warning"],
}


@pytest.mark.parametrize("given", yaml.safe_load((CASES / "B02-args.yml").read_text()), ids=lambda case: case["id"])
def test_b02(given):
    fields = dict(given)
    name = fields.pop("id")
    other = {
        "environment": fields.pop("env", {}),
        "capability": fields.pop("sm", None),
        "quantisation": fields.pop("target_quant", ""),
        "drafter": fields.pop("draft_path") is not None if "draft_path" in fields else None,
    }
    fields.pop("draft_dtype", None)
    if "pp" in fields:
        fields["speculative_algorithm"] = "EAGLE3"
    flags = {key.replace("_", "-"): value for key, value in fields.items() if value is not None and value is not False}
    # the relations alone: these cases are of several versions
    assert [" ".join(item) for item in found(flags, engine=None, **other)] == B02[name]


def test_b02_c_says_the_number():
    flags = {"speculative-num-steps": 4, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 24}
    assert "topk 1 => write speculative-num-draft-tokens: 5" in text(flags)


def test_b22():
    lines = (CASES / "B22-environ.txt").read_text().splitlines()
    environment = dict(line.split("=", 1) for line in lines)
    assert environment["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0 "
    kept = descriptions.load("0.5.9")
    codes = found({}, environment, engine=kept, version="0.5.9")
    assert codes == [
        ("ENV-VALUE", "error"),
        ("ENV-VALUE", "error"),
        ("ENV-SIMULATED", "error"),
        ("ENV-BYPASS", "warning"),
        ("ENV-TRACE", "warning"),
    ]
    said = text({}, environment, engine=kept, version="0.5.9")
    assert "'on', which SGLang cannot read as bool" in said
    assert "'0 '" in said
    assert "hf_" not in said


# --- names and values

GOOD = [
    {"tp-size": 8, "tensor-parallel-size": "8"},
    {"attention-backend": "flashinfer", "kv-cache-dtype": "bf16"},
    {"mem-fraction-static": 0.85, "watchdog-timeout": 1200},
    {"context-length": "128k"},
    {"context-length": 131072},
    {"context-length": "128Ki"},
    {"context-length": "25.6k"},
    {"trust-remote-code": True},
    {"model-loader-extra-config": {"enable_multithread_load": True, "num_threads": 16}},
    {"model-loader-extra-config": '{"enable_multithread_load": true}'},
    {"tool-call-parser": "whatever_a_plugin_registers"},  # its choices cannot be read from the source
    {"cuda-graph-bs-decode": [1, 2, 4]},
    {"served-model-name": "kimi-k2.5", "grammar-backend": "none"},
    {"default-chat-template-kwargs": {"thinking": False}},
    {"context_length": 131072, "Tp-Size": 8, "--mem-fraction-static": 0.8},  # pivot.serving.launch refuses them
    {"model-loader-extra-config": {"x": 1}, "load-format": "instanttensor"},
    {"chunked-prefill-size": -1},
    TRIPLE,
]


@pytest.mark.parametrize("flags", GOOD)
def test_good_flags_have_no_findings(flags):
    assert found(flags) == []


BAD = [
    ({"atention-backend": "triton"}, "LAUNCH-UNKNOWN error", "did you mean attention-backend?"),
    ({"nothing-like-it-at-all": 1}, "LAUNCH-UNKNOWN error", "pin an SGLang that has it"),
    ({"cuda-graph-max-bs": 16, "tp-size": 8}, "LAUNCH-UNKNOWN error", "cuda-graph-max-bs is no flag of SGLang 0.5.23"),
    ({"tp": 8}, "LAUNCH-SHORT warning", "write tp-size"),
    ({"attention-backend": "flashinfr"}, "LAUNCH-VALUE error", "did you mean flashinfer?"),
    ({"tp-size": "eight"}, "LAUNCH-VALUE error", "a whole number"),
    ({"tp-size": 8.5}, "LAUNCH-VALUE error", "8.5"),
    ({"tp-size": [8]}, "LAUNCH-VALUE error", "[8]"),
    ({"mem-fraction-static": "most"}, "LAUNCH-VALUE error", "a number"),
    ({"mem-fraction-static": {"a": 1}}, "LAUNCH-VALUE error", "a number"),
    ({"context-length": "long"}, "LAUNCH-VALUE error", "131072 or 128k"),
    ({"context-length": "1.5Ki"}, "LAUNCH-VALUE error", "131072 or 128k"),
    ({"context-length": "128m"}, "LAUNCH-VALUE error", "131072 or 128k"),
    ({"trust-remote-code": "yes"}, "LAUNCH-VALUE error", "a switch takes no value"),
    ({"tp-size": True}, "LAUNCH-VALUE error", "it is no switch"),
    ({"cuda-graph-bs-decode": [1, "two"]}, "LAUNCH-VALUE error", "'two'"),
    ({"default-chat-template-kwargs": "{broken"}, "LAUNCH-VALUE error", "JSON"),
    ({"disable-cuda-graph": True}, "LAUNCH-DEPRECATED warning", "is deprecated in SGLang 0.5.23"),
    (
        {"model-loader-extra-config": {"enable_multithread_load": "true"}},
        "LAUNCH-JSON warning",
        "write enable_multithread_load: true without",
    ),
    ({"model-loader-extra-config": '{"enable_multithread_load": "Off"}'}, "LAUNCH-JSON warning", "load: false without"),
    ({"default-chat-template-kwargs": {"thinking": "no"}}, "LAUNCH-JSON warning", "write thinking: false"),
    ({"model-loader-extra-config": {"num_threads": "16"}}, "LAUNCH-LOADER error", "write num_threads: 16"),
    ({"model-loader-extra-config": '{"num_threads": 0}'}, "LAUNCH-LOADER error", "num_threads is 0"),
    ({"model-loader-extra-config": {"num_thread": 16}}, "LAUNCH-LOADER error", "did you mean num_threads?"),
    ({"model-loader-extra-config": {"x": 1}}, "LAUNCH-LOADER error", "SGLang takes enable_multithread_load and num_th"),
    ({"max-running-requests": -1}, "LAUNCH-VALUE error", "max-running-requests is -1, which is no count"),
    ({"tp-size": "0"}, "LAUNCH-VALUE error", "write 1 or more"),
    # a flag that SGLang spells otherwise is told where its form is looked at; its value all the same
    ({"tp_size": "eight"}, "LAUNCH-VALUE error", "sglang_server_launch.tp_size is 'eight'"),
    ({"--atention_backend": "triton"}, "LAUNCH-UNKNOWN error", "did you mean attention-backend?"),
    ({"enable-pcie-oneshot-allreduce": True}, "LAUNCH-UNKNOWN error", "remove it, or pin an SGLang that has it"),
]


@pytest.mark.parametrize(("flags", "expected", "said"), BAD)
def test_bad_flags(flags, expected, said):
    assert [" ".join(item) for item in found(flags)] == [expected]
    assert said in text(flags)


@pytest.mark.parametrize(
    ("name", "value", "expected", "said"),
    [
        ("SGLANG_ENABLE_JIT_DEEPGEMM", "0", [], ""),
        ("SGLANG_ENABLE_JIT_DEEPGEMM", "TRUE", [], ""),
        ("SGLANG_ENABLE_JIT_DEEPGEMM", "off", ["ENV-VALUE error"], "true, 1, yes, y, false, 0, no, n"),
        ("SGLANG_ENABLE_JIT_DEEPGEMM", "", ["ENV-VALUE error"], "''"),
        ("SGLANG_ENABLE_JIT_DEPGEMM", "0", ["ENV-UNKNOWN error"], "did you mean SGLANG_ENABLE_JIT_DEEPGEMM?"),
        ("SGLANG_ENABLE_SPEC_V2", "1", ["ENV-UNKNOWN error"], "remove it: it is of SGLang 0.5.9, 0.5.12, 0.5.13"),
        # near a name, but of other words
        ("SGLANG_ENABLE_QX_V2", "1", ["ENV-UNKNOWN warning"], "remove it, or pin"),
        ("SGLANG_QUITE_ANOTHER_THING_OF_A_COMPANION", "0", ["ENV-UNKNOWN warning"], "ignore it silently"),
        ("SGLANG_CACHE_DIT_SECONDARY_FN", "0", [], ""),  # put together in the source
        ("SGL_ENABLE_JIT_DEEPGEMM", "0", [], ""),
        ("SGLANG_SORT_WEIGHT_FILES", "-1", [], ""),
        ("SGLANG_SORT_WEIGHT_FILES", "many", ["ENV-VALUE error"], "write a number"),
        ("SGLANG_USE_CPU_ENGINE", "1", [], ""),  # read outside the registry
        ("SGLANG_DSPARK_FAST_SAMPLING", "1", ["ENV-DEPRECATED warning"], "remove it"),
        ("SGLANG_SIMULATE_ACC_LEN", "3", ["ENV-SIMULATED error"], "no output is valid"),
        ("SGLANG_SIMULATE_ACC_LEN", "0.5", ["ENV-SIMULATED error"], "no output is valid"),
        ("SGLANG_SIMULATE_ACC_LEN", "-1", ["ENV-SIMULATED warning"], "does nothing as it is"),
        ("SGLANG_SIMULATE_ACC_METHOD", "multinomial", ["ENV-SIMULATED warning"], "does nothing as it is"),
        ("NCCL_DEBUG", "trace", ["ENV-TRACE warning"], "WARN"),
        ("NCCL_DEBUG", "WARN", [], ""),
        ("FLASHINFER_DISABLE_VERSION_CHECK", "1", ["ENV-BYPASS warning"], "versions"),
        ("FLASHINFER_DISABLE_VERSION_CHECK", "0", [], ""),
        ("ANYTHING_ELSE", "x", [], ""),
    ],
)
def test_environment(name, value, expected, said):
    assert [" ".join(item) for item in found({}, {name: value})] == expected
    assert said in text({}, {name: value})


def test_without_a_description_only_relations_are_checked():
    assert found({"atention-backend": "triton"}, {"SGLANG_NO_SUCH": "1"}, engine=None) == []
    assert found({"speculative-num-steps": 3}, engine=None) == [("LAUNCH-TRIPLE", "error")]


# --- what a card of compute capability 12 has no kernels for


@pytest.mark.parametrize(
    ("flags", "expected", "said"),
    [
        ({"attention-backend": "fa3"}, "LAUNCH-BACKEND error", "write flashinfer or triton"),
        ({"speculative-draft-attention-backend": "trtllm_mha"}, "LAUNCH-BACKEND error", "speculative-draft-attention"),
        (
            {"moe-runner-backend": "flashinfer_trtllm"},
            "LAUNCH-BACKEND error",
            "moe-runner-backend is flashinfer_trtllm",
        ),
        ({"speculative-moe-runner-backend": "deep_gemm"}, "LAUNCH-BACKEND error", "speculative-moe-runner-backend is"),
        ({"fp8-gemm-backend": "deep_gemm"}, "LAUNCH-BACKEND error", "fp8-gemm-backend is deep_gemm"),
        ({"enable-torch-compile": True}, "LAUNCH-USELESS warning", "measure with and without it"),
        ({"enable-flashinfer-allreduce-fusion": True}, "LAUNCH-USELESS warning", "does nothing"),
    ],
)
def test_what_sm120_does_not_have(flags, expected, said):
    assert [" ".join(item) for item in found(flags, capability="12.0")] == [expected]
    assert said in text(flags, capability="12.0")
    assert found(flags, capability="10.0") == found(flags, capability=None) == []


def test_deepgemm_on_such_a_card():
    variables = {"SGLANG_ENABLE_JIT_DEEPGEMM": "1"}
    assert found({}, variables, capability="12.0") == [("LAUNCH-BACKEND", "error")]
    assert found({}, {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}, capability="12.0") == []
    assert found({}, variables, capability="9.0") == []


TREE = {"speculative-num-steps": 3, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 8}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({**TREE, "attention-backend": "trtllm_mha"}, ["LAUNCH-TREE error"]),
        ({**TREE, "attention-backend": "trtllm_mla", "page-size": 64}, ["LAUNCH-TREE error"]),
        ({**TREE, "attention-backend": "trtllm_mla", "page-size": 1}, []),
        ({**TREE, "attention-backend": "flashinfer", "page-size": 64}, []),
        ({**TRIPLE, "attention-backend": "trtllm_mha", "page-size": 64}, []),
        ({**TREE, "page-size": 64}, []),  # which backend it will be is not known
    ],
)
def test_trees_of_drafts(flags, expected):
    assert [" ".join(item) for item in found(flags)] == expected


# --- relations that hold


@pytest.mark.parametrize(
    ("flags", "other"),
    [
        ({"attention-backend": "trtllm_mla"}, {"capability": "10.0"}),
        ({"attention-backend": "trtllm_mla"}, {"capability": None}),
        ({"attention-backend": "triton"}, {"capability": "12.0"}),
        ({"moe-runner-backend": "marlin", "enable-metrics": True}, {"capability": "12.0"}),
        ({"speculative-algorithm": "EAGLE3"}, {"drafter": True}),
        ({"speculative-algorithm": "NGRAM"}, {"drafter": False}),
        ({"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 12}, {"drafter": False}),
        ({"speculative-algorithm": "EAGLE3", "speculative-adaptive": True, "speculative-num-steps": 3}, {}),
        ({"speculative-algorithm": "EAGLE"}, {"drafter": False, "own_drafter": True}),
        ({"speculative-algorithm": "NEXTN"}, {"drafter": False, "own_drafter": True}),
        ({}, {"drafter": False}),
        ({}, {"environment": {"NCCL_P2P_DISABLE": "0x0"}}),
        ({**TRIPLE, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 8}, {}),
        ({"pp-size": 2}, {}),
        ({"pp-size": 1, "speculative-algorithm": "EAGLE3"}, {}),
        ({"kv-cache-dtype": "fp8_e4m3"}, {"quantisation": "modelopt_fp4"}),
        ({"disable-custom-all-reduce": True}, {"environment": {"NCCL_P2P_DISABLE": "1"}}),
        ({}, {"environment": {"NCCL_P2P_DISABLE": "0"}}),
        ({}, {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}),
    ],
)
def test_relations_that_hold(flags, other):
    assert found(flags, **other) == []


@pytest.mark.parametrize(
    ("algorithm", "other", "expected"),
    [
        ("NEXTN", {"drafter": False}, "LAUNCH-NO-DRAFTER error"),
        ("standalone", {"drafter": False}, "LAUNCH-NO-DRAFTER error"),
        # layers of the target draft for EAGLE and NEXTN alone
        ("EAGLE3", {"drafter": False, "own_drafter": True}, "LAUNCH-NO-DRAFTER error"),
        (None, {"drafter": True}, "LAUNCH-NO-ALGORITHM warning"),
    ],
)
def test_drafters_and_algorithms(algorithm, other, expected):
    flags = {"speculative-algorithm": algorithm} if algorithm else {}
    assert [" ".join(item) for item in found(flags, **other)] == [expected]


@pytest.mark.parametrize("value", ["1", "0x1", "01", " 1"])
def test_peers_that_are_off_however_it_is_written(value):
    assert found({}, {"NCCL_P2P_DISABLE": value}) == [("LAUNCH-PEERS", "error")]


def test_several_faults_are_one_list():
    flags = {
        "atention-backend": "triton",
        "tp-size": "x",
        "speculative-num-steps": 3,
        "speculative-algorithm": "EAGLE3",
    }
    codes = [code for code, _ in found(flags, {"SGLANG_NO_SUCH": "1", "NCCL_P2P_DISABLE": "1"}, drafter=False)]
    assert codes == [
        "LAUNCH-UNKNOWN",
        "LAUNCH-VALUE",
        "ENV-UNKNOWN",
        "LAUNCH-NO-DRAFTER",
        "LAUNCH-TRIPLE",
        "LAUNCH-PEERS",
    ]


@pytest.mark.parametrize("name", ["lab", "example"])
def test_the_inventories_are_clean(name):
    settings = yaml.safe_load((ROOT / f"inventory/{name}/group_vars/inference/server.yml").read_text())
    assert found(settings["sglang_server_launch"], settings["sglang_server_environment"], capability="12.0") == []


def test_random_values_give_findings_and_no_traceback():
    rng = random.Random(22)  # noqa: S311 - the same in every run
    junk = [
        None,
        True,
        -1,
        10**400,
        10**5000,
        -(10**5000),
        1.5,
        float("nan"),
        "",
        "x" * 5000,
        "{",
        '{"a": [1',
        [],
        [[]],
        {},
        {1: 2},
        "\ud800",
    ]
    names = [*NEW["flags"], "no-such", "tp", ""]
    for _ in range(2000):
        flags = {rng.choice(names): rng.choice(junk) for _ in range(3)}
        environment = {rng.choice(list(NEW["environment"]["variables"])): rng.choice(junk) for _ in range(2)}
        for finding in check(launch(flags, environment, capability=rng.choice([None, "12.0", "x"]))):
            assert finding.message and finding.fix
