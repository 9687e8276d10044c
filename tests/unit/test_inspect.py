"""Servers that somebody set up: judging what was read of them, which test_inspect_host.py is about."""

import copy
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from pivot.engines import descriptions
from pivot.inventory import inventory
from pivot.serving import inspect, launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "roles/server_inspect/files/inspect_server.py"
MODELS = ROOT / "lab/models"
MASK = "<redacted>"

_spec = importlib.util.spec_from_file_location("inspect_server", SCRIPT)
assert _spec and _spec.loader
host_side = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(host_side)

CONFIG = """\
model-path: /srv/chat/target
speculative-draft-model-path: /srv/chat/drafter
speculative-algorithm: EAGLE3
speculative-num-steps: 3
speculative-eagle-topk: 1
speculative-num-draft-tokens: 4
api-key: <redacted>
port: 31999
device: cpu
context-length: 1024
"""
CONTRACT = {"layers": [3, 5, 7], "convention": "input", "source": "lab/models/recipe.py"}


def tensors() -> dict[str, Any]:
    return {"model.safetensors": host_side.header(MODELS / "drafter/model.safetensors")}


INSTALL = {
    "version": "0.5.23", "place": "/v/lib/python3.11/site-packages", "editable": "", "changed": 0, "altered": [],
}  # fmt: skip


def found_on_host() -> dict[str, Any]:
    """What a host prints for the lab's models, served as they are meant to be."""
    drafter = json.loads((MODELS / "drafter/config.json").read_text())
    return {
        "unit": {"name": "chat.service", "FragmentPath": "/etc/x", "DropInPaths": "", "User": "chat", "text": ""},
        "pid": 77,
        "argv": ["/v/bin/python", "-m", "sglang.launch_server", "--config", "/etc/chat.yaml", "--port", "31000"],
        "config": {"path": "/etc/chat.yaml", "text": CONFIG},
        "environment": {"OMP_NUM_THREADS": "1", "HF_TOKEN": MASK},
        "engine": {
            "python": "/v/bin/python",
            "version": "0.5.23",
            "nccl": "2.30.7",
            "plugins": [],
            "installs": [dict(INSTALL)],
            "paths": [],
        },
        "target": {
            "name": "target",
            "path": "/srv/chat/target",
            "config": json.loads((MODELS / "target/config.json").read_text()),
            **host_side.content(MODELS / "target"),
        },
        "drafter": {
            "name": "org/drafter",
            "path": "/srv/chat/drafter",
            "config": drafter,
            "tensors": tensors(),
            **host_side.content(MODELS / "drafter"),
        },
        "server_info": {"version": "0.5.23", "speculative_algorithm": "EAGLE3"},
        "card_mib": 0,
        "capabilities": [],
        "problems": [],
    }


def codes(host: dict[str, Any], contract: object = None) -> dict[str, str]:
    return {item.code: str(item.severity) for item in inspect.examine("h1", host, contract).findings}


# ---------------------------------------------------------------- the judgement


def test_a_right_server_has_no_findings() -> None:
    answer = inspect.examine("h1", found_on_host(), CONTRACT)
    assert answer.findings == ()
    assert answer.layers == (
        "ids [3, 5, 7] on 0.5.23 → inputs of layers 3, 5, 7 (outputs of 2, 4, 6); contract: inputs of 3, 5, 7; agrees"
    )
    assert "h1: chat.service, process 77" in answer.text()
    assert "drafter       org/drafter (/srv/chat/drafter)" in answer.text()


