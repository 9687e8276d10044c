"""Upgrades and the way back, with a client that asks all the time: it may see failures while the server restarts only.

Minutes of installing: `make soak` alone. What is cheap of it is in test_deploy.py and in the scenarios of the roles.
"""

import base64
import hashlib
import json
import os
import threading
import time
import urllib.error
import zipfile

import pytest
import yaml

from .conftest import FIGURES, ROOT
from .test_deploy import post
from .test_interruption import Cut, interrupt

pytestmark = pytest.mark.skipif("not __import__('os').environ.get('PIVOT_SOAK')", reason="PIVOT_SOAK=1 upgrades")

PATCH = """\
--- a/sglang/srt/models/registry.py
+++ b/sglang/srt/models/registry.py
@@ -1,3 +1,4 @@
 # SPDX-License-Identifier: Apache-2.0
 # SPDX-FileCopyrightText: Copyright contributors to the vLLM project
+# another release of the same wheels
 # Adapted from https://github.com/vllm-project/vllm/blob/v0.6.4.post1/vllm/model_executor/models/registry.py
"""
# an index that answers nobody: what a deployment needs lies in the wheelhouse
CLOSED = {"PIP_NO_INDEX": "1", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}


class Client(threading.Thread):
    """Asks for a few tokens again and again; failures are the times of answers that were none."""

    def __init__(self, host, key):
        super().__init__(daemon=True)
        self._host, self._key, self._over = host, key, threading.Event()
        self.asked, self.failures = 0, []

    def run(self):
        while not self._over.wait(0.3):
            self.asked += 1
            began = time.time()
            try:
                post(self._host, self._key, "/generate", {"text": "def f(", "sampling_params": {"max_new_tokens": 2}})
            except (OSError, ValueError, urllib.error.URLError):
                self.failures.append((began, time.time()))

    def stop(self):
        self._over.set()
        self.join(timeout=150)


@pytest.fixture(scope="module")
def client(deployed, lab, host):
    asking = Client(host, lab["secrets"]["vault_sglang_api_key"])
    asking.start()
    yield asking
    asking.stop()


@pytest.fixture(scope="module")
def place():
    path = ROOT / ".lab/upgrade"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="module")
def first(deployed, controller):
    """The release that serves at the beginning; earlier tests may have left another state."""
    run = controller.play()
    assert run.status == "successful", run.output[-4000:]


@pytest.fixture(scope="module")
def good(place):
    """Settings with one patch, which makes release B."""
    path = place / "registry.patch"
    path.write_text(PATCH)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return settings(place, "good", sglang_engine_patches=[{"file": str(path), "sha256": digest}])


def settings(place, name, **variables):
    path = place / f"{name}.yml"
    path.write_text(yaml.safe_dump(variables))
    return f"@{path}"


def current(host):
    return host.run("basename $(readlink -e /opt/sglang/current)").strip()


def restarts(host):
    """When the service was not ready, as [begin, end] in seconds: systemd's own messages about the unit."""
    text = host.run("journalctl UNIT=sglang.service -o json --output-fields=MESSAGE,MESSAGE_ID,JOB_TYPE")
    found, begin = [], None
    for line in text.splitlines():
        entry = json.loads(line)
        at, message = int(entry["__REALTIME_TIMESTAMP"]) / 1e6, str(entry.get("MESSAGE"))
        if message.startswith(("Stopping ", "Starting ")) and begin is None:
            begin = at
        elif message.startswith("Started ") and begin is not None:
            found.append((begin, at))
            begin = None
    return found


def outside_of_restarts(client, host):
    """Failures that no restart explains, with a second of leeway for a question that was on its way."""
    known = restarts(host)
    return [
        failure for failure in client.failures if not any(a - 1 <= failure[1] and failure[0] <= b + 1 for a, b in known)
    ]


def broken_wheel(folder):
    """fastapi of the locked version without anything in it."""
    folder.mkdir(exist_ok=True)
    path = folder / "fastapi-0.165.0+broken-py3-none-any.whl"
    info = "fastapi-0.165.0+broken.dist-info"
    files = {
        "fastapi/__init__.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: fastapi\nVersion: 0.165.0+broken\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(text)}\n")
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "".join(rows) + f"{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return path


