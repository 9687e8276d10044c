"""The role against the stand-in, with a pct that only remembers: the state in which it leaves a container, and whether
the plays after it have one to connect to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from pivot_lab.credentials import ensure_ssh_key

from .faults import WANTED, Faults
from .standin import PASSWORD, TOKEN, Server

ROOT = Path(__file__).parents[2]
CONFIG = f"""[defaults]
roles_path = {ROOT}/roles
library = {ROOT}/plugins/modules
filter_plugins = {ROOT}/plugins/filter
"""
# the node's pct: exec shows a container's host key, set is believed
PCT = '#!/bin/sh\necho "$@" >> {log}\n[ "$1" != exec ] || cat {key}\n'
HOST = {
    "ansible_host": "192.0.2.7",
    "proxmox_container_api_host": "127.0.0.1",
    "proxmox_container_hostname": "llm01",
    "proxmox_container_node": "pve1",
    "proxmox_container_vmid": 101,
    "proxmox_container_template": WANTED["ostemplate"],
    "proxmox_container_storage": "ct",
    "proxmox_container_net0": WANTED["net0"],
    "proxmox_container_allow_restart": True,
    "proxmox_container_confirm_absent": "101 llm01",
}
TOKENS = {
    "proxmox_container_api_password": None,
    "proxmox_container_api_user": "deploy@pve",
    "proxmox_container_api_token_id": "ci",
    "proxmox_container_api_token_secret": TOKEN,
}
DEVICES = {**TOKENS, "proxmox_container_devices": ["/dev/nvidia0,mode=0666"]}


# what is asked for, whether only in check mode, and what is said then: no container to connect to, and one was stopped
Step = tuple[str, dict[str, Any], bool, str]
STEPS: list[Step] = [
    ("started", {}, False, "False, False"),
    ("present", DEVICES, False, "False, False"),
    ("stopped", {}, False, "True, True"),  # so it ran, though pct had needed it stopped
    ("started", {}, True, "True, False"),
    ("absent", {}, False, "True, False"),
    ("absent", {}, False, "True, False"),
]


def tasks(state: str, variables: dict[str, Any], check: bool, _: str) -> list[dict[str, Any]]:
    """One run of the role, and what it says."""
    role = {"name": "proxmox_container", "apply": {"check_mode": check}}
    return [
        {"ansible.builtin.include_role": role, "vars": {**variables, "proxmox_container_state": state}},
        {
            "ansible.builtin.debug": {
                "msg": "said: {{ proxmox_container_absent }}, {{ __proxmox_container_result.stopped }}"
            }
        },
    ]


def played(directory: Path, server: Server, steps: list[Step], status: int = 0) -> str:
    """What ansible-playbook prints of all steps, and that it ends with this status."""
    ensure_ssh_key(server.layout)
    tool = directory / "bin/pct"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(PCT.format(log=directory / "pct.log", key=server.layout.ssh_key.with_suffix(".pub")))
    tool.chmod(0o755)
    host = {
        **HOST,
        "proxmox_container_api_port": server.pve.port,
        "proxmox_container_api_ca": str(server.layout.ca),
        "proxmox_container_api_password": PASSWORD,
        "proxmox_container_known_hosts": str(directory / "known_hosts"),
    }
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    away = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    play = {"hosts": "llm01", "gather_facts": False, "tasks": [task for step in steps for task in tasks(*step)]}
    hosts = {"hosts": {"llm01": host, "pve1": {}, "away": away}, "vars": here}
    files = {"hosts.yml": {"all": hosts}, "play.yml": [play]}
    for name, text in {**{name: json.dumps(value) for name, value in files.items()}, "ansible.cfg": CONFIG}.items():
        (directory / name).write_text(text)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    environment |= {"PATH": f"{tool.parent}:{os.environ['PATH']}", "HOME": str(directory)}
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "hosts.yml", "play.yml"],
        cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_a_container_on_its_way_from_none_to_none(tmp_path: Path) -> None:
    """Each step begins with what the one before it left."""
    server = Server(tmp_path / "api")
    try:
        said = re.findall(r'"msg": "said: (.*)"', played(tmp_path, server, STEPS))
        left = server.pve.ct(101)
    finally:
        server.close()
    assert said == [words for *_, words in STEPS]
    assert left is None
    calls = [" ".join(line.split()[:3]) for line in (tmp_path / "pct.log").read_text().splitlines()]
    assert calls == ["exec 101 --", "set 101 --dev0", "exec 101 --"]  # none where it does not run


def test_a_node_that_goes_away_leaves_no_container_stopped(tmp_path: Path) -> None:
    """It is stopped for pct, which then nobody can call; the next run sets what is missing."""
    server = Server(tmp_path / "api", [(faults := Faults()).middleware])
    away: Step = ("started", {**DEVICES, "proxmox_container_node_host": "away"}, False, "")
    again: Step = ("started", DEVICES, False, "False, False")
    log = tmp_path / "pct.log"
    try:
        played(tmp_path, server, [STEPS[0]])
        log.unlink()
        said = played(tmp_path, server, [away], status=2)
        calls = [path for method, path, _ in faults.changing() if method == "POST" and "/status/" in path]
        left = server.pve.ct(101).status
        played(tmp_path, server, [again])
    finally:
        server.close()
    assert "away cannot be reached by ssh any more: what only root may set" in " ".join(said.split())
    assert [path.rsplit("/", 1)[1] for path in calls] == ["start", "shutdown", "start"]
    assert left == "running"
    assert [" ".join(line.split()[:3]) for line in log.read_text().splitlines()] == ["set 101 --dev0", "exec 101 --"]