def test_wrong_layers_are_an_error_only_beside_a_contract() -> None:
    host = found_on_host()
    host["drafter"]["config"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [4, 5, 6]
    assert codes(host, CONTRACT) == {"DRAFTER-LAYERS": "error"}
    assert codes(host) == {}
    assert "DISAGREES; write [3, 5, 7]" in inspect.examine("h1", host, CONTRACT).layers


@pytest.mark.parametrize(
    ("environment", "code"),
    [
        ({"SGLANG_ENABLE_TORCH_COMPIEL": "1"}, "ENV-UNKNOWN"),
        ({"SGLANG_SIMULATE_ACC_LEN": "3"}, "ENV-SIMULATED"),
        ({"NCCL_P2P_DISABLE": "1"}, "LAUNCH-PEERS"),
        ({"NCCL_P2P_LEVLE": "SYS"}, "NCCL-UNKNOWN"),
    ],
)
def test_the_environment_is_checked_in_the_words_of_a_server(environment: dict[str, str], code: str) -> None:
    host = found_on_host()
    host["environment"] |= environment
    assert code in codes(host)
    text = inspect.examine("h1", host).text().split("the inventory that describes it")[0]
    assert "sglang_server_environment" not in text


def test_a_flag_of_the_command_line_is_checked_and_wins_over_the_file() -> None:
    host = found_on_host()
    host["argv"] += ["--speculative-num-draft-tokens", "7", "--served-model", "b"]
    answer = inspect.examine("h1", host)
    assert [item.code for item in answer.findings] == ["LAUNCH-TRIPLE"]
    values = yaml.safe_load(answer.inventory)
    assert values["sglang_server_launch"]["speculative-num-draft-tokens"] == 7
    assert values["sglang_server_launch"]["served-model-name"] == "b"  # the only flag that begins so
    assert values["sglang_server_port"] == 31000


def test_a_misspelt_flag_is_named_as_it_stands_on_the_command_line() -> None:
    host = found_on_host()
    host["argv"] += ["--speculative-algoritm=EAGLE3"]
    finding = inspect.examine("h1", host).findings[0]
    assert finding.code == "LAUNCH-UNKNOWN"
    assert finding.message.startswith("--speculative-algoritm is no flag")
    assert finding.fix == "did you mean speculative-algorithm?"


def test_an_unknown_version_is_one_sentence_and_the_rest_still_works() -> None:
    host = found_on_host()
    host["engine"]["version"] = "0.9.99"
    host["argv"] += ["--speculative-num-draft-tokens", "7"]
    host["drafter"]["config"]["hidden_size"] = "many"
    found = codes(host, CONTRACT)
    assert found["INSPECT-ENGINE"] == "warning"
    assert found["LAUNCH-TRIPLE"] == "error"
    assert found["DRAFTER-CONFIG"] == "error"
    assert "DRAFTER-ENGINE" not in found


def test_the_version_may_come_from_the_server_itself() -> None:
    host = found_on_host()
    host["engine"]["version"] = ""
    assert codes(host) == {}
    host["server_info"] = None
    assert codes(host) == {"INSPECT-ENGINE": "warning"}


def test_a_server_that_runs_with_other_settings_than_it_was_told() -> None:
    host = found_on_host()
    host["server_info"]["speculative_algorithm"] = None
    assert codes(host) == {"INSPECT-DRIFT": "warning"}


def test_what_could_not_be_read_is_a_finding_and_no_layers_are_claimed() -> None:
    host = found_on_host()
    host["drafter"]["config"] = None
    host["problems"] = [["drafter's config", "/srv/chat/drafter/config.json is no JSON: x"], ["several", "9 serve"]]
    answer = inspect.examine("h1", host, CONTRACT)
    assert [item.code for item in answer.findings] == ["INSPECT-UNREADABLE", "INSPECT-SEVERAL"]
    assert answer.layers.startswith("not known")


def test_a_server_that_does_not_answer_is_judged_by_its_files() -> None:
    host = found_on_host()
    host["problems"] = [["server_info", "401"]]
    assert codes(host) == {"INSPECT-ANSWER": "warning"}


def test_a_server_without_a_drafter() -> None:
    host = found_on_host()
    host["drafter"] = None
    host["config"]["text"] = "model-path: /srv/chat/target\ndevice: cpu\n"
    answer = inspect.examine("h1", host)
    assert answer.findings == ()
    assert answer.layers == "no drafter is served"


@pytest.mark.parametrize(
    "text",
    [
        "a: [1\n",
        "- a\n- b\n",
        "1: 2\n",
        "a: &a [x, x]\nb: *a\n",
        "a: " + "[" * 3000,
        "a: 2020-99-99\n",
        "a: !!python/object:x {}\n",
    ],
)
def test_a_config_file_that_is_none_is_one_finding(text: str) -> None:
    host = found_on_host()
    host["config"]["text"] = text
    assert codes(host)["INSPECT-CONFIG"] == "error"


def test_flags_get_the_types_of_the_engine() -> None:
    table = (descriptions.load("0.5.23") or {})["flags"]
    argv = ["python", "-m", "sglang.launch_server", "--tp", "2", "--trust-remote-code", "--no-enable-tf32-matmul"]
    argv += [
        "--mem-fraction-static=0.8",
        "--context-length",
        "128k",
        "--cuda-graph-bs-decode",
        "1",
        "2",
        "--watchdog-timeout",
        "-1",
    ]
    assert inspect.merged({"tp-size": 8}, inspect.argv_flags(argv, table), table) == {
        "tp-size": 2,
        "trust-remote-code": True,
        "enable-tf32-matmul": False,
        "mem-fraction-static": 0.8,
        "context-length": "128k",
        "cuda-graph-bs-decode": [1, 2],
        "watchdog-timeout": "-1",
    }


# ---------------------------------------------------------------- the inventory


def test_the_inventory_is_one_that_the_role_accepts() -> None:
    values = yaml.safe_load(inspect.examine("h1", found_on_host()).inventory)
    options = inventory.role_specs(ROOT / "roles")
    known = {*options["sglang_server"], *options["sglang_engine"]}
    assert set(values) - known == set()
    assert launch.check("h1", values["sglang_server_launch"], values["sglang_server_environment"]) == []
    assert values["sglang_server_eagle_layer_ids"] == [3, 5, 7]
    assert values["sglang_server_name"] == "chat"
    assert values["sglang_server_model_path"] == "/srv/chat/target"
    assert values["sglang_server_drafter_path"] == "/srv/chat/drafter"
    assert values["sglang_server_drafter_files"] == ["model.safetensors"]


def test_the_inventory_describes_this_server() -> None:
    """Its flags are those that count, under the role's own variables where they have one."""
    host = found_on_host()
    values = yaml.safe_load(inspect.examine("h1", host).inventory)
    table = descriptions.load("0.5.23")["flags"]
    counted = inspect.merged(inspect.config_flags(CONFIG), inspect.argv_flags(host["argv"], table), table)
    again = {flag: values[variable] for flag, variable in launch.RESERVED.items() if variable in values}
    again |= values["sglang_server_launch"]
    counted |= {"model-path": "/srv/chat/target", "api-key": "{{ vault_sglang_api_key }}"}
    assert again == counted
    assert values["sglang_server_environment"].keys() == host["environment"].keys()
    files = {path.name for path in (MODELS / "drafter").iterdir() if path.is_file()} - {"config.json"}
    assert set(values["sglang_server_drafter_files"]) == files
    assert launch.check("h1", values["sglang_server_launch"], values["sglang_server_environment"]) == []


def test_the_unit_is_read_too() -> None:
    host = found_on_host()
    host["unit"]["text"] = "[Service]\nKillMode=process\n"
    assert codes(host) == {"INSPECT-KILL": "error"}


def test_the_memory_of_a_card_is_worked_out() -> None:
    host = found_on_host()
    host["argv"] += ["--mem-fraction-static", "0.85"]
    assert "memory" not in inspect.examine("h1", host).text()  # no driver, nothing known
    host["card_mib"], host["capabilities"] = 97887, ["12.0"]
    host["target"]["bytes"], host["drafter"]["bytes"] = 50 << 30, 1 << 30
    answer = inspect.examine("h1", host)
    assert (
        "  memory        81.3 of 95.5928 GiB a card are static: weights 50.0, drafter 1.0, KV cache 30.3"
        in answer.text()
    )
    values = yaml.safe_load(answer.inventory)
    assert (values["gpu_runtime_memory_gib"], values["gpu_runtime_compute_capability"]) == (95.6, "12.0")
    host["target"]["bytes"] = 100 << 30
    assert "BUDGET-WEIGHTS" in codes(host)


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (
            {"installs": [INSTALL | {"editable": "/opt/sglang-old", "changed": 2}]},
            "INSPECT-EDITABLE",
            "is an editable installation of /opt/sglang-old, where 2 tracked files differ from its commit",
        ),
        (
            {
                "installs": [
                    INSTALL | {"version": "0.5.9", "place": "/extra"},
                    INSTALL,
                ]
            },
            "INSPECT-INSTALLS",
            "0.5.9 in /extra, 0.5.23 in /v/lib/python3.11/site-packages; the first was checked",
        ),
        (
            {"installs": [INSTALL | {"altered": [["sglang/srt/models/kimi_k25.py", "changed"]]}]},
            "INSPECT-FILES",
            "files of SGLang 0.5.23 are not those that were published: sglang/srt/models/kimi_k25.py (changed)",
        ),
        (
            {"paths": [["/opt/patches", "PYTHONPATH"], ["/srv/sglang", "the working directory"]]},
            "INSPECT-PATHS",
            "/opt/patches (PYTHONPATH), /srv/sglang (the working directory)",
        ),
    ],
)
def test_code_from_elsewhere_is_said(changes: dict[str, Any], code: str, said: str) -> None:
    host = found_on_host()
    host["engine"] |= changes
    answer = inspect.examine("h1", host)
    assert {item.code: str(item.severity) for item in answer.findings} == {code: "warning"}
    assert said in " ".join(answer.text().split())


