"""What a run's own Ansible, for the host checks, is told of the command line, and how it resolves an inventory."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run_environment = loaded(ROOT / "plugins/lookup/run_environment.py")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"vault_password_files": [], "vault_ids": []}, None),
        ({"vault_password_files": ("/a", "/b")}, "default@/a,default@/b"),
        ({"vault_password_files": ["secret"]}, "default@/somewhere/secret"),
        ({"vault_ids": ["prod@~/a"]}, "prod@/home/me/a"),
        ({"vault_ids": ["prod@/a", "dev@b"], "vault_password_files": ["/c"]}, "prod@/a,dev@/somewhere/b,default@/c"),
        ({"vault_ids": ["prod@/home/me@corp.example/v"]}, "prod@/home/me@corp.example/v"),
        ({"vault_ids": ["prod@prompt", "dev@prompts"]}, "prod@prompt,dev@/somewhere/prompts"),
        ({"vault_ids": ["/a"]}, "/a"),
    ],
)
def test_options_of_the_command_line_reach_a_child(options, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(Path, "absolute", lambda self: Path("/somewhere") / self)
    variable = {} if expected is None else {"ANSIBLE_VAULT_IDENTITY_LIST": expected}
    assert run_environment.environment(options) == variable
    # an id of the configuration is kept, and a password file of it is inherited
    kept = {} if expected is None else {"ANSIBLE_VAULT_IDENTITY_LIST": f"lab@/l,{expected}"}
    assert run_environment.environment(options, ["lab@/l"]) == kept


def test_files_of_values_reach_a_child_and_no_value_that_was_typed(monkeypatch):
    monkeypatch.setattr(Path, "absolute", lambda self: Path("/somewhere") / self)
    assert run_environment.environment({"extra_vars": ()}) == {}
    given = {"extra_vars": ("a=1 b=@c", "@own.yml", '{"d": "é"}')}
    assert json.loads(run_environment.environment(given)["PIVOT_EXTRA_VARS"]) == ["@/somewhere/own.yml"]


def test_the_host_checks_resolve_several_inventories_and_the_values_of_the_command_line(tmp_path, monkeypatch):
    for name, text in {
        "one.yml": "all: {children: {inference: {hosts: {a: {ansible_host: 192.0.2.1}, b: {}}}}}",
        "two.yml": "all: {vars: {sglang_server_port: '{{ base + 1 }}', base: 1, sglang_server_name: two}}",
        "own.yml": "sglang_server_user: '{{ sglang_server_name }}-user'",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("PIVOT_EXTRA_VARS", json.dumps(["base=7", f"@{tmp_path}/own.yml", '{"base": 40}']))
    monkeypatch.setenv("ANSIBLE_LOG_PATH", "/dev/null")
    inventories = f"{tmp_path}/one.yml,{tmp_path}/two.yml"
    path = loaded(ROOT / "tests/host/conftest.py").resolve(inventories, "inference", tmp_path)
    hosts = json.loads(path.read_text())["all"]["children"]["checked"]["hosts"]
    assert {name: values.get("ansible_host") for name, values in hosts.items()} == {"a": "192.0.2.1", "b": "b"}
    wanted = {"sglang_server_port": 41, "sglang_server_name": "two", "sglang_server_user": "two-user"}
    assert [{name: values[name] for name in wanted} for values in hosts.values()] == [wanted, wanted]
    assert hosts["a"]["sglang_server_host"] == "192.0.2.1"  # the role's own default is its address
