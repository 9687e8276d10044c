"""The role against the stand-in with planted secrets: none is printed, shown in a process, or left in a file.

Password, token, and the tickets that the API gave out, at -vvv --diff: when all goes well, when it is refused, with a
traceback, and when the whole process group is killed in the middle of a call.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .faults import WANTED, Faults
from .standin import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

ROOT = Path(__file__).parents[2]
PASSWORD, TOKEN = "planted-password-of-root", "planted-0000-4000-8000-token"
PLAY = [
    {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "tasks": [{"ansible.builtin.include_role": {"name": "proxmox_container"}}],
    }
]
CONFIG = f"""[defaults]
roles_path = {ROOT}/roles
library = {ROOT}/plugins/modules
filter_plugins = {ROOT}/plugins/filter
"""
# read by Python where it starts: what no code of this project does, an error that names what it holds
BROKEN = """
from pivot.pve import proxmox_ensure

def ensure(container, request, *, check):
    container.release()
    raise RuntimeError(f"{container.session.access!r} {vars(container)!r} {request!r}")

proxmox_ensure.ensure = ensure
"""


class Planted(Faults):
    """Remembers the tickets, and what the machine's processes showed while a container was made."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: list[str] = []
        self.shown = ""
        self.playing: subprocess.Popen[str] | None = None
        self.kill = False  # the run's process group, while a container is made

    async def logged_in(self, request: web.Request, handler: Any) -> Any:
        response = await handler(request)
        if request.path.endswith("/access/ticket"):
            data = json.loads(response.text)["data"]
            self.tickets += [data["ticket"], data["CSRFPreventionToken"]]
        if request.method == "POST" and request.path.endswith("/lxc"):
            self.shown += processes()
            if self.kill and self.playing:
                os.killpg(self.playing.pid, signal.SIGKILL)
        return response


def processes() -> str:
    """Command lines of all processes, and the environments of those that are Ansible's."""
    text = ""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes()
            text += line.decode(errors="replace") + "\n"
            if b"ansible" in line:
                text += (path / "environ").read_bytes().decode(errors="replace") + "\n"
        except OSError:  # it ended meanwhile
            continue
    return text


class Planting:
    """One stand-in with the secrets, and runs of the role against it from a directory that holds all they write."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.faults = Planted()
        self.server = Server(directory / "api", [self.faults.middleware], password=PASSWORD, token=TOKEN)
        self.home = directory / "home"

    def play(self, variables: dict[str, Any], *, kill: bool = False, broken: bool = False) -> tuple[int, str]:
        """Status and all output of one run; its files are below the home directory."""
        self.home.mkdir(exist_ok=True)
        given = self.directory / "given"
        given.mkdir(exist_ok=True)
        (given / "ansible.cfg").write_text(CONFIG)
        (given / "play.yml").write_text(json.dumps(PLAY))
        (given / "variables.json").write_text(json.dumps(self.variables() | variables))
        environment = {**os.environ, "HOME": str(self.home), "TMPDIR": str(self.home), "ANSIBLE_CONFIG": "ansible.cfg"}
        environment |= {"ANSIBLE_REMOTE_TMP": str(self.home / "tmp"), "ANSIBLE_INJECT_INVOCATION": "true"}
        if broken:
            (given / "sitecustomize.py").write_text(BROKEN)
            environment |= {"PYTHONPATH": str(given), "ANSIBLE_DISPLAY_TRACEBACK": "always"}
        self.faults.clear()
        self.faults.plan("", "", self.faults.logged_in, 10_000)
        self.faults.kill = kill
        command = [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", "-vvv", "--diff", "play.yml"]
        self.faults.playing = subprocess.Popen(
            [*command, "-e", "@variables.json"], cwd=given, env=environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, _ = self.faults.playing.communicate(timeout=120)
        return self.faults.playing.returncode, output

    def variables(self) -> dict[str, Any]:
        return {
            "proxmox_container_api_host": "127.0.0.1",
            "proxmox_container_api_port": self.server.pve.port,
            "proxmox_container_api_ca": str(self.server.layout.ca),
            "proxmox_container_api_password": PASSWORD,
            "proxmox_container_node": "pve1",
            "proxmox_container_vmid": 101,
            "proxmox_container_hostname": "llm01",
            "proxmox_container_template": WANTED["ostemplate"],
            "proxmox_container_storage": "ct",
            "proxmox_container_net0": WANTED["net0"],
            "proxmox_container_devices": ["/dev/nvidia0,mode=0666"],
            "proxmox_container_root_via": "ticket",
            "proxmox_container_state": "present",
        }

    def found(self, output: str) -> list[str]:
        """Where a secret was found: in the output, in a process, or in a file that is left."""
        secrets = [PASSWORD, TOKEN, *self.faults.tickets]
        assert self.faults.tickets or "PVE-ROOT-ONLY" in output or not output
        places = {"output": output, "processes": self.faults.shown}
        for path in self.home.rglob("*"):
            if path.is_file():
                places[str(path.relative_to(self.home))] = path.read_bytes().decode(errors="replace")
        return [f"{secret} in {where}" for where, text in places.items() for secret in secrets if secret in text]


@pytest.fixture(scope="module")
def planting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planting]:
    made = Planting(tmp_path_factory.mktemp("planted"))
    yield made
    made.server.close()


TOKENS = {
    "proxmox_container_api_password": None,
    "proxmox_container_api_user": "deploy@pve",
    "proxmox_container_api_token_id": "ci",
    "proxmox_container_api_token_secret": TOKEN,
}


def test_nothing_is_left_of_a_run_that_is_killed_in_the_middle(planting: Planting) -> None:
    status, output = planting.play({}, kill=True)
    assert status == -signal.SIGKILL
    assert planting.found(output) == []


def test_a_run_that_goes_well_shows_none(planting: Planting) -> None:
    status, output = planting.play({})
    assert status == 0, output
    assert "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER" in output
    assert planting.found(output) == []


def test_a_refused_token_is_not_shown(planting: Planting) -> None:
    status, output = planting.play({**TOKENS, "proxmox_container_devices": ["/dev/nvidia0"]})
    assert (status, "PVE-ROOT-ONLY" in output) == (2, True), output
    assert planting.found(output) == []


def test_a_traceback_shows_none(planting: Planting) -> None:
    status, output = planting.play({}, broken=True)
    assert (status, "Traceback" in output, "Access(host=" in output) == (2, True, True), output
    assert planting.found(output) == []


def test_what_is_searched_for_would_be_found(planting: Planting) -> None:
    left = planting.home / "left"
    left.write_text(f"{TOKEN} and {PASSWORD}")
    planting.faults.shown = f"python -m x --ticket {planting.faults.tickets[0]}"
    found = planting.found("PVE-ROOT-ONLY")
    left.unlink()
    assert [place.rpartition(" in ")[2] for place in found] == ["processes", "left", "left"]
