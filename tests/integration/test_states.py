"""Five states of a real server, five bundles, five diagnoses. Long (three starts of the server): `make soak`."""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pivot.logs.diagnosis import Diagnosis, State, diagnose
from pivot.logs.evidence import read

ROOT = Path(__file__).resolve().parents[2]
DROP_IN = "/run/systemd/system/sglang.service.d/test-states.conf"
SCHEDULER = "pgrep -f '^sglang::schedul' | head -1"
READY = "systemctl is-active --quiet sglang"  # its ExecStartPost ends when a token was generated
# the drafter's head, turned by half: it proposes tokens, and always others than the target wants
TURN = """
import json, pathlib, struct, sys
source, target = map(pathlib.Path, sys.argv[1:])
raw = bytearray(source.read_bytes())
size, = struct.unpack("<Q", raw[:8])
begin, end = json.loads(raw[8:8 + size])["lm_head.weight"]["data_offsets"]
head = raw[8 + size + begin:8 + size + end]
half = len(head) // 2
raw[8 + size + begin:8 + size + end] = head[half:] + head[:half]
target.write_bytes(raw)
target.chmod(0o644)
"""

pytestmark = pytest.mark.skipif(not os.environ.get("PIVOT_SOAK"), reason="three starts of the server: make soak")


def ask(host: Any, lab: dict[str, Any], count: int = 4) -> None:
    """Prompts that a decode line each follows."""
    for number in range(count):
        body = {
            "text": f"def f{number}(a, b):\n",
            "sampling_params": {"temperature": 0, "max_new_tokens": 160, "ignore_eos": True},
        }
        request = urllib.request.Request(
            f"http://{host.address}:30000/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {lab['secrets']['vault_sglang_api_key']}"},
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as answer:
            assert answer.status == 200


def collected(controller: Any) -> Diagnosis:
    """The diagnosis of a bundle that is taken now."""
    run = controller.play("deploy.yml", "--tags", "collect", "-e", "log_bundle_strict=false")
    assert run.status == "successful", run.output[-4000:]
    found = diagnose(read(max((ROOT / "artifacts").glob("*T*Z/infer1"))))
    assert f"state   {found.verdict.state}" in run.output
    return found


def codes(found: Diagnosis) -> list[str]:
    return [suspect.finding.code for suspect in found.suspects]


def test_healthy(deployed: Any, controller: Any, host: Any, lab: dict[str, Any]) -> None:
    host.wait(READY, 900)
    ask(host, lab)
    found = collected(controller)
    assert (found.verdict.state, codes(found)) == (State.SERVING, [])
    assert found.facts.manifest["findings"] == []
    brought = {entry["name"] for entry in found.facts.manifest["files"] if entry["sha256"]}
    assert brought >= {"node/facts.json", "node/container.conf", "server_info.json", "process/environment.json"}


def test_collect_while_preflight_has_errors(deployed: Any, controller: Any, tmp_path: Path) -> None:
    (tmp_path / "wrong.yml").write_text("sglang_server_launch: {no-such-flag: 1}\n")
    wrong = ("-e", f"@{tmp_path}/wrong.yml")
    assert controller.play("playbooks/preflight.yml", *wrong).status == "failed"
    run = controller.play("deploy.yml", "--tags", "collect", *wrong)
    assert run.status == "successful", run.output[-4000:]
    assert f"state   {State.SERVING}" in run.output


def test_a_stopped_scheduler(deployed: Any, controller: Any, host: Any) -> None:
    host.run(f"kill -STOP $({SCHEDULER})")
    try:
        found = collected(controller)
    finally:
        host.run(f"kill -CONT $({SCHEDULER})")
    assert found.verdict.state == State.HUNG
    assert codes(found)[0] == "DIAG-PROCESS-STOPPED"
    host.wait(READY, 120)


