"""The API key is in one file and nowhere else that others can see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testinfra.host import Host

from pivot.bundles.redact import spellings

if TYPE_CHECKING:
    from conftest import Api, Settings


def places(texts: dict[str, str], key: str) -> list[str]:
    """Where a spelling of the key stands. Only names come back, so that a failure prints no secret."""
    return [place for place, text in texts.items() if any(form in text for form in spellings(key))]


def test_places_finds_a_key_and_only_a_key() -> None:
    assert places({"a": "x secret-key-1 y", "b": "nothing"}, "secret-key-1") == ["a"]
    assert places({"a": "nothing"}, "secret-key-1") == []


def test_there_is_a_key(settings: Settings) -> None:
    assert len(settings.get("sglang_server_api_key") or "") >= 16


def test_no_process_shows_the_key(host: Host, settings: Settings, pid: int) -> None:
    commands = host.check_output("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; true")
    assert "sglang.launch_server" in commands
    environment = host.check_output("tr '\\0' '\\n' < /proc/%s/environ", str(pid))
    assert places({"a command line": commands, "the environment": environment}, settings["sglang_server_api_key"]) == []


def test_systemd_shows_no_key(host: Host, settings: Settings) -> None:
    name = settings["sglang_server_name"]
    texts = {verb: host.check_output(f"systemctl {verb} --no-pager %s", name) for verb in ("show", "cat")}
    assert places(texts, settings["sglang_server_api_key"]) == []


def test_files_that_everybody_can_read_hold_no_key(host: Host, settings: Settings) -> None:
    name, config = settings["sglang_server_name"], settings["sglang_server_config_dir"]
    command = "find %s /run/%s /usr/local/lib/%s -type f -perm -004 -exec cat {} + 2>/dev/null; true"
    text = host.check_output(command, config, name, name)
    assert places({"a file for all": text}, settings["sglang_server_api_key"]) == []


def test_without_the_key_there_is_no_answer(api: Api) -> None:
    assert api.get("/server_info", with_key=False)[0] == 401
    assert api.get("/v1/models", with_key=False)[0] == 401
    assert api.get("/v1/models")[0] == 200
