"""Descriptions of engines: how source is read, what is kept, and that the kept ones are those of the real wheels."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from pivot.engines import descriptions, engine_models
from pivot.engines.descriptions import DATA, describe, faults, load, render, versions_with
from pivot.engines.engine_models import CAPTURES, SETTERS
from pivot.engines.engine_source import DescriptionError, shape

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.5.9", "0.5.12", "0.5.13", "0.5.23")
KIMI = "KimiK25ForConditionalGeneration"

ENVIRON = '''
class EnvField: ...
class EnvBool(EnvField):
    def parse(self, value):
        """Words."""
        value = value.lower()
        if value in ["true", "1"]:
            return True
        if value in ["false", "0"]:
            return False
        raise ValueError(value)
class Envs:
    SGLANG_SWITCH = EnvBool(False)
    SGLANG_OLD_SWITCH = EnvBoolWithAlias(True, deprecated_name="SGLANG_OLDER")
    SGLANG_COUNT = EnvInt(3)
    NOT_ONE = 7
_DEPRECATED_ENVS = {"SGLANG_GONE": _DeprecatedEnv(note="SGLANG_COUNT instead")}
'''
SERVER = """
CHOICES = ["a", "b"]
class ServerArgs:
    model_path: str
    tp_size: int = 1
    level: str = "a"
    threshold: float = -1.5
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True, help="x")
        parser.add_argument("--tp-size", type=int, default=ServerArgs.tp_size)
        parser.add_argument("--level", type=str, choices=CHOICES + ["c"], default=ServerArgs.level)
        parser.add_argument("--computed", type=str, choices=list(Registry.keys()), default=ServerArgs.nowhere)
        parser.add_argument("--threshold", type=float, default=ServerArgs.threshold)
        parser.add_argument("--switch", action="store_true")
        parser.add_argument("--pair", action=argparse.BooleanOptionalAction, default=True)
        parser.add_argument("--old", action=DeprecatedAction)
        parser.add_argument("--many", type=int, nargs="+")
        parser.add_argument("--extra", type=json.loads)
        parser.add_argument(name_made_elsewhere, type=int)
"""
FIELDS = """
class Spec:
    _NS_PATH = "spec"
    algorithm: A[Optional[str], "Which."] = None
    steps: A[Optional[int], Arg(help="Steps.", aliases=["--n-steps"])] = 3
    mode: A[Literal["x", "y"], "Mode."] = "x"
    backend: A[str | None, Arg(help="B.", choices=CHOICES)] = None
    fast: A[bool, "Fast."] = False
    sizes: A[Optional[List[int]], "Sizes."] = None
    hidden: A[int, Arg(no_cli=True)] = 1
    renamed: A[float, Arg(help="R.", cli_name="--other-name")] = 0.5
    late: A[int, "Late."] = compute()
    unannotated: int = 4
"""
MODEL = """
class Model:
    def __init__(self, config):
        self.layers_to_capture = []
    def forward(self, hidden_states, residual):
        aux_hidden_states = []
        for i in range(self.start_layer, self.end_layer):
            if i in self.layers_to_capture:
                aux_hidden_states.append(hidden_states + residual)
            layer = self.layers[i]
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
        return hidden_states