def test_a_health_check_that_fails_brings_the_logs(deployed: Any, controller: Any, host: Any) -> None:
    before = set((ROOT / "artifacts").glob("*T*Z/infer1"))
    run = controller.play("playbooks/serve.yml", "-e", "sglang_server_health_prompts=/nonexistent/prompts.json")
    assert run.status == "failed"
    words = run.failures()[-1]
    assert words.startswith("sglang_server_health_prompts: the prompts /nonexistent/prompts.json cannot be read")
    (bundle,) = set((ROOT / "artifacts").glob("*T*Z/infer1")) - before
    assert f"pivot diagnose {bundle}" in words
    assert "serving" in words


def test_a_dead_host_does_not_stop_the_others(deployed: Any, controller: Any, tmp_path: Path) -> None:
    inventory = tmp_path / "dead.yml"
    inventory.write_text("inference: {hosts: {dead: {ansible_host: 127.0.0.1, ansible_port: 1}}}\n")
    run = controller.play("playbooks/collect.yml", "-i", str(inventory))
    assert run.status == "failed"
    assert run.stats["dark"] == {"dead": 1}
    bundle = max((ROOT / "artifacts").glob("*T*Z/infer1"))
    table = (bundle.parent / "summary.txt").read_text()
    assert "dead    no bundle: unreachable, or its collection failed" in table
    assert "infer1  serving" in table
    assert "no bundle: unreachable" in run.output


@pytest.fixture(scope="module")
def patient(host: Any) -> Iterator[None]:
    """A crash stays one, and a slow start is waited for; in the end the server runs as before."""
    post = host.run("systemctl cat sglang | sed -n 's/^ExecStartPost=\\(.*\\) [0-9]*$/\\1/p' | tail -1").strip()
    lines = ["[Service]", "Restart=no", "TimeoutStartSec=1900", "ExecStartPost=", f"ExecStartPost={post} 1800"]
    host.run(f"mkdir -p $(dirname {DROP_IN}); cat >{DROP_IN}; systemctl daemon-reload", stdin="\n".join(lines) + "\n")
    yield
    host.run(
        f"rm {DROP_IN}; systemctl daemon-reload; systemctl reset-failed sglang; systemctl restart --no-block sglang"
    )
    host.wait(READY, 900)


def test_a_wrong_drafter(patient: None, deployed: Any, controller: Any, host: Any, lab: dict[str, Any]) -> None:
    view = host.run("ls -d /etc/sglang/drafter/*").strip()
    right = host.run(f"readlink {view}/model.safetensors").strip()
    host.run(f"python3 - {right} /var/lib/sglang/turned.safetensors", stdin=TURN)
    host.run(
        f"ln -sfn /var/lib/sglang/turned.safetensors {view}/model.safetensors; systemctl restart --no-block sglang"
    )
    try:
        host.wait(READY, 1800)
        ask(host, lab)
        found = collected(controller)
    finally:
        host.run(f"ln -sfn {right} {view}/model.safetensors; rm /var/lib/sglang/turned.safetensors")
    assert (found.verdict.state, codes(found)) == (State.BAD, ["DIAG-ACCEPT-NONE"])


def test_killed_during_the_load(patient: None, deployed: Any, controller: Any, host: Any) -> None:
    host.run("systemctl reset-failed sglang; systemctl restart --no-block sglang")
    host.wait("test $(systemctl show sglang -P SubState) = start-post", 120)
    host.wait(f"{SCHEDULER} | grep -q .", 1800)
    host.run(f"kill -KILL $({SCHEDULER})")
    host.wait("systemctl is-failed --quiet sglang", 300)
    found = collected(controller)
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-KILLED"])


def test_a_full_volume(patient: None, deployed: Any, controller: Any, host: Any) -> None:
    host.run("systemctl stop sglang; systemctl reset-failed sglang || true")
    host.run("mkdir -p /run/sglang; mount -t tmpfs -o size=4k,nr_inodes=1 full /run/sglang")
    try:
        host.run("systemctl start sglang", check=False)
        found = collected(controller)
    finally:
        host.run("umount /run/sglang")
    assert found.verdict.state == State.CRASHED
    assert codes(found)[0] == "DIAG-VOLUME-FULL"
