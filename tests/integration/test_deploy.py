"""The main job, in the order a user meets it. Every test stands on the ones before it."""

import contextlib
import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from .conftest import FIGURES, ROOT, existing

PROMPTS = json.loads((ROOT / "lab/models/prompts.json").read_text())


def command_lines():
    """Of all processes of this machine; other lanes' come and go."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes().decode(errors="replace")


def post(host, key, path, body):
    request = urllib.request.Request(f"http://{host.address}:30000{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        return json.load(answer)


def test_check_mode_before_anything_exists(lab, controller):
    run = controller.play("deploy.yml", "--check", "--diff")
    assert run.status == "successful", run.output[-4000:]
    assert "hostname: infer1" in run.output
    assert existing(lab) == {}
    for secret in lab["secrets"].values():
        assert secret not in run.output


def test_the_first_deployment_ends_with_a_summary(deployed, lab, host):
    for words in (f"http://{host.address}:30000/v1", "SGLang 0.5.23", "accept length", "took", "--tags debug-on"):
        assert words in deployed.output


def test_the_server_answers_from_the_controller(deployed, lab, host):
    key = lab["secrets"]["vault_sglang_api_key"]
    chat = post(
        host,
        key,
        "/v1/chat/completions",
        {"model": "kimi-k25-tiny", "messages": [{"role": "user", "content": "import os\n"}], "max_tokens": 16},
    )
    assert chat["choices"][0]["message"]["content"]
    answer = post(host, key, "/generate", {"text": "def f(", "sampling_params": {"max_new_tokens": 8}})
    assert answer["text"]
    assert answer["meta_info"]["spec_accept_length"] >= 1


def test_without_the_key_it_does_not_answer(deployed, host):
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(host, None, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})
    assert refused.value.code == 401


def test_speculative_output_equals_plain_greedy_output(deployed, lab, host):
    key, lengths = lab["secrets"]["vault_sglang_api_key"], []
    for prompt in PROMPTS["prompts"]:
        sampling = {"temperature": 0, "max_new_tokens": PROMPTS["max_new_tokens"], "ignore_eos": True}
        answer = post(host, key, "/generate", {"text": prompt["text"], "sampling_params": sampling})
        assert answer["output_ids"] == prompt["output_ids"], prompt["id"]
        lengths.append(answer["meta_info"]["spec_accept_length"])
    mean = sum(lengths) / len(lengths)
    FIGURES.append(f"accept length over {len(lengths)} held-out prompts: {mean:.3f}")
    assert mean >= 2.3


def test_the_kernels_of_the_lab_agree_with_sglangs_own(deployed, host):
    check = ROOT / "lab/kernels/check_ops.py"
    seeds = 40 if os.environ.get("PIVOT_SOAK") else 4
    command = f"SGLANG_USE_CPU_ENGINE=1 /opt/sglang/current/bin/python -W ignore - --seeds {seeds}"
    host.run(command, stdin=check.read_text())


def test_the_second_deployment_changes_nothing(deployed, controller):
    run = controller.play()
    assert run.status == "successful", run.output[-4000:]
    assert run.changed_tasks() == []
    remote = run.remote_tasks()
    FIGURES.append(f"second deployment: {run.seconds:.1f} s, {len(remote)} remote tasks")
    assert len(remote) <= 30, remote


def test_check_mode_on_a_deployed_host_reports_no_change(deployed, controller):
    run = controller.play("deploy.yml", "--check", "--diff")
    assert run.status == "successful", run.output[-4000:]
    assert run.changed_tasks() == []


# the launch configuration changes too, but the events of a task without log do not tell
VIEW_AND_RESTART = {
    "Show what changes",
    "Show which config the drafter gets",
    "Directory",
    "Links to the verified weights",
    "Config with the layer ids",
    "Unit, environment, firewall and start guard",  # the unit alone: it has the view's path recorded at each start
    "Start and wait for the first token, as the journal shows for unit sglang",
    "Keep the running set of release, launch configuration and drafter view",
    "Remove drafter views of earlier launches",
}


def accept_length(run):
    results = [event["event_data"]["res"] for event in run.events if event["event"] == "runner_on_ok"]
    return next(result["accept_length"] for result in results if "accept_length" in result)


def test_a_crash_loop_is_bounded(deployed, host):
    """A killed scheduler is noticed and the server started again, here with a setting that no start survives; it stays
    down until the next deployment."""
    host.run("cd /etc/sglang; cp -p environment environment.kept; echo PYTHONHOME=/nowhere >>environment")
    host.run("kill -9 $(pgrep -f sglang::scheduler | head -1)")
    host.wait("systemctl show sglang -P Result | grep -q start-limit-hit || systemctl is-failed --quiet sglang", 600)
    assert 1 <= int(host.show("NRestarts")["NRestarts"]) <= 4
    host.run("cd /etc/sglang; mv environment.kept environment")


def test_losing_the_layer_ids_shows_is_taken_back_and_no_secret_is_printed(deployed, lab, controller, host):
    """Under the eyes of -vvv --diff: another drafter view and max-running-requests, one start of the server that is
    down; back, one restart."""
    manifest = json.loads((ROOT / "inventory/lab/manifests/kimi-k25-tiny-eagle3.json").read_text())
    without = {key: value for key, value in manifest["config"].items() if key != "eagle_config"}
    flags = yaml.safe_load((ROOT / "inventory/lab/group_vars/inference/server.yml").read_text())["sglang_server_launch"]
    extra = ROOT / ".lab/layer-ids.yml"
    values = {
        "sglang_server_drafter_config": without,
        "sglang_server_eagle_layer_ids": None,
        "sglang_server_launch": {**flags, "max-running-requests": 3},
        "pivot_waivers": {"DRAFTER-LAYERS": "what it costs is measured here"},  # preflight would stop it
    }
    extra.write_text(yaml.safe_dump(values))
    kept = "stat -c '%n %Y' /etc/sglang/environment /etc/sglang/firewall.nft /usr/local/lib/sglang/start_guard.py"
    before, count = host.run(kept), host.starts()
    run = controller.play("deploy.yml", "--diff", "-e", f"@{extra}", verbosity=3)
    assert run.status == "successful", run.output[-4000:]
    assert "+max-running-requests: 3" in run.output
    assert set(run.changed_tasks()) == VIEW_AND_RESTART
    assert host.starts() == count + 1
    assert host.run(kept) == before
    back = controller.play("playbooks/rollback.yml", "--diff", verbosity=3)
    assert back.status == "successful", back.output[-4000:]
    assert "back to 0.5.23-cpu-" in back.output
    assert host.starts() == count + 2
    # what was healthy before is what the inventory wants, to the last byte
    still = controller.play("playbooks/serve.yml")
    assert (still.status, still.changed_tasks()) == ("successful", [])
    lost, trained = accept_length(run), accept_length(back)
    FIGURES.append(f"accept length of the health prompts: without the ids {lost:.2f}, as trained {trained:.2f}")
    assert trained - lost > 0.2
    nowhere_in_sight(lab, host, {"output": run.output + back.output, "events": str(run.events)})


def nowhere_in_sight(lab, host, said):
    """No secret in what was said, in the log, or in what processes and units show, there and here."""
    processes = host.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '") + host.run(
        "systemctl show sglang; systemctl cat sglang"
    )
    said = {**said, "log": (ROOT / "artifacts/ansible.log").read_text(), "processes": processes}
    local = "".join(command_lines())
    for name, secret in lab["secrets"].items():
        for where, text in said.items():
            assert secret not in text, f"{name} in {where}"
        assert secret not in local, name


def test_a_restart_needs_consent(deployed, controller, host):
    """Check mode shows what for."""
    before = host.show("InvocationID")
    wanted = ("-e", "sglang_server_allow_restart=false", "-e", "sglang_server_port=30002")
    for arguments, shown in (((), False), (("--check", "--diff"), True)):
        run = controller.play("playbooks/serve.yml", *arguments, *wanted)
        assert run.status == "failed"
        assert "sglang_server_allow_restart: true" in run.failures()[0]
        assert ("+port: 30002" in run.output) is shown
    assert host.show("InvocationID") == before
    assert "30002" not in host.run("cat /etc/sglang/launch.yaml")


def test_the_container_has_no_way_out(deployed, host):
    assert host.run("ip route show default") == ""
    assert host.run("ping -c1 -W1 192.0.2.2 2>&1 || echo unreachable", check=False).strip().endswith("unreachable")


def test_debug_on_and_off_together_are_refused(deployed, controller, host):
    before = host.show("InvocationID")
    run = controller.play("deploy.yml", "--tags", "debug-on,debug-off")
    assert run.status == "failed"
    assert "debug-on and debug-off" in " ".join(run.failures())
    assert host.show("InvocationID") == before


def test_collect_brings_a_bundle_without_secrets(deployed, lab, controller):
    run = controller.play("deploy.yml", "--tags", "collect")
    assert run.status == "successful", run.output[-4000:]
    bundle = max((ROOT / "artifacts").glob("*T*Z/infer1"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest
    texts = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    assert any(b"fired up and ready" in text for text in texts.values())
    for name, secret in lab["secrets"].items():
        for path, text in texts.items():
            assert secret.encode() not in text, f"{name} in {path}"


def test_verify_runs_the_host_checks(deployed, controller):
    run = controller.play("deploy.yml", "--tags", "verify")
    assert run.status == "successful", run.output[-6000:]
