"""What a run's own Ansible, for the host checks, is told of the vault."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "plugins/lookup/vault_environment.py"
SPEC = importlib.util.spec_from_file_location("vault_environment", PATH)
assert SPEC is not None
assert SPEC.loader is not None
vault_environment = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(vault_environment)


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
    assert vault_environment.environment(options) == variable
    # an id of the configuration is kept, and a password file of it is inherited
    kept = {} if expected is None else {"ANSIBLE_VAULT_IDENTITY_LIST": f"lab@/l,{expected}"}
    assert vault_environment.environment(options, ["lab@/l"]) == kept
