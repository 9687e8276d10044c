"""Units that somebody wrote for a server."""

from pathlib import Path

import pytest

from pivot.serving import units

ROOT = Path(__file__).parents[2]
B20 = (ROOT / "tests/data/field-cases/B20-sglang.service").read_text()
GOOD = """\
[Unit]
StartLimitIntervalSec=2h
StartLimitBurst=4

[Service]
Environment="NCCL_DEBUG_FILE=/var/log/n.%%h.%%p.log" HOME=%h
EnvironmentFile=/etc/sglang/environment
ExecStart=/opt/python -m sglang.launch_server \\
    --config /etc/sglang/launch.yaml
Restart=on-failure
TimeoutStopSec=120
KillMode=mixed
"""


def found(text):
    return [f"{item.code} {item.severity}: {item.message}" for item in units.check("h", text)]


def test_b20():
    assert found(B20) == [
        "INSPECT-SPECIFIER warning: Environment=NCCL_DEBUG_FILE has %h (the user's home) and %p (the unit's name), "
        "which systemd puts in before NCCL sees it",
        "INSPECT-KILL error: KillMode=process leaves the schedulers behind, with all memory of their GPUs",
        "INSPECT-STOP warning: TimeoutStopSec=10: requests and ranks are killed before they can end",
        "INSPECT-LOOP warning: Restart=always with no StartLimitIntervalSec (systemd's own is 10 s): a server that "
        "fails after minutes of loading is started for ever",
    ]
    (finding, *_) = units.check("h", B20)
    assert "write NCCL_DEBUG_FILE=/var/log/sglang/nccl.%%h.%%p.log, or put it" in finding.fix


def test_a_good_unit_and_none_are_silent():
    assert found(GOOD) == []
    assert found("") == []
    assert found("[Service]\nExecStart=/x\n") == []  # systemd's own: no restart, 90 s, the whole group


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("KillMode=mixed", "KillMode=none"), "INSPECT-KILL"),
        (("TimeoutStopSec=120", "TimeoutStopSec=5s"), "INSPECT-STOP"),
        (("TimeoutStopSec=120", "TimeoutSec=500ms"), "INSPECT-STOP"),
        (("StartLimitIntervalSec=2h", "StartLimitIntervalSec=0"), "INSPECT-LOOP"),
        (("StartLimitIntervalSec=2h", "StartLimitInterval=1min 30s"), "INSPECT-LOOP"),
        (("n.%%h.%%p.log", "n.%%h.%p.log"), "INSPECT-SPECIFIER"),
    ],
)
def test_each_fault_by_itself(change, code):
    assert [line.split(" ")[0] for line in found(GOOD.replace(*change))] == [code]


def test_the_last_assignment_counts_and_an_empty_one_clears():
    assert found(GOOD + "\n[Service]\nKillMode=process\nKillMode=control-group\n") == []
    assert found(GOOD + "\n[Service]\nEnvironment=NCCL_X=%p\nEnvironment=\n") == []
    assert found(GOOD + "\n# KillMode=process\n; TimeoutStopSec=1\n") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10", 10),
        ("1min 30s", 90),
        ("2h", 7200),
        ("500ms", 0.5),
        ("infinity", float("inf")),
        ("soon", None),
        ("1x", None),
    ],
)
def test_spans(text, expected):
    assert units.seconds(text) == expected


def test_whatever_stands_there_gives_findings_and_no_traceback():
    for text in ("Environment='unclosed\n", "=\n", "KillMode\n", "\x00Restart=always\n", "TimeoutStopSec=1.2.3\n"):
        assert all(item.message for item in units.check("h", text))
