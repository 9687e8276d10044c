"""Faults that the field reported, each through the whole of preflight: seen where it is, silent where it is not.

The keys are those of the field's list of known faults. What no file of the controller can show is looked for on the
host or in a running server, and named at the end.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from pivot import faults
from pivot.inventory import check
from pivot.inventory.check import Host, Whole

ROOT = Path(__file__).parents[2]
IDS = "eagle_aux_hidden_state_layer_ids"
REVISION = "54383e83fa343a1331754112fb9e3410c55efa2f"
B01B = json.loads((ROOT / "tests/data/field-cases/B01b-drafter-config.json").read_text())
B01K = json.loads((ROOT / "tests/data/field-cases/B01k-drafter-mla-bad.json").read_text())
# Kimi-K2.5, a drafter like the public one, and how they would be served on eight cards of compute capability 12.0
RIGHT: dict[str, Any] = {
    "version": "0.5.23",
    "served": "moonshotai/Kimi-K2.5",
    "revision": REVISION,
    "target": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "quantization_config": {"quant_method": "compressed-tensors"},
        "text_config": {
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "vocab_size": 163840,
            "max_position_embeddings": 262144,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "rope_theta": 50000.0,
        },
    },
    "drafter": B01B,
    "header": {
        "d2t": {"dtype": "I64", "shape": [32000], "values": {"least": 0, "most": 163839, "moved": 31990}},
        "fc.weight": {"dtype": "BF16", "shape": [7168, 21504]},
        "norm.weight": {"dtype": "BF16", "shape": [7168]},
        "lm_head.weight": {"dtype": "BF16", "shape": [32000, 7168]},
        "midlayer.self_attn.q_proj.weight": {"dtype": "BF16", "shape": [8192, 14336]},
    },
    "contract": {
        "target": "moonshotai/Kimi-K2.5",
        "layers": [2, 30, 58],
        "convention": "input",
        "source": "SpecForge, model_providers.py",
    },
    "weights": 547 * 10**9,
    "launch": {
        "tp-size": 8,
        "context-length": 131072,
        "mem-fraction-static": 0.85,
        "attention-backend": "flashinfer",
        "disable-custom-all-reduce": True,
        "speculative-algorithm": "EAGLE3",
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
        "speculative-draft-model-quantization": "unquant",
    },
    "environment": {"NCCL_P2P_LEVEL": "SYS", "OMP_NUM_THREADS": "8"},
    "drafted": True,
}


def preflight(place: Path, world: dict[str, Any]) -> list[tuple[str, str]]:
    """Codes and severities of a host that is described like RIGHT."""
    models = {}
    for name, repository, config, header, size in (
        ("target", world["served"], world["target"], {}, world["weights"]),
        ("drafter", "AQ-MedAI/Kimi-K25-eagle3", world["drafter"], world["header"], 6 * 10**9),
    ):
        manifest = {"format": 1, "repository": repository, "revision": world["revision"], "config": config}
        manifest["files"] = {"model.safetensors": {"sha256": "0" * 64, "size": size}}
        manifest["safetensors"] = {"model.safetensors": header} if header else {}
        (place / f"{name}.json").write_text(json.dumps(manifest))
        models[name] = {"repository": repository, "revision": world["revision"], "source": str(place)}
        models[name]["manifest"] = str(place / f"{name}.json")
    pins = {"engines": {}, "models": {**models, "drafter": {**models["drafter"], "contract": world["contract"]}}}
    drafter = f"/models/{models['drafter']['repository']}/{world['revision']}" if world["drafted"] else None
    (place / "server.yml").write_text("# the level of this board\nNCCL_P2P_LEVEL: SYS\n")
    values = {
        "pivot_pins": pins,
        "model_weights_models": list(models.values()),
        "sglang_engine_version": world["version"],
        "sglang_server_model_path": f"/models/{world['served']}/{world['revision']}",
        "sglang_server_drafter_path": drafter,
        "sglang_server_launch": world["launch"],
        "sglang_server_environment": world["environment"],
        "gpu_runtime_accelerator": "cuda",
        "gpu_runtime_memory_gib": 95.6,
        "gpu_runtime_compute_capability": "12.0",
    }
    host = Host(name="llm01", given=frozenset(), values=values, problems={}, place=place)
    whole = Whole({"all": ["llm01"], "inference": ["llm01"]}, {}, {}, place)
    report = check.run([host], whole, {}, place, lambda *_: [], roles=())
    assert all(finding.fix or finding.severity == "info" for finding in report.findings)
    return [(finding.code, str(finding.severity)) for finding in report.findings]


def world(**changes: Any) -> dict[str, Any]:
    """RIGHT with places changed, written ``part__key``; None removes."""
    result = copy.deepcopy(RIGHT)
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if not key:
            result[part] = value
            continue
        key = key.replace("_", "-") if part == "launch" else key
        result[part] = {other: kept for other, kept in result[part].items() if other != key}
        if value is not None:
            result[part][key] = value
    return result


def header(name: str, entry: Any) -> dict[str, Any]:
    kept = {key: value for key, value in RIGHT["header"].items() if key != name}
    return {"header": {**kept, name: entry} if entry else kept}


def drafter(**changes: Any) -> dict[str, Any]:
    return {"drafter": {**B01B, **changes}}


def ids(*values: int) -> dict[str, Any]:
    return drafter(eagle_config={IDS: list(values), "use_aux_hidden_state": True})


SEEN: list[tuple[str, dict[str, Any], str]] = [
    ("E-01", {"version": "0.5.12"}, "DRAFTER-LAYERS"),
    ("E-01", ids(3, 31, 59), "DRAFTER-LAYERS"),
    ("E-02", {**drafter(eagle_config={}, **{IDS: [4, 20, 40]})}, "DRAFTER-KEY"),
    ("E-03", ids(2, 30, 61), "DRAFTER-RANGE"),
    ("E-03", ids(2, 30), "DRAFTER-FC"),
    ("E-04", drafter(eagle_config={IDS: [2, 30, 58], "use_aux_hidden_state": False}), "DRAFTER-NO-AUX"),
    ("E-04", {"version": "0.5.9"}, "DRAFTER-TARGET-CLASS"),
    ("E-05", header("surprise.weight", {"dtype": "BF16", "shape": [1]}), "DRAFTER-WEIGHTS"),
    ("E-06", header("d2t", None), "DRAFTER-D2T"),
    ("E-06", header("d2t", {"dtype": "I64", "shape": [32000], "values": {"moved": 0}}), "DRAFTER-D2T"),
    ("E-06", header("d2t", {"dtype": "I64", "shape": [32000], "values": {"most": 190000}}), "DRAFTER-D2T"),
    ("E-07", header("lm_head.weight", None), "DRAFTER-HEAD"),
    ("E-08", drafter(max_position_embeddings=2048), "DRAFTER-CONTEXT"),
    ("E-08", drafter(rope_theta=10), "DRAFTER-ROPE"),
    ("E-09", {"launch__speculative_draft_model_quantization": None}, "DRAFTER-QUANT-INHERITED"),
    ("E-10", {"launch__attention_backend": "flashmla"}, "DRAFTER-BACKEND"),
    ("E-11", {"served": "moonshotai/Kimi-K2.6"}, "DRAFTER-TARGET"),
    ("E-11", {"revision": "main"}, "DRAFTER-UNPINNED"),
    ("E-12", {"version": "0.5.11", **drafter(model_type="kimi_k2")}, "DRAFTER-ENGINE-FAULT"),
    ("E-13", {"drafted": False}, "LAUNCH-NO-DRAFTER"),
    ("E-14", {"launch__speculative_eagle_topk": 4, "environment__SGLANG_ENABLE_SPEC_V2": "1"}, "LAUNCH-SPEC-V2"),
    ("E-15", {"launch__speculative_num_draft_tokens": 24}, "LAUNCH-TRIPLE"),
    ("E-15", {"launch__speculative_num_steps": None}, "LAUNCH-TRIPLE"),
    ("E-16", {"version": "0.5.5.post3"}, "DRAFTER-ENGINE-FAULT"),
    ("E-18", {"environment__SGLANG_SIMULATE_ACC_LEN": "3"}, "ENV-SIMULATED"),
    ("E-21", {"drafter": {**B01K, "num_hidden_layers": 2}}, "DRAFTER-NUM-LAYERS"),
    ("E-21", {"drafter": B01K, "version": "0.5.12"}, "DRAFTER-NORMS"),
    ("E-22", {"launch__pp_size": 2}, "LAUNCH-PIPELINE"),
    ("E-23", {"contract__layers": [2, 30, 58], "contract__convention": "output"}, "DRAFTER-LAYERS"),
    ("S-01", {"launch__attention_backend": "trtllm_mla"}, "LAUNCH-BACKEND"),
    ("S-03", {"environment__SGLANG_ENABLE_JIT_DEEPGEMM": "1"}, "LAUNCH-BACKEND"),
    ("S-06", {"launch__kv_cache_dtype": "fp8_e4m3"}, "LAUNCH-KV-DTYPE"),
    ("S-06", {"launch__kv_cache_dtype": "fp8_e5m2", "drafted": False}, "LAUNCH-KV-DTYPE"),
    ("S-07", {"launch__enable_flashinfer_allreduce_fusion": True}, "LAUNCH-USELESS"),
    ("S-08", {"launch__enable_torch_compile": True}, "LAUNCH-USELESS"),
    ("S-09", {"launch__mem_fraction_static": 0.94}, "BUDGET-ROOM"),
    ("S-10", {"launch__tp_size": 4}, "BUDGET-WEIGHTS"),
    ("S-11", {"environment__SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}, "ENV-BYPASS"),
    ("N-03", {"environment__NCCL_P2P_DISABLE": "1", "launch__disable_custom_all_reduce": None}, "LAUNCH-PEERS"),
    ("N-07", {"environment__NCCL_P2P_LEVEL": "5"}, "NCCL-LEVEL"),
    ("N-11", {"environment__NCCL_DEBUG_FILE": "/var/log/sglang/nccl.%h.%p"}, "NCCL-DEBUG-FILE"),
    ("N-11", {"environment__NCCL_DEBUG": "TRACE"}, "ENV-TRACE"),
    (
        "N-13",
        {
            "environment__PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "launch__enable_pcie_oneshot_allreduce": True,
        },
        "LAUNCH-SEGMENTS",
    ),
    ("O-16", {"environment__SGLANG_ENABLE_JIT_DEEPGEMM": "off"}, "ENV-VALUE"),
]
ELSEWHERE = {
    "E-17": "answers of the server: HEALTH-LOOP",
    "E-19": "make bench",
    "E-20": "pivot diagnose",
    "S-02": "caches of the host",
    "S-04": "answers of the server: HEALTH-LOOP",
    "S-05": "answers of the server: HEALTH-LOOP",
    "S-12": "pivot diagnose",
    "N-01": "pivot diagnose",
    "N-02": "the node",
    "N-04": "profiles of data/nccl_profiles.yml",
    "N-05": "the node",
    "N-06": "the node",
    "N-08": "pivot diagnose",
    "N-09": "files that settings name, in the container",
    "N-10": "the memory budget's room",
    "N-12": "the unit file: INSPECT findings, and the rendering of Pivot's own",
    "N-14": "profiles of data/nccl_profiles.yml",
}


def test_the_right_configuration_is_clean(tmp_path):
    assert preflight(tmp_path, world()) == []


@pytest.mark.parametrize(("fault", "changes", "code"), SEEN, ids=lambda item: item if isinstance(item, str) else "")
def test_a_known_fault_is_seen(tmp_path, fault, changes, code):
    assert fault.partition("-")[0] in ("E", "S", "N", "O")
    assert code in {found for found, _ in preflight(tmp_path, world(**changes))}
    assert code in faults.codes()


def test_all_of_them_at_once_are_one_list(tmp_path):
    together = {
        **ids(2, 30, 61),
        "launch__attention_backend": "trtllm_mla",
        "launch__tp_size": 4,
        "launch__speculative_num_draft_tokens": 9,
        "environment__NCCL_P2P_LEVEL": "5",
        "environment__SGLANG_SIMULATE_ACC_LEN": "3",
        "environment__SGLANG_ENABLE_JIT_DEEPGEMM": "off",
    }
    codes = {code for code, _ in preflight(tmp_path, world(**together))}
    assert codes >= {
        *("DRAFTER-RANGE", "DRAFTER-LAYERS", "DRAFTER-BACKEND", "LAUNCH-BACKEND", "BUDGET-WEIGHTS", "LAUNCH-TRIPLE"),
        *("NCCL-LEVEL", "ENV-SIMULATED", "ENV-VALUE"),
    }


def test_the_fields_list_is_accounted_for():
    listed = {
        f"{letter}-{number:02}" for letter, last in (("E", 23), ("S", 12), ("N", 14)) for number in range(1, last + 1)
    }
    assert {fault for fault, _, _ in SEEN} - {"O-16"} | ELSEWHERE.keys() == listed
