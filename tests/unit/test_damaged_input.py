"""Whatever other people's files hold ends in findings or one sentence: no traceback, bounded time and memory.

A few dozen examples a property, the same in every run; PIVOT_SOAK=1 makes it hundreds, and new ones each time.
"""

import contextlib
import io
import json
import os
import struct
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pivot import findings
from pivot.checkpoints import manifest, tensors
from pivot.checkpoints.tensors import WeightsError
from pivot.drafters import model
from pivot.drafters.pair import Pair
from pivot.engines import descriptions, engine_models
from pivot.inventory import check, inventory, pins
from pivot.inventory.check import Host, Whole

ROOT = Path(__file__).parents[2]
SOAK = bool(os.environ.get("PIVOT_SOAK"))
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
ENGINE = descriptions.load("0.5.23")
IDS = "eagle_aux_hidden_state_layer_ids"
LONGEST = findings.LONGEST
SECONDS = 60  # an example that takes longer hangs, on any machine


def examples(count: int) -> settings:
    phases = tuple(Phase) if SOAK else (Phase.explicit, Phase.generate)
    return settings(
        max_examples=count * 10 if SOAK else count,
        derandomize=not SOAK,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=CHECKS,
    )


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SECONDS


def readable(*texts: str) -> None:
    """What a terminal can print and a person read."""
    for text in texts:
        text.encode()
        assert "Traceback" not in text


# --- strategies

# also halves of characters, which JSON can hold and no file can
TEXTS = st.text(st.characters(codec=None), max_size=12) | st.sampled_from(["", "x" * 5000, "\ud800", "\x00\x1b[2J"])
NUMBERS = st.integers(-4, 100) | st.sampled_from([2**31, 2**63, -(2**64), 10**30, 10**4000, -(10**4000)])
FLOATS = st.floats() | st.sampled_from([float("nan"), float("inf"), 1e308])
LEAVES = st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)


def beside(*usual: Any) -> st.SearchStrategy[Any]:
    """Mostly what is usual, sometimes anything."""
    return st.sampled_from(usual) | VALUES


