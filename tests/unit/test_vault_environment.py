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
        ({}, {}),
        ({"vault_password_files": [], "vault_ids": []}, {}),
        (
            {"vault_password_files": ("/a", "/b")},
            {"ANSIBLE_VAULT_PASSWORD_FILE": "/b", "ANSIBLE_VAULT_IDENTITY_LIST": "default@/a"},
        ),
        ({"vault_ids": ["prod@~/a"]}, {"ANSIBLE_VAULT_IDENTITY_LIST": "prod@/home/me/a"}),
        ({"vault_password_files": ["secret"]}, {"ANSIBLE_VAULT_PASSWORD_FILE": "/somewhere/secret"}),
        ({"vault_ids": ["prod@/a", "dev@b"]}, {"ANSIBLE_VAULT_IDENTITY_LIST": "prod@/a,dev@/somewhere/b"}),
        ({"vault_ids": ["prod@prompt"]}, {"ANSIBLE_VAULT_IDENTITY_LIST": "prod@prompt"}),
        ({"vault_ids": ["/a"]}, {"ANSIBLE_VAULT_IDENTITY_LIST": "/a"}),
    ],
)
def test_options_of_the_command_line_reach_a_child(options, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(Path, "absolute", lambda self: Path("/somewhere") / self)
    assert vault_environment.environment(options) == expected
