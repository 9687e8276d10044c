"""The module as a person meets it: its documentation, and that the documentation says what it takes and returns."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MODULE = Path(__file__).parents[2] / "plugins/modules/proxmox_container.py"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("proxmox_container", MODULE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """What ansible-doc says."""
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-doc"), "--json", "-M", MODULE.parent, "proxmox_container"],
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)["proxmox_container"]
    return found


def test_ansible_doc_shows_every_option_as_the_module_takes_it(module: ModuleType, shown: dict[str, Any]) -> None:
    options = shown["doc"]["options"]
    assert options.keys() == module.ARGUMENTS.keys()
    for name, argument in module.ARGUMENTS.items():
        for field in ("type", "elements", "choices", "default"):
            assert options[name].get(field) == argument.get(field), (name, field)
        assert bool(options[name].get("required")) is argument.get("required", False), name
        assert options[name]["description"], name


def test_ansible_doc_shows_everything_that_is_returned(shown: dict[str, Any]) -> None:
    exit_json = re.search(r"module\.exit_json\((.*?)\n    \)", MODULE.read_text(), re.DOTALL)
    assert exit_json is not None
    returned = set(re.findall(r"^        (\w+)=", exit_json[1], re.MULTILINE))
    assert shown["return"].keys() == returned - {"changed", "diff"}  # Ansible's own
    assert "proxmox_container:" in shown["examples"]


def test_what_is_secret_is_marked(module: ModuleType) -> None:
    assert [name for name, argument in module.ARGUMENTS.items() if argument.get("no_log")] == [
        "api_password",
        "api_token_secret",
    ]
