"""Checks of deployed hosts: what runs, not what a file says.

From the project's root, with `.venv` active (`playbooks/verify.yml` does the same):

    pytest tests/host --hosts=ansible://inference --ansible-inventory=inventory/lab

`--hosts=ansible://infer1` limits it to one; several inventories are given with commas between them. Both options have
these defaults. Nothing on a host is changed.
The values come from the inventory as Ansible resolves it, over the roles' defaults, and under those of files
that the playbook was given with --extra-vars; where a service check fails, the end of the service's journal is shown.
The API key is masked in everything that is printed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import ChainMap
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from testinfra.host import Host

from pivot.bundles.redact import Redactor
from pivot.machines.host import parse_properties
from pivot.serving import launch

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("sglang_engine", "model_weights", "sglang_server", "debug_probes")
CONNECTION = (
    *("ansible_connection", "ansible_host", "ansible_port", "ansible_user"),
    *("ansible_ssh_private_key_file", "ansible_ssh_common_args", "ansible_ssh_extra_args"),
)
WANTED = (
    *("sglang_engine_root", "sglang_engine_version", "sglang_engine_accelerator", "sglang_engine_patches"),
    *("model_weights_root", "model_weights_models"),
    *("sglang_server_name", "sglang_server_user", "sglang_server_config_dir", "sglang_server_host"),
    *("sglang_server_port", "sglang_server_api_key", "sglang_server_accelerator", "sglang_server_environment"),
    "sglang_server_launch",
    *(
        "sglang_server_nccl_profile",
        "sglang_server_start_limit",
        "sglang_server_model_path",
        "sglang_server_drafter_path",
    ),
    *("debug_probes_root", "debug_probes_state_file"),
    *("proxmox_container_devices", "lab_bridge"),
)
_UNSET = "__unset__"


class Settings(Mapping[str, Any]):
    """Variables of one host; shows none of its values, since pytest prints the arguments of a failed test."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value != _UNSET}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<settings of {self._values.get('inventory_hostname', 'a host')}>"


class Api:
    """The server as the controller reaches it."""

    def __init__(self, base: str, key: str | None) -> None:
        self.base = base
        self._key = key

    def get(self, path: str, with_key: bool = True) -> tuple[int, str]:
        """Status and text of an answer; a server that does not answer fails the test with the reason."""
        request = urllib.request.Request(self.base + path)  # noqa: S310 - http, from the inventory
        if with_key and self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=30) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.reason
        except OSError as error:
            raise AssertionError(f"{self.base}{path} did not answer from here: {error}") from None


