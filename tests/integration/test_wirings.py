"""Wrong wirings on the deployed engine, one of each class; `make bench-wiring` has all of them."""

import subprocess
import sys

import pytest

from .conftest import FIGURES, ROOT

# the what-if takes as long as a server's start, and only a drafter's own fault needs it
ROWS = {
    "ids minus 1": ("config", ["--wiring-only"]),
    "d2t zero": ("weights", []),
    "EAGLE for EAGLE3": ("flags", ["--wiring-only"]),
    "slice of the position before": ("engine", ["--wiring-only"]),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_wrong_wiring_is_named(deployed, host, row):
    kind, options = ROWS[row]
    command = [sys.executable, "lab/faults/bench.py", "--prompts", "3", "--row", row, *options]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{kind} ")]
    assert row in line
    assert line.endswith(" right")
    FIGURES.append(f"wiring bench, {' '.join(line.split())}")
    assert host.run("ls /var/tmp/pivot-bench-wiring 2>/dev/null || true") == ""


def test_a_row_that_is_not_there_is_said(deployed):
    command = [sys.executable, "lab/faults/bench.py", "--row", "no such row"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "'no such row' is no row; there are: right, " in done.stderr