def objects(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with some of these keys and some others, or no object at all."""
    known = st.fixed_dictionaries({}, optional=dict(keys))
    return st.builds(lambda a, b: {**b, **a}, known, st.dictionaries(TEXTS, VALUES, max_size=2)) | VALUES


LAYER_IDS = beside([2, 30, 58], [1, 29, 57], [0, 3, 6], [2, 30], None)
CONFIGS = objects(
    architectures=beside(
        ["LlamaForCausalLMEagle3"], ["Eagle3DeepseekV2ForCausalLM"], ["KimiK25ForConditionalGeneration"]
    ),
    model_type=beside("llama", "kimi_k2", "kimi_k25"),
    num_hidden_layers=beside(1, 61),
    hidden_size=beside(7168, 4096),
    target_hidden_size=beside(7168),
    vocab_size=beside(163840),
    draft_vocab_size=beside(32000, None),
    max_position_embeddings=beside(262144),
    rope_theta=beside(1e6),
    rope_scaling=objects(factor=beside(64.0), original_max_position_embeddings=beside(4096)),
    rope_parameters=objects(rope_type=beside("yarn")),
    quantization_config=objects(quant_method=beside("fp8")),
    eagle_config=objects(**{IDS: LAYER_IDS, "use_aux_hidden_state": beside(True, False)}),
    tie_word_embeddings=beside(True),
    fc_norm=beside(True),
    **{IDS: LAYER_IDS},
)
TARGETS = objects(architectures=beside(["KimiK25ForConditionalGeneration"]), text_config=CONFIGS)
FACTS = objects(least=beside(0), most=beside(163839), distinct=beside(32000), moved=beside(0), marked=beside(32000))
ENTRIES = objects(dtype=beside("BF16", "I64", "BOOL"), shape=beside([32000], [7168, 21504]), values=FACTS)
NAMES = st.sampled_from(["d2t", "t2d", "fc.weight", "lm_head.weight", "midlayer.mlp.up_proj.weight"]) | TEXTS
HEADERS = st.dictionaries(NAMES, ENTRIES, max_size=5) | VALUES
CONTRACTS = objects(target=beside("a/b"), layers=LAYER_IDS, convention=beside("input", "output", None))
FLAGS = objects(
    **{"speculative-algorithm": beside("EAGLE3"), "context-length": beside(131072), "tp-size": beside(8)},
    **{"quantization": beside("fp8"), "attention-backend": beside("fa3"), "mem-fraction-static": beside(0.85)},
)
ENVIRONMENTS = objects(NCCL_P2P_LEVEL=beside("SYS"), SGLANG_ENABLE_SPEC_V2=beside("1", "on"))


# --- the drafter contract


@examples(60)
@given(TARGETS, CONFIGS, HEADERS, LAYER_IDS, CONTRACTS, FLAGS, st.sampled_from(["0.5.23", "0.5.7", "x"]))
def test_any_pair_gets_a_verdict(target, drafter, tensors, ids, contract, flags, version):
    pair = Pair(
        subject="llm01",
        target=target,
        drafter=drafter,
        tensors=tensors,
        layer_ids=ids,
        version=version,
        engine=ENGINE if version == "0.5.23" else None,
        flags=flags if isinstance(flags, dict) else {},
        contract=contract,
        served="a/b",
        revisions={"a/b": ids},
    )
    with in_time():
        verdict = model.check(pair)
        readable(verdict.text(), findings.render(verdict.findings))
    assert len(verdict.line) < LONGEST
    assert all(len(item.message) <= LONGEST and len(item.fix) <= LONGEST for item in verdict.findings)


# --- everything that preflight looks at

SPECS = inventory.role_specs(ROOT / "roles")
MANIFESTS = st.sampled_from(["kimi-k25-tiny.json", "kimi-k25-tiny-eagle3.json", "nowhere.json", ".", "\x00"])
MODELS = objects(repository=beside("a/b"), revision=beside("r1"), manifest=MANIFESTS, contract=CONTRACTS, source=TEXTS)
REGISTRIES = objects(
    engines=st.dictionaries(TEXTS, objects(version=beside("0.5.23"), lock=beside("requirements/x")), max_size=2),
    models=st.dictionaries(TEXTS, MODELS, max_size=2),
    driver=VALUES,
)
HOSTS = st.fixed_dictionaries(
    {"pivot_pins": REGISTRIES, "sglang_server_launch": FLAGS, "sglang_server_environment": ENVIRONMENTS},
    optional={
        "model_weights_models": st.lists(MODELS, max_size=2) | VALUES,
        "sglang_engine_version": beside("0.5.23", "../../x"),
        "sglang_engine_lock": beside("requirements/engine/cuda-py312.lock"),
        "sglang_server_model_path": beside("/models/a/b/r1"),
        "sglang_server_drafter_path": beside("/models/a/b/r1"),
        "sglang_server_drafter_config": CONFIGS,
        "sglang_server_eagle_layer_ids": LAYER_IDS,
        "sglang_server_nccl_profile": VALUES,
        "gpu_runtime_accelerator": beside("cuda"),
        "gpu_runtime_memory_gib": beside(95.6),
        "gpu_runtime_compute_capability": beside("12.0"),
        "proxmox_container_devices": st.lists(TEXTS | st.sampled_from(["/dev/nvidia0,mode=666"]), max_size=3) | VALUES,
        "pivot_waivers": objects(**{"VAR-TYPE": TEXTS}),
    },
)


@examples(50)
@given(HOSTS, st.dictionaries(TEXTS, VALUES, max_size=2), st.dictionaries(TEXTS, VALUES, max_size=2))
def test_any_variables_get_a_report(values, addresses, waivers):
    given_host = Host(name="llm01", given=frozenset(values), values=values, problems={}, place=ROOT / "inventory/lab")
    groups = {"all": ["llm01"], "inference": ["llm01"], "ungrouped": []}
    shared = {"llm01": {"ansible_host": addresses}, "llm02": {"ansible_host": addresses}}
    whole = Whole(groups, shared, {"llm01": waivers}, ROOT)
    with in_time():
        report = check.run([given_host], whole, SPECS, ROOT, lambda *_: [], roles=check.ROLES)
        readable(report.text())
        json.dumps(report.as_dict()).encode()


@examples(60)
@given(REGISTRIES, st.binary(max_size=40) | HEADERS.map(lambda data: json.dumps(data, default=str).encode()))
def test_any_registry_and_manifest_get_findings(tmp_path_factory, registry, manifest):
    place = tmp_path_factory.getbasetemp()
    for name in ("kimi-k25-tiny.json", "kimi-k25-tiny-eagle3.json"):
        (place / name).write_bytes(manifest)
    with in_time():
        readable(findings.render(pins.check(registry, place, place)))


@examples(40)
@given(VALUES, VALUES)
def test_any_waivers_are_judged(waivers, other):
    found = findings.Finding("VAR-TYPE", findings.Severity.ERROR, "a", "b", "c")
    readable(findings.render(findings.waive("a", [found], waivers, lambda: {"VAR-TYPE"})))
    check.accepted({"a": waivers, "b": other})


# --- files of models


def safetensors(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


OFFSETS = beside([0, 16], [16, 20], [-4, 12], [4, 0])
FIELDS = objects(dtype=beside("I64", "BF16", "U8"), shape=beside([2], [8], [4, 2]), data_offsets=OFFSETS)
LYING = st.builds(
    safetensors,
    st.dictionaries(NAMES, FIELDS, max_size=3).map(lambda data: json.dumps(data).encode("utf-8", "surrogatepass")),
    st.binary(max_size=24),
    st.none() | st.integers(0, 64) | st.sampled_from([2**63, 2**64 - 1, 10**8]),
)
TRUE = safetensors(json.dumps({"d2t": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}).encode(), bytes(16))
DAMAGED = st.builds(
    lambda raw, cut, place, byte: (raw[:place] + bytes([byte]) + raw[place + 1 :])[:cut],
    st.just(TRUE),
    st.integers(0, len(TRUE)),
    st.integers(0, len(TRUE) - 1),
    st.integers(0, 255),
)


@examples(120)
@given(LYING | DAMAGED | st.binary(max_size=64), CONFIGS | st.binary(max_size=32))
def test_any_model_directory_has_a_manifest_or_one_sentence(tmp_path_factory, content, config):
    place = tmp_path_factory.getbasetemp() / "owner/model"
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.safetensors").write_bytes(content)
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    (place / "config.json").write_bytes(raw)
    out, complaint = place.parent / "manifest.json", io.StringIO()
    out.unlink(missing_ok=True)
    with in_time(), contextlib.redirect_stderr(complaint):
        status = manifest.main([str(place), "--output", str(out)])
    if status:
        assert status == 1
        readable(complaint.getvalue())
        assert complaint.getvalue().count("\n") == 1
        assert len(complaint.getvalue()) <= LONGEST + 20
    else:
        again = manifest.load_manifest(out)
        assert again.files.keys() == {"model.safetensors", "config.json"}


@examples(60)
@given(objects(format=beside(1), repository=beside("a/b"), revision=beside("r"), config=CONFIGS, safetensors=HEADERS,
               files=st.dictionaries(TEXTS, objects(sha256=beside("0" * 64), size=beside(1)), max_size=2)))  # fmt: skip
def test_any_manifest_is_read_or_refused_in_a_sentence(data):
    try:
        manifest.parse_manifest(data, "m.json")
    except WeightsError as error:
        readable(str(error))
        assert len(str(error)) <= LONGEST


def test_lies_about_sizes_cost_no_memory(tmp_path):
    path = tmp_path / "model.safetensors"
    tracemalloc.start()
    try:
        for length in (2**64 - 1, 2**63, 99_000_000, 1000):
            path.write_bytes(struct.pack("<Q", length) + b"{}")
            with pytest.raises(WeightsError):
                tensors.read_header(path)
        huge = {"d2t": {"dtype": "I64", "shape": [2**40], "data_offsets": [0, 2**43]}}
        path.write_bytes(safetensors(json.dumps(huge).encode(), b""))
        with pytest.raises(WeightsError):
            tensors.read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_very_many_ids_and_tensors_cost_little():
    header = {f"midlayer.x{number}": {"dtype": "BF16", "shape": [1]} for number in range(20_000)}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: list(range(10**6))}}
    with in_time():
        verdict = model.check(
            Pair(subject="x", target=config, drafter=config, tensors=header, version="0.5.23", engine=ENGINE)
        )
        assert all(len(item.message) <= LONGEST for item in verdict.findings)


# --- an inventory with files that are none


def test_links_in_a_circle_pipes_and_bytes_of_no_text(tmp_path):
    folder = tmp_path / "group_vars/all"
    folder.mkdir(parents=True)
    (folder / "circle.yml").symlink_to(folder / "circle.yml")
    (folder / "up").symlink_to(tmp_path)
    (folder / "gone.yml").symlink_to(tmp_path / "nowhere")
    (folder / "folder.yml").mkdir()
    (folder / "latin.yml").write_bytes(b"# \xe9\xff\nport: 1\n")
    os.mkfifo(folder / "pipe.yml")
    with in_time():
        assert inventory.where_set("port", tmp_path) == "group_vars/all/latin.yml:2"
        assert inventory.vaults(tmp_path) == []
        findings_of_a_host = inventory.unknown_variables("x", ["sglang_server_prot"], SPECS, tmp_path)
        assert [item.code for item in findings_of_a_host] == ["VAR-UNKNOWN"]


def test_a_model_directory_with_links_in_a_circle(tmp_path):
    for name in ("itself", "config.json"):
        (tmp_path / name).symlink_to(tmp_path / name)
    with in_time(), pytest.raises(WeightsError, match="symbolic link"):
        manifest.list_files(tmp_path)
    with in_time(), pytest.raises(WeightsError, match="is not a directory"):
        manifest.list_files(tmp_path / "itself")
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "itself").unlink()
    (tmp_path / "config.json").unlink()
    with in_time(), pytest.raises(WeightsError, match="not a regular file"):
        manifest.list_files(tmp_path)


# --- wheels

PYTHON = st.sampled_from(
    [
        "class ServerArgs:\n    port: A[int, Arg(help='x')] = 1\n",
        "class ServerArgs:\n    x: A[" + "[" * 60 + "]" * 60 + ", 1] = 1\n",
        f"class DeepseekV2ForCausalLM:\n    def {engine_models.SETTER}(self, ids=None):\n        self.x = ids\n",
        "x = " + "-" * 900 + "1\n",
        "x = " + "(" * 300 + ")" * 300 + "\n",
        "x = " + "+".join(["1"] * 3000) + "\n",
        "def f(:\n",
        "\x00",
        "\ufeffx = 1\n",
    ]
) | st.text(max_size=60)
FILES = st.dictionaries(
    st.sampled_from(
        [
            "sglang-0.5.23.dist-info/METADATA", "sglang/srt/server_args.py", "sglang/srt/environ.py",
            "sglang/srt/models/deepseek_v2.py", "sglang/srt/models/llama_eagle3.py",
            "sglang/srt/model_executor/model_runner.py", "sglang/srt/utils/common.py",
            "sglang/srt/arg_groups/fields/a.py",
        ]
    ),
    PYTHON | st.just("Version: 0.5.23\n"),
    max_size=6,
)  # fmt: skip


@examples(20)
@given(FILES, st.integers(0, 60), st.booleans())
def test_any_wheel_is_described_or_refused_in_a_sentence(tmp_path_factory, files, cut, deflated):
    path = tmp_path_factory.getbasetemp() / "sglang-0.5.23-py3-none-any.whl"
    how = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, text in {"sglang-0.5.23.dist-info/METADATA": "Version: 0.5.23\n", **files}.items():
            archive.writestr(name, text.encode("utf-8", "surrogatepass"))
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) - cut] if cut > 40 else raw)
    complaint, text = io.StringIO(), io.StringIO()
    with in_time(), contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(text):
        status = descriptions.main(["describe", str(path)])
    readable(complaint.getvalue())
    assert (status, complaint.getvalue().count("\n")) in ((0, 0), (1, 1))
    assert status or json.loads(text.getvalue())["version"]


@pytest.mark.parametrize(("depth", "said"), [(50, ""), (600, "nested deeper"), (100_000, "that could be read")])
def test_source_that_is_nested_without_end(tmp_path, depth, said):
    path = tmp_path / "sglang-0.5.23-py3-none-any.whl"
    deep = "+".join(["1"] * depth)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sglang-0.5.23.dist-info/METADATA", "Version: 0.5.23\n")
        archive.writestr("sglang/srt/server_args.py", "class ServerArgs:\n    port: int = 1\n")
        archive.writestr("sglang/srt/environ.py", f"x = {deep}\nclass Envs:\n    SGLANG_X = EnvInt({deep})\n")
    with in_time():
        try:
            assert descriptions.describe(path)["version"] == "0.5.23"
        except descriptions.DescriptionError as error:
            assert said and said in str(error)
        else:
            assert not said


def test_the_table_of_faults_is_text():
    assert yaml.safe_load((ROOT / "src/pivot/data/engine_faults.yml").read_text(encoding="utf-8"))["faults"]
    assert sys.getrecursionlimit() >= 1000