class Served:
    def __init__(self, config):
        self.model = Model(config)
    def set_eagle3_layers_to_capture(self, layer_ids: Optional[List[int]] = None):
        if not self.pp_group.is_last_rank:
            return

        if layer_ids is None:
            self.capture_aux_hidden_states = True
            num_layers = self.config.num_hidden_layers
            self.model.layers_to_capture = [2, num_layers // 2, num_layers - 3]
        else:
            self.capture_aux_hidden_states = True
            # any comment
            self.model.layers_to_capture = [val + 1 for val in layer_ids]
class Child(Served):
    pass
class Plain:
    pass
EntryClass = [Served, Child, Plain]
"""
WRAPPER = """
from sglang.srt.models.inner import Child
class Wrapper:
    def __init__(self, config):
        self.language_model = None
        self.language_model = Child(config)
    def set_eagle3_layers_to_capture(self, layer_ids: Optional[List[int]] = None) -> None:
        '''Words.'''
        if self.language_model is None or not hasattr(self.language_model, "set_eagle3_layers_to_capture"):
            raise AttributeError("language_model does not support EAGLE3 speculative decoding.")
        self.language_model.set_eagle3_layers_to_capture(layer_ids)
EntryClass = Wrapper
"""


@pytest.fixture
def wheel(tmp_path):
    """A function that writes a small wheel; files by their path below sglang/srt."""

    def write(**changes):
        files = {"server_args.py": SERVER, "environ.py": ENVIRON, "models/inner.py": MODEL, "models/outer.py": WRAPPER}
        path = tmp_path / "sglang-0.0.1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("sglang-0.0.1.dist-info/METADATA", "Name: sglang\nVersion: 0.0.1\n")
            for name, text in {**files, **changes}.items():
                archive.writestr(f"sglang/srt/{name}", text)
        return path

    return write


def test_flags_of_the_older_form(wheel):
    flags = describe(wheel())["flags"]
    assert flags == {
        "model-path": {"type": "str", "aliases": ["model"]},
        "tp-size": {"type": "int", "default": 1},
        "level": {"type": "str", "choices": ["a", "b", "c"], "default": "a"},
        "computed": {"type": "str", "choices": None, "default": None, "unknown": ["default", "choices"]},
        "threshold": {"type": "float", "default": -1.5},
        "switch": {"type": "bool"},
        "pair": {"type": "on-off", "default": True},
        "old": {"type": None, "deprecated": True},
        "many": {"type": "int", "nargs": "+"},
        "extra": {"type": "json"},
    }


def test_flags_of_annotated_fields(wheel):
    files = {"arg_groups/fields/spec.py": FIELDS, "arg_groups/choices.py": 'CHOICES = ["p", "q"]\n'}
    flags = describe(wheel(**files, **{"server_args.py": "class ServerArgs: ...\n"}))["flags"]
    assert flags == {
        "algorithm": {"type": "str", "default": None},
        "steps": {"type": "int", "default": 3, "aliases": ["n-steps"]},
        "mode": {"type": "str", "choices": ["x", "y"], "default": "x"},
        "backend": {"type": "str", "choices": ["p", "q"], "default": None},
        "fast": {"type": "bool", "default": False},
        "sizes": {"type": "int", "nargs": "+", "default": None},
        "other-name": {"type": "float", "default": 0.5},
        "late": {"type": "int", "default": None, "unknown": ["default"]},
    }


def test_environment_variables_by_their_parser(wheel):
    files = {
        "elsewhere.py": 'os.getenv("SGLANG_READ_ELSEWHERE")\nos.getenv(f"SGLANG_FAMILY_{x}")\n',
        "kernel.cuh": 'getenv("SGLANG_IN_C")',
        "core.so": b"\x00\x01SGLANG_COMPILED\x00".decode(),
    }
    environment = describe(wheel(**files))["environment"]
    assert environment["families"] == ["SGLANG_FAMILY_"]
    assert environment["booleans"] == {"true": ["true", "1"], "false": ["false", "0"]}
    assert environment["deprecated"] == ["SGLANG_GONE"]
    assert environment["variables"] == {
        "SGLANG_COMPILED": None,
        "SGLANG_COUNT": "int",
        "SGLANG_GONE": None,
        "SGLANG_IN_C": None,
        "SGLANG_OLDER": None,
        "SGLANG_OLD_SWITCH": "bool",
        "SGLANG_READ_ELSEWHERE": None,
        "SGLANG_SWITCH": "bool",
    }


def test_the_rule_is_found_through_bases_imports_and_wrappers(wheel):
    description = describe(wheel())
    assert description["architectures"] == ["Child", "Plain", "Served", "Wrapper"]
    assert sorted(description["eagle3"]) == ["Child", "Served", "Wrapper"]
    for entry in description["eagle3"].values():
        assert (entry["rule"], entry["keeps"], entry["embedding"]) == ("always_plus_one", "input", "fails")
        assert entry["setter"] == "inner.Served"
    assert description["eagle3"]["Wrapper"]["through"] == "outer.Wrapper"


@pytest.mark.parametrize(
    ("old", "new", "rule", "keeps"),
    [
        ("val + 1 for val", "val + 2 for val", None, "input"),
        ("num_layers - 3", "num_layers - 4", None, "input"),
        ("append(hidden_states + residual)", "append(hidden_states)", "always_plus_one", None),
        ("            layer = self.layers[i]\n", "", "always_plus_one", None),
        ("# any comment", "# another comment", "always_plus_one", "input"),
    ],
)
def test_a_shape_nobody_verified_has_no_rule(wheel, old, new, rule, keeps):
    assert old in MODEL
    entry = describe(wheel(**{"models/inner.py": MODEL.replace(old, new)}))["eagle3"]["Served"]
    assert (entry["rule"], entry["keeps"]) == (rule, keeps)


def test_a_wrapper_around_something_unknown_has_no_rule(wheel):
    two = WRAPPER.replace("self.language_model = None", "self.language_model = Other(config)")
    assert describe(wheel(**{"models/outer.py": two}))["eagle3"]["Wrapper"]["rule"] is None


def test_a_shape_is_the_code_and_nothing_else():
    def of(text):
        return shape(*ast.parse(text).body)

    same = "def f(a, b=1):\n    return [a, b]"
    assert of(same) == of("def f(a: int, b: int = 1) -> list:\n    '''Words.'''\n\n    # why\n    return [ a,b ]")
    assert of(same) != of("def f(a, b=2):\n    return [a, b]")
    assert of(same) != of("def f(b, a=1):\n    return [a, b]")


def test_a_shape_is_the_same_on_every_python():
    # written down once on Python 3.12; ast.dump would differ from 3.13 on
    assert shape(*ast.parse("x = [i + 1 for i in y]").body) == (
        "8314e2065c64b9c90b9540ee3b2bf65e96d0ae7101e2e2af19e6b2f3e1c82f6d"
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.whl", b"no archive", "cannot be read as a wheel"),
        ("gone.whl", None, "cannot be read as a wheel"),
    ],
)
def test_what_is_no_wheel_is_one_sentence(tmp_path, capsys, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert descriptions.main(["describe", str(path)]) == 1
    assert said in capsys.readouterr().err


def test_a_wheel_of_something_else_is_one_sentence(tmp_path, wheel):
    path = tmp_path / "other.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other-1.dist-info/METADATA", "Version: 1\n")
    with pytest.raises(DescriptionError, match="no wheel of sglang"):
        describe(path)
    with pytest.raises(DescriptionError, match=r"server_args\.py"):
        describe(wheel(**{"server_args.py": "def broken(:\n"}))


def test_a_description_is_written_sorted_and_read_again(tmp_path, wheel):
    out = tmp_path / "sglang-0.0.1.json"
    assert descriptions.main(["describe", str(wheel()), "--out", str(out)]) == 0
    kept = load("0.0.1", tmp_path)
    assert kept is not None
    assert render(kept) == out.read_text()
    assert load("0.0.2", tmp_path) is None
    assert load("../0.0.1", tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '"\\ud800'])
def test_a_damaged_description_is_one_sentence(tmp_path, text):
    (tmp_path / "sglang-1.json").write_text(text)
    with pytest.raises(DescriptionError, match="describe the wheel again"):
        load("1", tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_kept_descriptions_are_small_and_whole(version):
    path = DATA / "engines" / f"sglang-{version}.json"
    description = load(version)
    assert description is not None
    assert path.stat().st_size < 150_000
    assert render(description) == path.read_text()
    assert description["version"] == version
    assert description["ids"]["keys"] == "nested"
    assert description["flags"]["speculative-num-steps"]["type"] == "int"
    assert description["environment"]["booleans"]["true"] == ["true", "1", "yes", "y"]
    assert all(entry["loader"] for entry in description["drafters"].values())


@pytest.mark.parametrize(
    ("version", "rule", "embedding"),
    [
        ("0.5.9", "always_plus_one", "fails"),
        ("0.5.12", "always_plus_one", "fails"),
        ("0.5.13", "plus_one_if_first_is_1", "fails"),
        ("0.5.23", "plus_one_if_first_is_1", "kept"),
    ],
)
def test_how_each_version_reads_ids(version, rule, embedding):
    eagle3 = load(version)["eagle3"]
    deepseek, llama = eagle3["DeepseekV3ForCausalLM"], eagle3["LlamaForCausalLM"]
    assert (deepseek["rule"], deepseek["keeps"], deepseek["embedding"]) == (rule, "input", embedding)
    assert (llama["rule"], llama["keeps"], llama["embedding"]) == ("always_plus_one", "input", embedding)
    assert (KIMI in eagle3) == (version != "0.5.9")
    if version != "0.5.9":
        assert eagle3[KIMI]["rule"] == rule
        assert eagle3[KIMI]["through"] == "kimi_k25.KimiK25ForConditionalGeneration"


def test_which_versions_read_a_variable():
    assert versions_with("SGLANG_ENABLE_SPEC_V2") == ["0.5.9", "0.5.12", "0.5.13"]
    assert versions_with("SGLANG_NO_SUCH") == []


def test_what_arrived_when():
    kept = {version: load(version) for version in VERSIONS}
    register = "sglang.srt.plugins.hook_registry.HookRegistry.register"
    assert [kept[version]["hooks"][register] for version in VERSIONS] == [False, True, True, True]
    assert ["Eagle3DeepseekV2ForCausalLM" in kept[version]["drafters"] for version in VERSIONS] == [False] + 3 * [True]
    llama = [kept[version]["drafters"]["LlamaForCausalLMEagle3"] for version in VERSIONS]
    assert [entry["fc"] for entry in llama] == ["three", "ids", "ids", "ids"]
    assert [entry["one_layer"] for entry in llama] == [True, False, False, False]
    mla = [kept[version]["drafters"]["Eagle3DeepseekV2ForCausalLM"] for version in VERSIONS[1:]]
    assert ["fc_norm" in entry["reads"] for entry in mla] == [False, True, True]
    assert all(entry["needs_q_lora"] and entry["one_layer"] and entry["float_only"] for entry in mla)
    assert ["kimi_k2" in kept[version]["config_types"] for version in VERSIONS] == [False, True, True, True]
    assert "unquant" in kept["0.5.23"]["flags"]["speculative-draft-model-quantization"]["choices"]


def test_every_target_of_the_probe_is_there_in_the_deployed_version():  # that they are the probe's: test_probe.py
    assert load("0.5.23")["hooks"] == dict.fromkeys(engine_models.HOOKS, True)


def test_tables_name_only_shapes_that_some_version_has():
    kept = [load(version) for version in VERSIONS]
    entries = [entry for description in kept for entry in description["eagle3"].values()]
    seen = {entry.get(key) for entry in entries for key in ("setter_shape", "capture_shape", "through_shape")}
    assert set(SETTERS) <= seen
    assert set(CAPTURES) <= seen


def test_known_faults_meet_the_versions_they_name():
    def ids(version, *facts):
        return [entry["id"] for entry in faults(version, facts)]

    everything = ("eagle3", "ids-not-default", "cuda-graphs")
    assert ids("0.5.9", *everything) == ["graphs-with-default-ids"]
    assert ids("0.5.10.post1", *everything) == ["graphs-with-default-ids"]
    assert ids("0.5.11", *everything) == []
    assert ids("0.5.7", *everything) == []
    assert ids("0.5.9", "eagle3", "cuda-graphs") == []
    assert ids("0.5.23", "eagle3", "cpu", "probe", "ids-not-three", "draft-model-type-kimi_k2", *everything) == []
    assert ids("0.5.11", "eagle3", "draft-model-type-kimi_k2") == ["kimi-k2-config-unknown"]
    assert ids("not a version", *everything) == []


def test_every_known_fault_says_where_it_is_from():
    for entry in yaml.safe_load((DATA / "engine_faults.yml").read_text())["faults"]:
        assert set(entry) == {"id", "versions", "when", "severity", "message", "fix", "basis", "source"}
        assert entry["severity"] in ("error", "warning")
        assert entry["basis"] in ("read", "reported")


def real_wheel(version, place):
    """The real wheel of a version: of the wheelhouse, or fetched when PIVOT_SOAK is set; None otherwise."""
    for path in sorted(ROOT.glob(f".cache/wheelhouse/[!.]*/wheels/sglang-{version}-*.whl")):
        return path
    if not os.environ.get("PIVOT_SOAK"):
        return None
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "-d", str(place)]
    subprocess.run([*command, f"sglang=={version}"], check=True)
    return next(place.glob(f"sglang-{version}-*.whl"))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kept_description_is_that_of_the_real_wheel(version, tmp_path):
    path = real_wheel(version, tmp_path)
    if path is None:
        pytest.skip(f"no wheel of sglang {version} in .cache/wheelhouse; PIVOT_SOAK=1 fetches it")
    kept = (DATA / "engines" / f"sglang-{version}.json").read_text()
    assert json.loads(render(describe(path))) == json.loads(kept)
