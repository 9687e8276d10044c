"""The engine: one complete release, and the running server is of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from testinfra.host import Host

from pivot.engines import engine

if TYPE_CHECKING:
    from conftest import Api, Settings


def release(host: Host, settings: Settings) -> str:
    """The directory that `current` leads to."""
    return str(host.check_output("readlink -f %s/current", settings["sglang_engine_root"]))


def version(settings: Settings) -> str:
    """The version of the wanted release, which patches make another one."""
    patches = [patch["sha256"] for patch in settings["sglang_engine_patches"]]
    return engine.patched_version(settings["sglang_engine_version"], patches)


def test_current_leads_to_a_complete_release(host: Host, settings: Settings) -> None:
    root, path = settings["sglang_engine_root"], release(host, settings)
    assert path.startswith(f"{root}/releases/{version(settings)}-{settings['sglang_engine_accelerator']}-")
    record = json.loads(host.check_output("cat %s/release.json", path))
    assert record["id"] == path.rsplit("/", 1)[1]


def test_nobody_but_root_can_change_it(host: Host, settings: Settings) -> None:
    writable = "find %s -not -type l ( -not -user root -o -perm /022 ) -print -quit"
    assert host.check_output(writable.replace("(", "\\(").replace(")", "\\)"), release(host, settings)) == ""


def test_the_release_is_the_pinned_version(host: Host, settings: Settings) -> None:
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    assert host.check_output("%s/bin/python -I -c %s", release(host, settings), code) == version(settings)


def test_the_running_server_is_of_this_release(host: Host, settings: Settings, pid: int, api: Api) -> None:
    path = release(host, settings)
    loaded = host.run("grep -c -F %s/ /proc/%s/maps", path, str(pid))
    assert loaded.rc == 0, f"the server runs without a file of {path}: it was started from an older release"
    assert json.loads(api.get("/server_info")[1])["version"] == version(settings)
