"""The releases on a real container: as pinned, repaired when damaged, continued when interrupted."""

import json
import os
import re
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
PINNED = {name: pin["sha256"] for name, pin in DRAFTER["files"].items()}
RECORD = f"{BASE}/.verified-{DRAFTER['revision']}.json"


@pytest.fixture
def converge(request: pytest.FixtureRequest) -> Any:
    """Run the scenario's play again; its output without line breaks, and the number of changed tasks.

    fails: whether it has to; None where it may.
    """

    def run(*options: str, fails: bool | None = False, playbook: str = "converge.yml") -> tuple[str, int]:
        inventory = request.config.getoption("--ansible-inventory")
        line = [Path(sys.executable).with_name("ansible-playbook"), "--inventory", inventory, *options, playbook]
        plain = {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0"}  # molecule wants colours
        environment = {**os.environ, **plain, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg")}
        here = Path(__file__).parent
        done = subprocess.run(line, cwd=here, env=environment, capture_output=True, text=True, check=False)
        assert fails in (None, done.returncode != 0), done.stdout + done.stderr
        return " ".join(done.stdout.split()), int(done.stdout.rsplit("changed=", 1)[1].split()[0])

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
    assert f"{RELEASE}: not known to be verified, 0.5 MB to be hashed" in output
    assert changed == 1
    assert hashes(host, RELEASE)["model.safetensors"] != DRAFTER["files"]["model.safetensors"]["sha256"]
    output, _ = converge()
    assert "WEIGHTS-HASH" in output
    assert "model.safetensors has sha256" in output
    assert hashes(host, RELEASE) == PINNED
    assert converge("--check", "--diff")[1] == 0


def test_interrupted_transfer_is_continued(host: Any, converge: Any) -> None:
    incoming = f"{BASE}/.incoming-{DRAFTER['revision']}"
    host.check_output(f"mv {RELEASE} {incoming} && rm {RECORD} && truncate -s 9000 {incoming}/model.safetensors")
    converge()
    assert hashes(host, RELEASE) == PINNED


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
    converge()
    assert hashes(host, RELEASE) == PINNED


def test_full_verification_sees_what_the_record_hides(host: Any, converge: Any) -> None:
    # a bit that flips on the disk changes no times; here the record is made to agree with a changed file
    rewrite = (
        "import json, os, time\n"
        f"record, status = json.load(open({RECORD!r})), os.stat({RELEASE + '/model.safetensors'!r})\n"
        "parts = ('dev', 'ino', 'size', 'mtime_ns', 'ctime_ns')\n"
        "key = ':'.join(str(getattr(status, f'st_{part}')) for part in parts)\n"
        "time.sleep(0.1)\n"
        f"record['hashes'][key] = [{PINNED['model.safetensors']!r}, time.time_ns(), '']\n"
        f"json.dump(record, open({RECORD!r}, 'w'))\n"
    )
    host.check_output(f"printf X | dd of={RELEASE}/model.safetensors bs=1 seek=5000 conv=notrunc")
    host.check_output("python3 -c %s", rewrite)
    assert converge()[1] == 0
    output, _ = converge("--extra-vars", "model_weights_verify=full")
    assert "WEIGHTS-HASH" in output
    assert hashes(host, RELEASE) == PINNED


def test_a_path_of_the_host_is_linked_and_never_written(host: Any, converge: Any) -> None:
    host.check_output(f"mv {RELEASE} /srv/held && rm {RECORD}")
    before = host.check_output("find /srv/held -printf '%p %i %C@\\n'")
    output, _ = converge("--extra-vars", '{"drafter_paths": ["/srv/nowhere", "/srv/held"]}')
    assert "/srv/nowhere is not there: it is not used" in output
    assert host.check_output(f"readlink {RELEASE}/model.safetensors") == "/srv/held/model.safetensors"
    assert host.check_output("find /srv/held -printf '%p %i %C@\\n'") == before
    assert converge("--extra-vars", '{"drafter_paths": ["/srv/held"]}')[1] == 0
    # without that path the links are nothing that the release may hold
    output, _ = converge()
    assert "WEIGHTS-KIND" in output
    assert hashes(host, RELEASE) == PINNED
    host.check_output("rm -r /srv/held")


def test_a_job_that_runs_is_followed(host: Any, converge: Any) -> None:
    """STAND-IN for a long job of an earlier run: it has that one's lock until somebody watches it."""
    host.check_output(f"printf X | dd of={RELEASE}/model.safetensors bs=1 seek=5000 conv=notrunc")
    waits = """until pgrep -f '"action": "watc[h]"'; do sleep 0.1; done; sleep 1"""
    host.check_output("systemd-run --quiet --unit=stand-in-job flock /run/pivot-weights/*/alive bash -c %s", waits)
    output, _ = converge()
    assert hashes(host, RELEASE) == PINNED
    assert "TASK [model_weights : It works on]" in output


def test_a_killed_unit_is_a_sentence_and_the_next_run_goes_on(host: Any, converge: Any) -> None:
    kill = (
        "until u=$(systemctl list-units --no-legend --plain 'pivot-weights-*' | cut -d' ' -f1) && [ -n \"$u\" ]; "
        "do sleep 0.02; done; systemctl kill --signal=KILL $u"
    )
    for _ in range(5):  # a job of half a megabyte may be faster than who wants to kill it
        host.check_output(f"mv {RELEASE} {BASE}/.incoming-{DRAFTER['revision']} && rm {RECORD}")
        host.check_output("systemd-run --quiet --collect --unit=killer bash -c %s", kill)
        output, _ = converge(fails=None)
        host.run("systemctl stop killer")
        if not host.file(RELEASE).exists:
            break
    assert re.search(r"the job (did not begin|ended without a word).*journalctl -u pivot-weights-", output), output
    assert not host.file(RELEASE).exists
    converge()
    assert hashes(host, RELEASE) == PINNED
    assert host.check_output("systemctl list-units --all --no-legend 'pivot-weights-*'") == ""


def test_only_what_is_named_and_unused_is_pruned(host: Any, converge: Any) -> None:
    prune = str(PROJECT / "playbooks/prune.yml")
    old = f"{DRAFTER['repository']}@r0"
    host.check_output(f"cp -rT {RELEASE} {BASE}/r0 && cp {RECORD} {BASE}/.verified-r0.json")
    host.check_output(f"mkdir -p /etc/sglang && echo {RELEASE} >/etc/sglang/launch.yaml")
    host.check_output(f"mkdir -p /var/lib/pivot/llm && echo {BASE}/r0/config.json >/var/lib/pivot/llm/healthy.json")
    output, changed = converge(playbook=prune)
    assert (
        f"{old}: can go, frees 0.5 MB, but a rollback to what /var/lib/pivot/llm/healthy.json keeps needs it" in output
    )
    assert f"{DRAFTER['repository']}@{DRAFTER['revision']}: stays, used by /etc/sglang/launch.yaml" in output
    assert changed == 0
    named = ("--extra-vars", json.dumps({"model_weights_prune": [old]}))
    assert converge("--check", *named, playbook=prune)[1] == 0
    assert host.file(f"{BASE}/r0").exists
    assert converge(*named, playbook=prune)[1] == 1
    output, changed = converge(*named, playbook=prune)
    assert (f"there is no {old}" in output, changed) == (True, 0)
    assert sorted(host.check_output(f"ls -A {BASE}").split()) == sorted([Path(RECORD).name, Path(RELEASE).name])
    host.check_output("rm -r /etc/sglang /var/lib/pivot")
