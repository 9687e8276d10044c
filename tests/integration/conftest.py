"""A new lab for the whole session, and playbooks run through ansible-runner as a user would run them."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import VaultSecret

from pivot.pve.proxmox_api import Access

ROOT = Path(__file__).resolve().parents[2]
# actions that never leave the controller
ON_CONTROLLER = {
    *("debug", "fail", "assert", "meta", "set_fact", "include_tasks", "include_role", "validate_argument_spec"),
    *("preflight", "redacted_diff", "sglang_drift", "sglang_health"),
}
TRACE = (
    "systemctl cat sglang; ls -lR --time-style=+ /etc/systemd/system/sglang* /etc/sglang;"
    " tr '\\0' '\\n' </proc/$(systemctl show sglang -P MainPID)/cmdline;"
    " tr '\\0' '\\n' </proc/$(systemctl show sglang -P MainPID)/environ"
    " | grep -vE '^(INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID)=' | sort;"
    " cd -P /opt/sglang/current/lib/python3*/site-packages/sglang &&"
    " find . -name __pycache__ -prune -o -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum"
)
FIGURES: list[str] = []
FAILED = pytest.StashKey[bool]()


@dataclasses.dataclass
class Run:
    """One playbook run: how it ended, what it printed, and its events."""

    status: str
    output: str
    events: list[dict[str, Any]]
    stats: dict[str, dict[str, int]]
    seconds: float

    def changed(self) -> int:
        return sum(self.stats.get("changed", {}).values())

    def changed_tasks(self) -> list[str]:
        return [
            event["event_data"]["task"]
            for event in self.events
            if event["event"] == "runner_on_ok" and event["event_data"]["res"].get("changed")
        ]

    def failures(self) -> list[str]:
        return [
            str(event["event_data"]["res"].get("msg"))
            for event in self.events
            if event["event"] == "runner_on_failed" and not event["event_data"].get("ignore_errors")
        ]

    def remote_tasks(self) -> list[str]:
        """Names of the tasks that went to another machine; the items of a loop count one each."""
        names = []
        for event in self.events:
            if event["event"] not in ("runner_on_ok", "runner_on_failed", "runner_item_on_ok"):
                continue
            data = event["event_data"]
            result = data["res"]
            looped = "results" in result
            delegated = (result.get("_ansible_delegated_vars") or {}).get("ansible_delegated_host")
            action = data["task_action"].rsplit(".", 1)[-1]
            if action in ON_CONTROLLER or delegated == "localhost" or looped:
                continue
            names.append(data["task"])
        return names


class Controller:
    """Runs playbooks of this clone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self.commands: set[str] = set()

    def play(self, playbook: str = "deploy.yml", *arguments: str, verbosity: int = 0) -> Run:
        self._count += 1
        self.commands.add(" ".join(["ansible-playbook", playbook, *arguments]))
        private = self._directory / f"{self._count:02d}"
        private.mkdir()
        begin = time.monotonic()
        result = ansible_runner.run(
            private_data_dir=str(private),
            project_dir=str(ROOT),
            playbook=playbook,
            inventory=str(ROOT / "inventory" / "lab"),
            cmdline=" ".join(arguments) or None,
            verbosity=verbosity or None,
            quiet=True,
            envvars={
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "plugins" / "callback"),
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_HOST_KEY_CHECKING": "True",  # ansible-runner's own default is False
            },
        )
        seconds = time.monotonic() - begin
        output = result.stdout.read()
        return Run(result.status, output, list(result.events), result.stats or {}, seconds)


@pytest.fixture(scope="session")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Controller:
    return Controller(tmp_path_factory.mktemp("runner"))


@pytest.fixture(scope="session")
def lab() -> Iterator[dict[str, Any]]:
    """A lab without containers, and what it wrote for the inventory. It stays up for `make deploy` afterwards.

    Beside other lanes it is not taken down first: scripts/test.sh has done it, and they may be in it already.
    """
    for verb in ("up",) if os.environ.get("PIVOT_TEST_LANES") else ("down", "up"):
        subprocess.run(["pivot-lab", verb], check=True, cwd=ROOT)
    variables = yaml.safe_load((ROOT / "inventory/lab/group_vars/all/lab.yml").read_text())
    variables["secrets"] = secrets()
    yield variables


def secrets() -> dict[str, str]:
    loader = DataLoader()
    loader.set_vault_secrets([("default", VaultSecret((ROOT / ".lab/vault-password").read_bytes().strip()))])
    return loader.load_from_file(str(ROOT / "inventory/lab/group_vars/all/vault.yml"))