def test_the_path_of_an_editable_installation_is_said_once() -> None:
    host = found_on_host()
    host["engine"]["installs"][0]["editable"] = "/opt/s"
    host["engine"]["paths"] = [["/opt/s/python", "/v/site/__editable__.sglang.pth"]]
    assert codes(host) == {"INSPECT-EDITABLE": "warning"}


def test_secrets_become_names_and_templates_of_others_stay_texts() -> None:
    host = found_on_host()
    host["argv"] += ["--admin-api-key", MASK]
    host["environment"]["SGLANG_HOST_IP"] = "{{ lookup('pipe', 'id') }}"
    text = inspect.examine("h1", host).inventory
    assert 'sglang_server_api_key: "{{ vault_sglang_api_key }}"' in text
    assert 'HF_TOKEN: "{{ vault_hf_token }}"' in text
    assert 'admin-api-key: "{{ vault_sglang_admin_api_key }}"' in text
    assert "SGLANG_HOST_IP: !unsafe" in text
    assert MASK not in text


# ---------------------------------------------------------------- on the host


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A value as somebody else's file might hold it."""
    if depth < 3 and rng.random() < 0.4:
        items = [anything(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        return items if rng.random() < 0.5 else {str(number): item for number, item in enumerate(items)}
    return rng.choice([None, True, -1, 0, 3, 10**30, -(10**30), 1.5, float("nan"), float("inf"), "", "x", "é{{ y }}"])


@pytest.mark.parametrize("place", ["target", "drafter", "key", "eagle_config", "tensors", "server_info", "flag"])
def test_whatever_others_wrote_ends_in_findings(place: str) -> None:
    rng = random.Random(20261131)  # noqa: S311 - the same in every run
    right, silent = found_on_host(), 0
    for _ in range(100):
        host, value = copy.deepcopy(right), anything(rng)
        if place in ("target", "drafter"):
            host[place]["config"] = value
        elif place == "key":
            model = rng.choice([host["target"]["config"], host["target"]["config"]["text_config"]])
            model = rng.choice([model, host["drafter"]["config"]])
            model[rng.choice(sorted(model))] = value
        elif place == "eagle_config":
            host["drafter"]["config"]["eagle_config"] = value
        elif place == "tensors":
            host["drafter"]["tensors"] = {"m.safetensors": {"fc.weight": value}}
        elif place == "server_info":
            host["server_info"] = {"version": "0.5.23", "speculative_num_steps": value, "attention_backend": value}
        else:
            flags = {rng.choice(["context-length", "speculative-algorithm", "tp-size", "device", "port"]): value}
            host["config"]["text"] = json.dumps({**flags, "model-path": value})
        answer = inspect.examine("h1", host, CONTRACT)
        assert answer.text()
        assert all(item.message for item in answer.findings)
        silent += not answer.findings
    assert silent < 90
