"""What the controller makes of the files that came, and how they come."""

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pivot import summary
from pivot.bundles import bundle, bundle_table, redact
from pivot.bundles.redact import MASK
from pivot.findings import Severity
from pivot.transfer import TransferError

from .test_bundle import KEY


def arrived(tmp_path: Path, files: dict[str, str], **more: Any) -> dict[str, Any]:
    """What rsync would have left, as a request of `finish`."""
    partial = tmp_path / "partial"
    entries = []
    for name, text in files.items():
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        entries.append(row(name, sha256=hashlib.sha256(text.encode()).hexdigest(), bytes=len(text)))
    return {
        "partial": str(partial),
        "directory": str(tmp_path / "artifacts" / "t" / "h"),
        "entries": entries,
        "context": {"active": "active"},
        "host": "h",
        "unit": "sglang.service",
        "time": "t",
        "pins": {},
        "secrets": [],
        **more,
    }


def row(name: str, **more: Any) -> dict[str, Any]:
    plain = {
        "item": name,
        "source": "",
        "bytes": None,
        "sha256": None,
        "truncated": False,
        "reason": "",
        "failed": False,
    }
    return {"name": name, **plain, "masked": 0, "sensitivity": "plain", "required": False, "tail": False, **more}


def test_known_secrets_are_in_no_file_of_a_bundle(tmp_path: Path) -> None:
    files = {"server.log": f"asked with {KEY} and k3y-in-launch%2Fyaml%2Bx\n", "config/a": "x: 1\n"}
    done = bundle.finish(arrived(tmp_path, files, secrets=[KEY, ""], pins={"models": {"m": {"note": KEY}}}))
    final = Path(done["path"])
    assert done["findings"] == []
    assert (final / "server.log").read_text() == f"asked with {MASK} and {MASK}\n"
    assert not [path for path in final.rglob("*") if path.is_file() and KEY in path.read_text()]
    manifest = json.loads((final / "manifest.json").read_text())
    for item in manifest["files"]:
        raw = (final / item["name"]).read_bytes()
        assert (item["bytes"], item["sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert manifest["masked"] == 3
    assert str(tmp_path) not in json.dumps(manifest)
    assert {path.stat().st_mode & 0o777 for path in [final, *final.rglob("*")]} == {0o700, 0o600}


def test_what_an_interrupted_transfer_left_and_this_one_did_not_bring_is_no_part_of_it(tmp_path: Path) -> None:
    asked = arrived(tmp_path, {"server.log": "a\n"})
    for name in ("probe/var/old.jsonl", "system/link"):
        (tmp_path / "partial" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "partial/probe/var/old.jsonl").write_text("of another time\n")
    (tmp_path / "partial/system/link").symlink_to("/etc/passwd")
    final = Path(bundle.finish(asked)["path"])
    names = {path.relative_to(final).as_posix() for path in final.rglob("*")}
    assert names == {"server.log", "manifest.json", "diagnosis.txt"}


def test_how_much_of_a_transfer_was_here_already() -> None:
    stats = "Literal data: 1,204 bytes\nMatched data: 10,000,000 bytes\n"
    assert bundle.transferred([stats, "Literal data: 6 bytes\nMatched data: 0 bytes\n"]) == {
        "sent": 1210,
        "kept": 10_000_000,
    }
    assert bundle.transferred(["no figures"]) == {"sent": 0, "kept": 0}


def test_an_interrupted_transfer_goes_on(tmp_path: Path) -> None:
    source, here = tmp_path / "host", tmp_path / "here"
    source.mkdir()
    here.mkdir()
    text = "".join(f"line {number:07d}\n" for number in range(60_000)).encode()
    (source / "server.log").write_bytes(text + b"and more since\n")
    (here / "server.log").write_bytes(text[:700_000])  # as rsync leaves it with --partial
    call = bundle.transfer({"ansible_connection": "local"}, str(source), str(here))
    # between directories of one machine rsync copies whole files, unless it is told as it would do over ssh
    done = subprocess.run([*call[:-2], "--no-whole-file", *call[-2:]], capture_output=True, text=True, check=True)
    figures = bundle.transferred([done.stdout])
    assert (here / "server.log").read_bytes() == text + b"and more since\n"
    assert figures["kept"] > 690_000
    assert figures["sent"] < 90_000 + 20_000


def test_a_node_that_is_away_costs_its_own_part(tmp_path: Path) -> None:
    asked = arrived(tmp_path, {"server.log": "a\n"})
    asked["entries"].append(bundle.no_node("pve1: not reachable", "pve1"))
    (finding,) = bundle.finish(asked)["findings"]
    assert (finding["code"], finding["severity"], finding["subject"]) == ("BUNDLE-MISSING", "warning", "h, node")
    assert finding["message"] == "not collected: pve1: not reachable"


def test_a_secret_that_masking_left_costs_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact.Redactor, "text", lambda _self, text, **_: text)
    done = bundle.finish(arrived(tmp_path, {"server.log": f"asked with {KEY}\n"}, secrets=[KEY]))
    assert [finding["code"] for finding in done["findings"]] == ["BUNDLE-SECRET"]
    assert not (Path(done["path"]) / "server.log").exists()


def test_a_file_that_changed_on_the_way_is_an_error(tmp_path: Path) -> None:
    asked = arrived(tmp_path, {"server.log": "a\n", "other.log": "b\n"})
    (tmp_path / "partial/server.log").write_text("c\n")
    (tmp_path / "partial/other.log").unlink()
    done = bundle.finish(asked)
    assert [finding["code"] for finding in done["findings"]] == ["BUNDLE-TRANSFER"] * 2 + ["BUNDLE-MISSING"] * 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"sha256": "x"}, None),
        ({"reason": "nothing there"}, None),
        ({"reason": "no unit", "required": True}, ("BUNDLE-MISSING", Severity.WARNING)),
        ({"reason": "denied", "required": True, "failed": True}, ("BUNDLE-MISSING", Severity.ERROR)),
        ({"reason": "denied", "failed": True}, ("BUNDLE-MISSING", Severity.WARNING)),
        ({"sha256": "x", "truncated": True}, ("BUNDLE-CUT", Severity.ERROR)),
        ({"sha256": "x", "truncated": True, "tail": True}, ("BUNDLE-CUT", Severity.INFO)),
    ],
)
def test_gaps(more: dict[str, Any], expected: tuple[str, Severity] | None) -> None:
    found = bundle.gaps([row("a", **more)], "h")
    assert [(finding.code, finding.severity) for finding in found] == ([expected] if expected else [])


