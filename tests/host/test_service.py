"""The service that runs, and how it is confined."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from testinfra.host import Host

from pivot.serving import nccl

if TYPE_CHECKING:
    from conftest import Api, Settings


CONFINED = {
    "KillMode": "mixed",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "AmbientCapabilities": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "ProtectControlGroups": "yes",
    "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes",
    "LockPersonality": "yes",
    "LimitCORE": "0",
}
# on a GPU host the devices have to be there, and CUDA maps memory that is written and executed
CONFINED_CPU = {"PrivateDevices": "yes", "MemoryDenyWriteExecute": "yes", "PrivateUsers": "yes"}


def test_it_runs_and_comes_back_after_a_boot(unit: dict[str, str]) -> None:
    state = {name: unit.get(name) for name in ("LoadState", "ActiveState", "SubState", "UnitFileState")}
    assert state == {
        "LoadState": "loaded",
        "ActiveState": "active",
        "SubState": "running",
        "UnitFileState": "enabled",
    }


def test_systemd_knows_the_unit_file_as_it_is(unit: dict[str, str], settings: Settings) -> None:
    assert unit["FragmentPath"] == f"/etc/systemd/system/{settings['sglang_server_name']}.service"
    assert unit["NeedDaemonReload"] == "no"


def test_a_crash_loop_is_bounded(unit: dict[str, str], settings: Settings) -> None:
    assert unit["StartLimitBurst"] == str(settings["sglang_server_start_limit"])
    assert unit["StartLimitIntervalUSec"] not in ("0", "infinity")
    assert unit["Restart"] == "on-failure"


def test_it_is_confined_as_written(unit: dict[str, str], settings: Settings) -> None:
    wanted = CONFINED | (CONFINED_CPU if settings["sglang_server_accelerator"] == "cpu" else {})
    assert {name: unit.get(name) for name in wanted} == wanted


def test_the_kernel_confines_the_running_process(host: Host, pid: int, settings: Settings) -> None:
    lines = host.check_output("cat /proc/%s/status", str(pid)).splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    uid = str(host.user(settings["sglang_server_user"]).uid)
    assert uid != "0"
    assert status["Uid"] == [uid] * 4
    assert status["NoNewPrivs"] == ["1"]
    assert status["Seccomp"] == ["2"]
    assert status["CapEff"] == ["0000000000000000"]


def test_it_was_started_with_the_rendered_configuration(host: Host, pid: int, settings: Settings) -> None:
    argv = host.check_output("tr '\\0' '\\n' < /proc/%s/cmdline", str(pid)).splitlines()
    assert argv[1:3] == ["-m", "sglang.launch_server"]
    assert argv[argv.index("--config") + 1] == f"{settings['sglang_server_config_dir']}/launch.yaml"


def test_it_has_the_environment_of_the_inventory(host: Host, pid: int, settings: Settings) -> None:
    wanted = nccl.environment(settings.get("sglang_server_nccl_profile"), settings["sglang_server_environment"])
    script = (
        "import json, sys; raw = open(f'/proc/{sys.argv[1]}/environ').read().split(chr(0)); "
        "print(json.dumps({n: v for n, _, v in (x.partition('=') for x in raw) if n in json.loads(sys.argv[2])}))"
    )
    found = host.check_output("python3 -I -c %s %s %s", script, str(pid), json.dumps(list(wanted)))
    assert json.loads(found) == wanted


@pytest.mark.parametrize("name", ["launch.yaml", "environment"])
def test_configuration_is_readable_by_root_and_the_service_alone(host: Host, settings: Settings, name: str) -> None:
    file = host.file(f"{settings['sglang_server_config_dir']}/{name}")
    assert (file.user, file.group, oct(file.mode)) == ("root", settings["sglang_server_user"], "0o640")


def test_it_answers(api: Api) -> None:
    status, _ = api.get("/health")
    assert status == 200


def test_it_serves_the_pinned_weights(api: Api, settings: Settings) -> None:
    _, text = api.get("/server_info")
    info = json.loads(text)
    assert info["model_path"] == settings["sglang_server_model_path"]
    assert bool(info["speculative_draft_model_path"]) == bool(settings["sglang_server_drafter_path"])
