"""The bundles on the controller and what is left on the host."""

import base64
import hashlib
import json
import os
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import testinfra

HOME = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "bundles")
BUNDLES = sorted(path.parent for path in HOME.glob("*/*/manifest.json"))
SECRETS = {
    "api key": "made-up-key-&-never-shown",
    "token": "made/up+token=of#a~site",
    "password in a url": "made-up-db-pass",
    "passphrase": "open sesame 4711",
    "password in a container's description": "made-up-panel-pass",
}


def written(secret: str) -> list[bytes]:
    """A secret as files may hold it; base64 as it was printed, behind a name and a colon."""
    plain = secret.encode()
    behind_name = base64.b64encode(b"user:" + plain)
    return [
        plain,
        json.dumps(secret)[1:-1].encode(),
        urllib.parse.quote(secret).encode(),
        urllib.parse.quote(secret, safe="").encode(),
        plain.hex().encode(),
        base64.b64encode(plain).rstrip(b"=")[:-1],
        behind_name[8:].rstrip(b"=")[:-1],
    ]


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Any:
    return reached("instance", request)


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Any:
    return reached("node", request)


def reached(name: str, request: pytest.FixtureRequest) -> Any:
    return testinfra.get_host(f"ansible://{name}", ansible_inventory=request.config.getoption("--ansible-inventory"))


@pytest.fixture(params=BUNDLES, ids=lambda path: path.parent.name)
def bundle(request: pytest.FixtureRequest) -> Path:
    return request.param


def manifest(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / "manifest.json").read_text())


def text(bundle: Path, name: str) -> str:
    return (bundle / name).read_text(errors="replace")


def test_every_run_that_could_left_one_bundle_and_nothing_else() -> None:
    assert len(BUNDLES) == 5
    assert {path.name for path in BUNDLES} == {"instance"}
    assert list(HOME.rglob(".*")) == []


def test_no_secret_is_in_any_file(bundle: Path) -> None:
    for path in (path for path in bundle.rglob("*") if path.is_file()):
        content = path.read_bytes()
        found = {name: form for name, secret in SECRETS.items() for form in written(secret) if form in content}
        assert found == {}, path


@pytest.mark.parametrize("name", list(SECRETS)[:4])
def test_each_secret_was_there_to_be_masked(host: Any, name: str) -> None:
    logs = host.check_output("journalctl -u talker -o cat --no-pager; cat /etc/talker/*").encode()
    assert any(form in logs for form in written(SECRETS[name]))


def test_the_first_bundle_says_what_is_needed() -> None:
    first = BUNDLES[0]
    log = text(first, "server.log")
    assert "talker is starting" in log
    assert "005999 ..." in log
    assert "max_total_tokens=4096" in log
    assert "ExecStart=/usr/bin/python3 /opt/talker.py" in text(first, "unit.txt")
    assert json.loads(text(first, "server_info.json"))["served"] == "talker-1"
    assert json.loads(text(first, "process/environment.json"))["HF_HUB_OFFLINE"] == "1"
    assert "max-total-tokens: 4096" in text(first, "config/etc/talker/launch.yaml")


def test_the_first_bundle_shows_processes_and_answers() -> None:
    (process,) = json.loads(text(BUNDLES[0], "processes.json"))
    assert (process["name"], process["parent"]) == ("python3", 1)
    assert process["state"] in "RS"
    answers = {one["path"]: one["status"] for one in json.loads(text(BUNDLES[0], "answers.json"))}
    assert answers == {"/health": 200, "/model_info": 200, "/server_info": 200, "/metrics": 200}


def test_a_bundle_explains_itself_and_the_run_has_a_table(bundle: Path) -> None:
    assert text(bundle, "diagnosis.txt").startswith("instance  talker.service  ")
    assert "instance" in text(bundle.parent, "summary.txt")
    assert manifest(bundle)["run"] == bundle.parent.name
    assert sum(one["count"] for one in manifest(bundle)["masked_as"]) == manifest(bundle)["masked"]


def test_the_node_tells_what_it_is_and_what_it_gave_the_container() -> None:
    assert json.loads(text(BUNDLES[0], "node/facts.json"))["kernel"]
    assert "hostname: instance" in text(BUNDLES[0], "node/container.conf")
    assert text(BUNDLES[0], "node/proc/cmdline")
    assert manifest(BUNDLES[0])["transfer"]["kept"] == 0


def test_the_report_names_what_was_masked() -> None:
    assert {one["name"] for one in manifest(BUNDLES[0])["masked_as"]} >= {"known value"}


def test_files_are_as_the_manifest_says(bundle: Path) -> None:
    entries = {entry["name"]: entry for entry in manifest(bundle)["files"]}
    files = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()} - {"manifest.json"}
    assert files == {name for name, entry in entries.items() if entry["sha256"]}
    for name in files:
        assert entries[name]["sha256"] == hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    assert all(entry["reason"] for entry in entries.values() if not entry["sha256"] or entry["truncated"])


def test_the_service_was_left_alone(host: Any) -> None:
    journal = host.check_output("journalctl -u talker -o cat --no-pager")
    assert journal.count("talker is starting") == 1, journal[:4000]
    assert journal.count("Started talker.service") == 1, journal[:4000]


def test_bundles_are_for_their_owner_alone(bundle: Path) -> None:
    assert bundle.stat().st_mode & 0o077 == 0
    assert [path for path in bundle.rglob("*") if path.stat().st_mode & 0o077] == []


STAGING = "find /var/tmp /tmp /run /srv -maxdepth 2 -name 'pivot-bundle-*'"


def test_the_host_keeps_nothing_but_what_another_run_has_there(host: Any) -> None:
    assert [Path(path).name for path in host.check_output(STAGING).split()] == ["pivot-bundle-other"]


def test_the_node_keeps_nothing(node: Any) -> None:
    assert node.check_output(STAGING) == ""
