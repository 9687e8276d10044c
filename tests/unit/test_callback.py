"""The callback in a real ansible-playbook."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILTER = """
import os
import pathlib

with (pathlib.Path(__file__).parent / "loaded").open("a") as stream:
    stream.write(f"{os.getpid()}\\n")


class FilterModule:
    def filters(self):
        return {"same": str}
"""


def test_a_vault_that_is_no_yaml_is_named_and_none_of_it_is_shown(tmp_path: Path) -> None:
    vault, password = tmp_path / "group_vars/all/vault.yml", tmp_path / "password"
    vault.parent.mkdir(parents=True)
    vault.write_text("vault_x: !Made-up\n")
    password.write_text("of its own\n")
    hosts = tmp_path / "hosts.yml"
    hosts.write_text("all: {hosts: {here: {ansible_connection: local}}}\n")
    tasks = [{"ansible.builtin.debug": {"msg": "gone on"}}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    options = {
        "env": {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_VAULT_PASSWORD_FILE": str(password),
            "PIVOT_LOG": str(tmp_path / "ansible.log"),
        },
        "capture_output": True,
        "text": True,
    }
    tools = Path(sys.executable).parent
    subprocess.run([tools / "ansible-vault", "encrypt", vault], check=True, **options)
    words = [tools / "ansible-playbook", "-i", hosts, tmp_path / "play.yml", "-vvv"]
    done = subprocess.run(words, check=False, **options)
    assert done.returncode == 4, done.stdout + done.stderr
    assert f"FILE-YAML  {vault}: its decrypted text is no YAML" in done.stderr
    said = done.stdout + done.stderr + (tmp_path / "ansible.log").read_text()
    assert "Made-up" not in said
    assert "gone on" not in said


@pytest.mark.parametrize("roles", [["one"], []])
def test_filters_are_loaded_once_and_not_by_every_tasks_worker(tmp_path: Path, roles: list[str]) -> None:
    filters = tmp_path / "filters"
    filters.mkdir()
    (filters / "same.py").write_text(FILTER)
    tasks = [{"ansible.builtin.debug": {"msg": f"{{{{ 'task {number}' | same }}}}"}} for number in range(3)]
    role = tmp_path / "roles/one/tasks"
    role.mkdir(parents=True)
    (role / "main.yml").write_text(yaml.safe_dump(tasks))
    play = tmp_path / "play.yml"
    plain = [{"ansible.builtin.debug": {"msg": "no filter"}}]
    play.write_text(
        yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "roles": roles, "post_tasks": plain}])
    )
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "--inventory", "localhost,", str(play)],
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_FILTER_PLUGINS": str(filters),
            "PIVOT_LOG": str(tmp_path / "ansible.log"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no filter" in done.stdout, done.stdout + done.stderr
    assert ("task 2" in done.stdout) == bool(roles)
    loaded = filters / "loaded"
    assert len(loaded.read_text().splitlines() if loaded.exists() else []) == len(roles)  # not at all without a role