class Host:
    """A deployed container, over the same verified ssh that Ansible uses."""

    def __init__(self, lab: dict[str, Any], name: str = "infer1") -> None:
        self.address = lab["lab_addresses"][name]
        self._ssh = [
            "ssh", "-i", lab["lab_ssh_key"], "-o", f"UserKnownHostsFile={lab['lab_known_hosts']}",
            "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "ControlMaster=auto",
            "-o", "ControlPersist=60s", "-o", "ControlPath=~/.ansible/cp/%C", f"root@{self.address}",
        ]  # fmt: skip

    def run(self, command: str, *, check: bool = True, stdin: str | None = None) -> str:
        done = subprocess.run([*self._ssh, command], check=False, capture_output=True, text=True, input=stdin)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, *properties: str) -> dict[str, str]:
        text = self.run(f"systemctl show sglang.service --property {','.join(properties)}")
        return dict(line.split("=", 1) for line in text.splitlines())

    def starts(self) -> int:
        """How often the server has begun to serve, as the journal has it."""
        return int(self.run("journalctl -u sglang -o cat | grep -c 'fired up and ready'", check=False))

    def trace(self) -> str:
        """All in which the probe could leave a trace: unit, drop-ins, settings, command line, environment, engine."""
        return self.run(TRACE)

    def wait(self, command: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while subprocess.run([*self._ssh, command], check=False, capture_output=True).returncode:
            assert time.monotonic() < end, f"not within {seconds:.0f} s: {command}"
            time.sleep(0.5)


@pytest.fixture(scope="session")
def host(lab: dict[str, Any]) -> Host:
    return Host(lab)


@pytest.fixture(scope="session")
def provisioned(lab: dict[str, Any], controller: Controller, request: pytest.FixtureRequest) -> None:
    """The container. Beside the other lanes (PIVOT_TEST_BESIDE) nothing is in it yet, else the first deployment is."""
    if not os.environ.get("PIVOT_TEST_BESIDE"):
        request.getfixturevalue("deployed")
        return
    run = controller.play("playbooks/provision.yml")
    assert run.status == "successful", run.output[-6000:]


@pytest.fixture(scope="session")
def deployed(lab: dict[str, Any], controller: Controller) -> Run:
    """The first deployment; later tests stand on it.

    scripts/test.sh runs lanes beside each other (PIVOT_TEST_LANES): the engine that is installed here becomes a layer
    for the scenarios.
    """
    run = controller.play()
    assert run.status == "successful", run.output[-6000:]
    FIGURES.append(f"first deployment: {run.seconds:.0f} s")
    if os.environ.get("PIVOT_TEST_LANES") and not os.environ.get("PIVOT_TEST_BESIDE"):
        subprocess.run(["pivot-lab", "layer", "copy", "ct101", "/opt/sglang", "engine"], check=True, cwd=ROOT)
    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Let fixtures know whether their test failed."""
    report = yield
    if report.failed and report.when == "call":
        item.stash[FAILED] = True
    return report


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """A failed test leaves the deployed state behind: the next one fails for its own faults alone."""
    yield
    if not request.node.stash.get(FAILED, False) or "deployed" not in request.fixturenames:
        return
    controller, lab = request.getfixturevalue("controller"), request.getfixturevalue("lab")
    for arguments in ((), ("--tags", "debug-off"), ("--check",)):
        run = controller.play("deploy.yml", *arguments)
        if run.status != "successful" or (arguments == ("--check",) and run.changed_tasks()):
            break
    else:
        return
    # what no run puts right goes, with its container
    delete(lab, "infer1")
    known = Path(lab["lab_known_hosts"])
    kept = [line for line in known.read_text().splitlines() if line.split()[0] != lab["lab_addresses"]["infer1"]]
    known.write_text("".join(f"{line}\n" for line in kept))
    run = controller.play()
    assert run.status == "successful", f"the deployed state could not be restored:\n{run.output[-4000:]}"


def containers_api(lab: dict[str, Any]) -> Any:
    """The containers of the lab's node, through the API that the role uses."""
    access = Access(
        lab["lab_api_host"],
        lab["lab_api_port"],
        "root@pam",
        lab["lab_api_ca"],
        lab["secrets"]["vault_proxmox_password"],
    )
    return access.connect("test").nodes("pve1").lxc


def existing(lab: dict[str, Any]) -> dict[str, int]:
    """Name and vmid of the containers that belong to an inventory; other lanes' scenarios have theirs."""
    return {str(c["name"]): int(c["vmid"]) for c in containers_api(lab).get() if str(c["name"]).startswith("infer")}


def delete(lab: dict[str, Any], name: str) -> None:
    """Stop and remove a container; nothing happens where there is none."""
    vmid = existing(lab).get(name)
    if vmid is None:
        return
    container = containers_api(lab)(vmid)
    if container.status.current.get()["status"] == "running":
        container.status.stop.post()
        wait_for(lambda: container.status.current.get()["status"] == "stopped", 120)
    container.delete()
    wait_for(lambda: name not in existing(lab), 300)


@contextlib.contextmanager
def second_container(lab: dict[str, Any], **variables: Any) -> Iterator[str]:
    """An inventory that also has infer2, which does not exist yet; it is gone afterwards. variables: of infer2."""
    inventory = ROOT / ".lab/second"  # two levels below the project, as its variables want it
    shutil.rmtree(inventory, ignore_errors=True)  # of an interrupted test
    shutil.copytree(ROOT / "inventory/lab", inventory)
    more = {"ansible_host": "{{ lab_addresses.infer2 }}", "proxmox_container_vmid": 102, **variables}
    children = {"lab": {"children": {"inference": {"hosts": {"infer2": more}}}}}
    (inventory / "more.yml").write_text(yaml.safe_dump({"all": {"children": children}}))
    delete(lab, "infer2")
    yield str(inventory)
    delete(lab, "infer2")
    shutil.rmtree(inventory)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until something holds; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.3)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if FIGURES:
        terminalreporter.section("figures")
        for figure in FIGURES:
            terminalreporter.line(figure)
