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


def test_no_secret_is_printed_or_visible_in_processes_there_and_back(deployed, lab, controller, host):
    # another max-running-requests makes launch.yaml and the service change under the eyes of -vvv --diff
    changed = ROOT / ".lab/more-requests.yml"
    values = yaml.safe_load((ROOT / "inventory/lab/group_vars/inference/server.yml").read_text())
    changed.write_text(
        yaml.safe_dump({"sglang_server_launch": {**values["sglang_server_launch"], "max-running-requests": 3}})
    )
    run = controller.play("deploy.yml", "--diff", "-e", f"@{changed}", verbosity=3)
    assert run.status == "successful", run.output[-4000:]
    assert "+max-running-requests: 3" in run.output
    back = controller.play("playbooks/rollback.yml", "--diff", verbosity=3)
    assert back.status == "successful", back.output[-4000:]
    assert "back to 0.5.23-cpu-" in back.output
    # what was healthy before is what the inventory wants, to the last byte
    still = controller.play("playbooks/serve.yml")
    assert (still.status, still.changed_tasks()) == ("successful", [])
    processes = host.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '") + host.run(
        "systemctl show sglang; systemctl cat sglang"
    )
    local = "".join(command_lines())
    log = (ROOT / "artifacts/ansible.log").read_text()
    for name, secret in lab["secrets"].items():
        for where, text in {"output": run.output + back.output, "events": str(run.events), "log": log}.items():
            assert secret not in text, f"{name} in {where}"
        assert secret not in processes, name
        assert secret not in local, name


def test_a_restart_needs_consent(deployed, controller, host):
    before = host.show("InvocationID")
    run = controller.play(
        "playbooks/serve.yml", "-e", "sglang_server_allow_restart=false", "-e", "sglang_server_port=30002"
    )
    assert run.status == "failed"
    assert "sglang_server_allow_restart: true" in run.failures()[0]
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


STATE = (
    "systemctl cat sglang; ls -lR --time-style=+ /etc/systemd/system/sglang* /etc/sglang;"
    " tr '\\0' '\\n' </proc/$(systemctl show sglang -P MainPID)/cmdline;"
    " tr '\\0' '\\n' </proc/$(systemctl show sglang -P MainPID)/environ"
    " | grep -vE '^(INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID)=' | sort;"
    " cd -P /opt/sglang/current/lib/python3*/site-packages/sglang &&"
    " find . -name __pycache__ -prune -o -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum"
)


def starts(host):
    return host.run("journalctl -u sglang -o cat | grep -c 'fired up and ready'", check=False).strip()


def test_debug_on_names_the_layers_and_debug_off_leaves_no_trace(deployed, controller, host):
    before, count = host.run(STATE), int(starts(host))
    on = controller.play("deploy.yml", "--tags", "debug-on")
    assert on.status == "successful", on.output[-4000:]
    assert int(starts(host)) == count + 1
    assert "50-pivot-probe.conf" in host.run("systemctl cat sglang")
    for words in ("input of layer 3", "input of layer 5", "input of layer 7"):
        assert words in on.output
    again = controller.play("deploy.yml", "--tags", "debug-on")
    assert again.changed_tasks() == []
    off = controller.play("deploy.yml", "--tags", "debug-off")
    assert off.status == "successful", off.output[-4000:]
    assert int(starts(host)) == count + 2
    assert host.run(STATE) == before
    assert controller.play("deploy.yml", "--tags", "debug-off").changed_tasks() == []


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


def test_losing_the_layer_ids_shows_and_setting_them_renders_the_view_and_restarts_once(deployed, controller, host):
    accepted = {}
    manifest = json.loads((ROOT / "inventory/lab/manifests/kimi-k25-tiny-eagle3.json").read_text())
    without = {**manifest["config"]}
    without.pop("eagle_config")
    extra = ROOT / ".lab/layer-ids.yml"
    kept = "stat -c '%n %Y' /etc/sglang/environment /etc/sglang/firewall.nft /usr/local/lib/sglang/start_guard.py"
    for name, ids in {"without the key": None, "as trained": [3, 5, 7]}.items():
        before, count = host.run(kept), int(starts(host))
        values = {"sglang_server_drafter_config": without, "sglang_server_eagle_layer_ids": ids}
        extra.write_text(yaml.safe_dump(values))
        run = controller.play("playbooks/serve.yml", "-e", f"@{extra}")
        assert run.status == "successful", run.output[-4000:]
        assert set(run.changed_tasks()) == VIEW_AND_RESTART
        assert int(starts(host)) == count + 1
        assert host.run(kept) == before
        results = [e["event_data"]["res"] for e in run.events if e["event"] == "runner_on_ok"]
        accepted[name] = next(r["accept_length"] for r in results if "accept_length" in r)
    FIGURES.append("accept length of the health prompts: " + ", ".join(f"{k} {v:.2f}" for k, v in accepted.items()))
    assert accepted["as trained"] - accepted["without the key"] > 0.2


def test_a_killed_scheduler_comes_back(deployed, host):
    before = host.show("InvocationID")
    host.run("kill -9 $(pgrep -f sglang::scheduler | head -1)")
    host.wait(f"[ $(systemctl show sglang -P InvocationID) != {before['InvocationID']} ]", 180)
    host.wait("systemctl is-active --quiet sglang", 300)


def test_a_crash_loop_is_bounded(deployed, controller, host):
    host.run("mv /etc/sglang/launch.yaml /etc/sglang/launch.kept")
    host.run("echo 'model-path: /nowhere' >/etc/sglang/launch.yaml; chgrp sglang /etc/sglang/launch.yaml")
    host.run("systemctl restart --no-block sglang")
    host.wait("systemctl show sglang -P Result | grep -q start-limit-hit || systemctl is-failed --quiet sglang", 600)
    assert int(host.show("NRestarts")["NRestarts"]) <= 4
    host.run("mv /etc/sglang/launch.kept /etc/sglang/launch.yaml; systemctl reset-failed sglang")
    run = controller.play()
    assert run.status == "successful", run.output[-4000:]
