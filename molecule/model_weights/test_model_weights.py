"""The releases on a real container: as pinned, repaired when damaged, continued when interrupted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
MANIFESTS = sorted((PROJECT / "inventory/lab/manifests").glob("kimi-k25-tiny*.json"))
DRAFTER: dict[str, Any] = json.loads((PROJECT / "inventory/lab/manifests/kimi-k25-tiny-eagle3.json").read_text())
BASE = f"/models/{DRAFTER['repository']}"
RELEASE = f"{BASE}/{DRAFTER['revision']}"
RECORD = f"{BASE}/.verified-{DRAFTER['revision']}.json"


@pytest.fixture
def converge(request: pytest.FixtureRequest) -> Any:
    """Run the scenario's play again; its output, and the number of changed tasks."""

    def run(*options: str, fails: bool = False) -> tuple[str, int]:
        inventory = request.config.getoption("--ansible-inventory")
        line = [sys.executable, "-m", "ansible", "playbook", "--inventory", inventory, *options, "converge.yml"]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg")}
        here = Path(__file__).parent
        done = subprocess.run(line, cwd=here, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout, int(done.stdout.rsplit("changed=", 1)[1].split()[0])

    return run


def hashes(host: Any, release: str) -> dict[str, str]:
    lines = host.check_output(f"cd {release} && find . -type f | sort | xargs sha256sum").splitlines()
    return {name.removeprefix("./"): digest for digest, name in (line.split() for line in lines)}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_releases_are_as_pinned(host: Any, path: Path) -> None:
    manifest = json.loads(path.read_text())
    release = f"/models/{manifest['repository']}/{manifest['revision']}"
    assert hashes(host, release) == {name: pin["sha256"] for name, pin in manifest["files"].items()}
    assert host.check_output(f"find {release} -type f -not -perm 0644 -o -type d -not -perm 0755") == ""


def test_nothing_is_left_behind(host: Any) -> None:
    assert sorted(host.check_output(f"ls -A {BASE}").split()) == sorted([Path(RECORD).name, Path(RELEASE).name])


def test_damage_is_named_and_repaired(host: Any, converge: Any) -> None:
    host.check_output(f"printf X | dd of={RELEASE}/model.safetensors bs=1 seek=5000 conv=notrunc")
    output, changed = converge("--check")
    assert "WEIGHTS-DAMAGED" in output
    assert "model.safetensors has sha256" in output
    assert changed == 1
    assert hashes(host, RELEASE)["model.safetensors"] != DRAFTER["files"]["model.safetensors"]["sha256"]
    _, changed = converge()
    assert changed == 3
    assert hashes(host, RELEASE)["model.safetensors"] == DRAFTER["files"]["model.safetensors"]["sha256"]
    assert converge("--check", "--diff")[1] == 0


def test_interrupted_transfer_is_continued(host: Any, converge: Any) -> None:
    incoming = f"{BASE}/.incoming-{DRAFTER['revision']}"
    host.check_output(f"mv {RELEASE} {incoming} && rm {RECORD} && truncate -s 9000 {incoming}/model.safetensors")
    assert converge()[1] == 3
    assert hashes(host, RELEASE) == {name: pin["sha256"] for name, pin in DRAFTER["files"].items()}


def test_file_of_the_user_is_never_removed(host: Any, converge: Any) -> None:
    host.check_output(f"touch {RELEASE}/notes.txt")
    output, changed = converge()
    assert "WEIGHTS-EXTRA" in output
    assert changed == 0
    host.check_output(f"truncate -s 10 {RELEASE}/config.json")
    output, _ = converge(fails=True)
    assert "would be lost when the release is replaced" in output
    assert host.file(f"{RELEASE}/notes.txt").exists
    host.check_output(f"rm {RELEASE}/notes.txt")
    assert converge()[1] == 3


def test_full_verification_sees_what_the_record_hides(host: Any, converge: Any) -> None:
    # a bit that flips on the disk changes no times; here the record is made to agree with a changed file
    rewrite = (
        "import json, os\n"
        f"record = json.load(open({RECORD!r}))\n"
        f"status = os.stat({RELEASE + '/model.safetensors'!r})\n"
        "record['files']['model.safetensors'] = "
        "[status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]\n"
        f"json.dump(record, open({RECORD!r}, 'w'))\n"
    )
    host.check_output(f"printf X | dd of={RELEASE}/model.safetensors bs=1 seek=5000 conv=notrunc")
    host.check_output("python3 -c %s", rewrite)
    assert converge()[1] == 0
    output, changed = converge("--extra-vars", "model_weights_verify=full")
    assert "WEIGHTS-DAMAGED" in output
    assert changed == 3
