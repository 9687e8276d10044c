"""The whole experiment against the deployed service, and what is said while the probe is in.

Its parts run in `make test`: on, answer and off in test_interruption.py, the experiment on a service that Pivot did not
set up in the scenario debug_probes. Here they run as an operator would run them, under PIVOT_SOAK.
"""

import json
import os
import subprocess
import sys

import pytest

from .conftest import FIGURES, ROOT

pytestmark = pytest.mark.skipif(not os.environ.get("PIVOT_SOAK"), reason="its parts run elsewhere; PIVOT_SOAK=1")


def test_an_experiment_answers_and_ends_with_the_service_as_it_began(deployed, controller, host):
    before, count = host.trace(), host.starts()
    run = controller.play("playbooks/experiment.yml")
    assert run.status == "successful", run.output[-4000:]
    assert host.starts() == count + 2
    assert host.trace() == before
    answer = json.loads((ROOT / "artifacts/probe/infer1/answer.json").read_text())
    assert answer["suspect"] == "none"
    assert answer["wiring"]["layers"] == [3, 5, 7]
    FIGURES.append(f"experiment: {run.seconds:.0f} s")


def test_a_sample_of_training_on_other_layers_is_found_out(deployed, host):
    count = host.starts()
    line = [sys.executable, "-m", "pivot.cli", "compare-training", "lab/models/training-sample.safetensors"]
    done = subprocess.run([*line, "--limit", "infer1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "infer1: training used the inputs of layers 2, 4, 6, serving feeds 3, 5, 7: DIFFERENT" in done.stdout
    assert "write sglang_server_eagle_layer_ids: [2, 4, 6], and restart" in done.stdout
    assert host.starts() == count + 2


def test_while_it_is_on_everybody_is_told(deployed, controller, host):
    on = controller.play("deploy.yml", "--tags", "debug-on")
    assert on.status == "successful", on.output[-4000:]
    until = json.loads(host.run("cat /var/lib/pivot-probe/state.json"))["until"]
    verify = controller.play("deploy.yml", "--tags", "verify")
    assert verify.status == "successful", verify.output[-4000:]
    assert f"DEBUG PROBE IN sglang at infer1 until {until}" in verify.output
    deploy = controller.play()
    assert deploy.changed_tasks() == []
    assert f"the probe is ON (recording until {until})" in deploy.output
    off = controller.play("deploy.yml", "--tags", "debug-off")
    assert off.status == "successful", off.output[-4000:]