def test_a_broken_release_leaves_the_first_one_serving(first, client, place, controller, host, monkeypatch):
    wheel = broken_wheel(place / "wheels")
    lines = (ROOT / "requirements/engine/cpu-py311.lock").read_text().splitlines()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    changed = [f"fastapi==0.165.0+broken --hash=sha256:{digest}" if "fastapi==" in line else line for line in lines]
    (place / "broken.lock").write_text("\n".join(changed) + "\n")
    gaps = str(ROOT / "requirements/engine/cpu-py311.gaps.yml")
    broken = settings(
        place, "broken", sglang_engine_lock=str(place / "broken.lock"), sglang_engine_lock_sha256="",
        sglang_engine_allowed_gaps=gaps,
    )  # fmt: skip
    monkeypatch.setenv("PIVOT_FIND_LINKS", str(wheel.parent))
    for name, value in CLOSED.items():
        monkeypatch.setenv(name, value)
    before, release, failures = host.trace(), current(host), len(client.failures)
    run = controller.play("playbooks/engine.yml", "-e", broken)
    assert run.status == "failed"
    assert "cannot import name" in run.output
    assert (host.trace(), current(host)) == (before, release)
    assert len(client.failures) == failures
    again = controller.play("playbooks/engine.yml")
    assert again.status == "successful", again.output[-3000:]
    assert host.run("ls -A /opt/sglang/building") == ""


def test_a_good_release_serves_and_the_first_one_is_kept(first, client, good, controller, host, monkeypatch):
    for name, value in CLOSED.items():
        monkeypatch.setenv(name, value)
    before = current(host)
    check = controller.play("deploy.yml", "--check", "-e", good)
    assert check.status == "successful", check.output[-3000:]
    assert "would install 0.5.23+pivot" in check.output
    run = controller.play("deploy.yml", "-e", good)
    assert run.status == "successful", run.output[-4000:]
    FIGURES.append(f"upgrade to a patched release without an index: {run.seconds:.0f} s")
    assert current(host).startswith("0.5.23+pivot")
    assert host.run("ls /opt/sglang/releases").split().count(before) == 1
    host.run(f"test -f /opt/sglang/releases/{before}/release.json")
    # the running server is that release; the host checks, which know the inventory alone, want the first one
    assert "SERVER-" not in controller.play("playbooks/verify.yml", "-e", good).output
    assert controller.play("deploy.yml", "-e", good).changed_tasks() == []


def test_a_rollback_needs_consent_and_says_what_to(first, client, good, controller, host):
    before = host.trace()
    check = controller.play("playbooks/rollback.yml", "--check")
    assert check.status == "successful", check.output[-3000:]
    assert "would go from 0.5.23+pivot" in check.output
    refused = controller.play("playbooks/rollback.yml", "-e", "sglang_server_allow_restart=false")
    assert "SERVER-RESTART-NEEDED" in refused.failures()[0]
    assert host.trace() == before


def test_an_interrupted_rollback_goes_on_to_the_same_release(first, client, good, controller, host):
    """Cut in both halves, the second time with what the first one left; B is left behind once, not A too."""
    interrupt(Cut("sglang_server : Put its files", (0.0, 0.5), gone=True, seed=1), "playbooks/rollback.yml")
    interrupt(Cut("sglang_server : Start and wait", (0.5, 8.0), gone=False, seed=2), "playbooks/rollback.yml")
    host.wait("! systemctl show sglang -P Job | grep -q [1-9]", 240)
    run = controller.play("playbooks/rollback.yml")
    assert run.status == "successful", run.output[-4000:]
    assert "back to 0.5.23-cpu-" in run.output
    assert current(host).startswith("0.5.23-cpu-")
    # the release of the inventory serves again, so a deployment has nothing to do
    still = controller.play()
    assert (still.status, still.changed_tasks()) == ("successful", [])
    verified = controller.play("deploy.yml", "--tags", "verify")
    assert verified.status == "successful", verified.output[-4000:]


def test_a_deployment_goes_forward_again(first, client, good, controller, host):
    check = controller.play("deploy.yml", "--check", "-e", good)
    assert "would switch current to 0.5.23+pivot" in check.output
    run = controller.play("deploy.yml", "-e", good)
    assert run.status == "successful", run.output[-4000:]
    assert current(host).startswith("0.5.23+pivot")
    back = controller.play("playbooks/rollback.yml")
    assert back.status == "successful", back.output[-4000:]
    FIGURES.append(f"rollback: {back.seconds:.0f} s")
    assert current(host).startswith("0.5.23-cpu-")


def test_the_client_saw_failures_during_restarts_only(first, client, good, controller, host):
    client.stop()
    down = sum(end - begin for begin, end in restarts(host) if begin > time.time() - 7200)
    FIGURES.append(f"upgrades: {client.asked} questions, {len(client.failures)} failed in {down:.0f} s of restarts")
    assert client.asked > 100
    assert client.failures, "the client was not looking"
    assert outside_of_restarts(client, host) == []


def test_releases_go_with_their_compiled_kernels(first, good, controller, host):
    patched = host.run("ls /opt/sglang/releases | grep pivot").strip()
    host.run(f"test -d /var/cache/sglang/releases/{patched}")
    host.run(f"rm -rf /opt/sglang/releases/{patched}")
    run = controller.play()
    assert run.changed_tasks() == ["Remove compiled kernels of releases that are gone"]
    assert patched not in host.run("ls /var/cache/sglang/releases")