def test_a_bundle_never_replaces_another(tmp_path: Path) -> None:
    asked = arrived(tmp_path, {"a": "a\n"})
    Path(asked["directory"]).mkdir(parents=True)
    with pytest.raises(FileExistsError, match="collect again"):
        bundle.finish(asked)


def test_the_command_answers_problems_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"partial": "/nonexistent"}'))
    assert bundle.main() == 0
    assert json.loads(capsys.readouterr().out) == {"error": "the bundle could not be finished: 'directory'"}


def test_transfer_uses_the_connection_of_the_host() -> None:
    connection = {"inventory_hostname": "h", "ansible_host": "fd00::1", "ansible_user": "root"}
    call = bundle.transfer({**connection, "ansible_ssh_private_key_file": "/k"}, "/staging/b", "/here")
    assert call[-2:] == ["root@[fd00::1]:/staging/b/", "/here/"]
    assert "-i /k" in call[call.index("--rsh") + 1]
    assert bundle.transfer({"ansible_connection": "local"}, "/a", "/b")[-2:] == ["/a/", "/b/"]
    with pytest.raises(TransferError, match="docker"):
        bundle.transfer({**connection, "ansible_connection": "community.docker.docker"}, "/a", "/b")


def test_room_on_the_controller_is_shared_among_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 464 * bundle_table.MIB})
    monkeypatch.setattr(bundle.shutil, "disk_usage", lambda _: usage)
    assert bundle.room(str(tmp_path / "not/yet"), 4) == 100 * bundle_table.MIB
    monkeypatch.setattr(usage, "free", 64 * bundle_table.MIB)
    with pytest.raises(ValueError, match=r"no room for bundles of 4 hosts on this machine: .* \(log_bundle_dest\)"):
        bundle.room(str(tmp_path), 4)


def test_a_bundle_holds_its_diagnosis_and_the_run_a_table(tmp_path: Path) -> None:
    log = "[10:00:00] The server is fired up and ready to roll!\n"
    verify = tmp_path / "verify.txt"
    verify.write_text("31 passed\n")
    done = bundle.finish(arrived(tmp_path, {"server.log": log}, verify=str(verify)))
    final = Path(done["path"])
    assert done["state"] == "serving"
    assert "state   SERVING" in (final / "diagnosis.txt").read_text()
    assert (final / "verify.txt").read_text() == "31 passed\n"
    manifest = json.loads((final / "manifest.json").read_text())
    assert (manifest["schema"], manifest["run"], manifest["state"]) == (2, "t", "serving")
    assert {"diagnosis.txt", "verify.txt"} <= {item["name"] for item in manifest["files"]}
    table = (final.parent / "summary.txt").read_text()
    assert table.splitlines()[3].split() == ["h", "serving", "3", "0.0", "0", "0"]
    assert "dead  no bundle: unreachable" in summary.write(final.parent, ["h", "dead"])
    assert summary.main([str(tmp_path / "none"), "h"]) == 1


def test_the_manifest_is_json_whatever_was_masked(tmp_path: Path) -> None:
    asked = arrived(
        tmp_path, {"server.log": "Authorization: Bearer abcdefgh\n"}, pins={"api_key": 5, "note": KEY}, secrets=[KEY]
    )
    asked["entries"][0]["masked_as"] = {"Authorization": 2, "api-key": 3, "HF_TOKEN": 1}
    asked["entries"][0]["masked"] = 6
    final = Path(bundle.finish(asked)["path"])
    manifest = json.loads((final / "manifest.json").read_text())
    assert {"name": "api-key", "count": 3} in manifest["masked_as"]
    assert sum(one["count"] for one in manifest["masked_as"]) == manifest["masked"]
    assert json.loads((final / "pins.json").read_text()) == {"api_key": MASK, "note": MASK}