def resolve(inventory: str, pattern: str, directory: Path) -> Path:
    """An inventory of the hosts with every value resolved, over the roles' defaults.

    testinfra reads inventories without resolving templates, addresses among them, and knows no role's defaults.
    """
    # beside the inventory's own `all: vars:`, which come later and win; group_vars of a directory would beat them
    files = (ROOT / "roles" / role / "defaults/main.yml" for role in ROLES)
    defaults = directory / "defaults.yml"
    defaults.write_text(
        json.dumps({"all": {"vars": dict(ChainMap(*(yaml.safe_load(path.read_text()) for path in files)))}})
    )
    names = json.dumps([*CONNECTION, *WANTED])
    expression = f"{{{{ dict({names} | zip(query('ansible.builtin.vars', *{names}, default='{_UNSET}'))) }}}}"
    several = inventory.split(",")
    given = several if all(Path(ROOT, one).exists() for one in several) else [inventory]
    command = ["ansible", "--inventory", str(defaults)]
    command += [f"--inventory={one}" for one in given]
    command += [f"--extra-vars={one}" for one in json.loads(os.environ.get("PIVOT_EXTRA_VARS", "[]"))]
    command += ["--module-name", "ansible.builtin.debug", "--args", json.dumps({"msg": expression}), pattern]
    environment = {
        **os.environ,
        "ANSIBLE_VERBOSITY": "0",
        "ANSIBLE_FORCE_COLOR": "0",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    answers = re.findall(r"(?ms)^(\S+) \| SUCCESS => (\{.*?^\})", done.stdout)
    if done.returncode or not answers:
        raise pytest.UsageError(f"the inventory {inventory} could not be resolved for {pattern}: {done.stderr[-800:]}")
    hosts = {}
    for name, answer in answers:
        values = json.loads(answer)["msg"]
        hosts[name] = {key: value for key, value in values.items() if value != _UNSET}
        shared = f"-o ControlPath={directory}/ssh-%C"  # one connection for all checks
        hosts[name]["ansible_ssh_common_args"] = f"{values['ansible_ssh_common_args']} {shared}".removeprefix(_UNSET)
    path = directory / "inventory.json"
    path.write_text(json.dumps({"all": {"children": {"checked": {"hosts": hosts}}}}))
    return path


def clean(directory: Path) -> None:
    """End the shared connections, and leave no file."""
    for connection in directory.glob("ssh-*"):
        command = ["ssh", "-o", f"ControlPath={connection}", "-O", "exit", "any"]
        subprocess.run(command, capture_output=True, check=False, timeout=30)
    shutil.rmtree(directory, onexc=forgive_gone)


def forgive_gone(_function: object, _path: str, error: BaseException) -> None:
    """A connection that ends removes its own socket, at the same time."""
    if not isinstance(error, FileNotFoundError):
        raise error


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give testinfra resolved hosts, before it asks for them."""
    pattern = (config.option.hosts or "ansible://inference").removeprefix("ansible://")
    directory = Path(tempfile.mkdtemp(prefix="pivot-verify-"))  # 0700; holds the API key until the run ends
    config.add_cleanup(lambda: clean(directory))
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # testinfra calls ansible-inventory
    # what Ansible's commands answer here holds the API key, and they write all they print into the log of ansible.cfg
    os.environ["ANSIBLE_LOG_PATH"] = os.devnull
    # under ansible-runner the commands below would print its event stream
    for name in ("ANSIBLE_STDOUT_CALLBACK", "ANSIBLE_LOAD_CALLBACK_PLUGINS", "ANSIBLE_CALLBACK_PLUGINS"):
        os.environ.pop(name, None)
    os.environ.setdefault("ANSIBLE_CONFIG", str(ROOT / "ansible.cfg"))
    inventory = config.option.ansible_inventory or os.environ.get("ANSIBLE_INVENTORY") or str(ROOT / "inventory/lab")
    config.option.ansible_inventory = str(resolve(inventory, pattern, directory))
    config.option.hosts = "ansible://checked"


@pytest.fixture(scope="module")
def settings(host: Host) -> Settings:
    """The host's variables."""
    return Settings(host.ansible.get_variables())


@pytest.fixture(scope="module")
def unit(host: Host, settings: Settings) -> dict[str, str]:
    """The service's properties, as systemd sees them."""
    return parse_properties(host.check_output("systemctl show --all %s", settings["sglang_server_name"]))


@pytest.fixture(scope="module")
def pid(unit: dict[str, str]) -> int:
    """The service's main process."""
    number = int(unit.get("MainPID", "0"))
    assert number, f"the service has no process: it is {unit.get('ActiveState')} ({unit.get('SubState')})"
    return number


@pytest.fixture(scope="module")
def api(settings: Settings) -> Api:
    """The server, asked from the controller."""
    if int(settings["sglang_server_launch"].get("node-rank", 0)):
        pytest.skip("of a server over several machines that of rank 0 answers")
    outside = settings.get("ansible_host")
    address = launch.url(settings["sglang_server_host"], settings["sglang_server_port"], outside)
    return Api(address, settings.get("sglang_server_api_key"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After a failure: the end of the service's journal, and no secret in what is printed."""
    report = yield
    if not report.failed:
        return report
    host = getattr(item, "funcargs", {}).get("host")
    if host is None:
        return report
    values = Settings(host.ansible.get_variables())
    redactor = Redactor([str(values.get("sglang_server_api_key") or "")])
    shown = str(report.longrepr)
    if redactor.text(shown) != shown:
        report.longrepr = redactor.text(shown)
    report.sections = [(title, redactor.text(text)) for title, text in report.sections]
    name = values["sglang_server_name"]
    try:
        tail = host.run("journalctl --unit=%s --lines=30 --no-pager --all --output=short-iso", name)
        text = tail.stdout or tail.stderr
    except (RuntimeError, OSError) as error:  # the host itself does not answer
        text = f"not to be had: {error}"
    report.sections.append((f"the end of {name}'s journal", redactor.text(text)))
    return report
