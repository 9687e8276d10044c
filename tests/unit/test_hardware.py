"""The gatherers on described machines, and what is found there: tests/data/hardware, hand-written codes for each fault.

The gatherers run as they are, on this machine, in a mount namespace where the description is laid over what they read.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pivot_lab.hardware import VMID, Machine, describe

from pivot.machines import host
from pivot.program import program

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/hardware"
FAULTS: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "faults.yml").read_text())
CARDS = [*(f"/dev/nvidia{number}" for number in range(8)), "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
GATHERERS = {False: "roles/proxmox_host/files/node_facts.py", True: "roles/gpu_runtime/files/runtime_facts.py"}
WEIGHTS = 510  # GiB, as Kimi-K2.5's 547 GB

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can lay a description over this machine")


GATHERED: dict[str, dict[str, Any]] = {}  # by everything that a machine shows: a fault of one side leaves the other


def gather(directory: Path, described: dict[str, Any], container: bool) -> dict[str, Any]:
    """What a gatherer prints on a described machine."""
    machine, inside = Machine(described, container=container), described["container"]
    shown = repr((container, [*machine.files()], machine.tools(), machine.nodes(), inside["shm_mib"]))
    if shown not in GATHERED:
        GATHERED[shown] = run(directory, machine)
    facts = dict(GATHERED[shown])
    if container:  # a limit is a process's: this machine may not let go of its own
        facts["memlock"] = inside["memlock"]
    return facts


def run(directory: Path, machine: Machine) -> dict[str, Any]:
    machine.write(directory)
    asked = (
        {"devices": CARDS, "cuda": True, "programs": ["sh"]} if machine.container else {"devices": CARDS, "vmid": VMID}
    )
    # the gatherer's own text is its standard input, so the commands are an argument
    script = machine.alone(directory) + 'exec "$0" -I - "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, json.dumps(asked)],
        input=program(ROOT / GATHERERS[machine.container]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def codes(directory: Path, described: dict[str, Any], container: bool, **options: Any) -> list[str]:
    facts = gather(directory, described, container)
    if container:
        asked = {"devices": CARDS, "accelerator": "cuda", "shm_min_mib": 8192, "driver": "", "weights_gib": WEIGHTS}
        asked |= {"pending": False, "programs": ["sh"]}
        return [finding.code for finding in host.runtime(facts, asked | options, "llm01")]
    asked = {"devices": CARDS, "vmid": VMID, "iommu": "undecided", "shared": False}
    return [finding.code for finding in host.node(facts, asked | options, "pve1")]


@pytest.mark.parametrize("container", [False, True], ids=["node", "container"])
def test_a_healthy_machine_gives_no_finding(tmp_path: Path, container: bool) -> None:
    assert codes(tmp_path, describe(DATA), container) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gives_its_findings_and_no_other(tmp_path: Path, fault: str) -> None:
    described, expected = describe(DATA, fault), FAULTS[fault]
    assert codes(tmp_path / "node", described, container=False) == expected.get("node", [])
    assert codes(tmp_path / "container", described, container=True) == expected.get("container", [])


def test_every_description_says_where_it_is_from() -> None:
    healthy = yaml.safe_load((DATA / "healthy.yml").read_text())
    assert healthy["label"] == "composed"
    assert healthy["sources"]
    for fault in FAULTS.values():
        assert fault["label"] in ("recorded", "composed")
        assert fault["source"]
        assert fault["change"]
