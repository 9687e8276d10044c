"""The toggle: what it decides, and what it says of what was found."""

import copy
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from pivot.experiments.probe import (
    Plan,
    Wanted,
    banner,
    engine_findings,
    failure_text,
    payload,
    plan_off,
    plan_on,
    restore_findings,
    restore_text,
    space_findings,
    switched_findings,
    targets,
    version_tuple,
)
from pivot.findings import Severity

ROOT = Path(__file__).parents[2]
PACKAGE = {"pivot_probe/__init__.py": "x = 1\n"}
NOW, UNTIL = "2025-01-02T03:00:00Z", "2025-01-02T05:00:00Z"


def wanted(**changes: Any) -> Wanted:
    values = {
        "unit": "llm.service",
        "python": "/opt/llm/bin/python",
        "root": "/opt/pivot-probe",
        "records": "/var/log/pivot-probe",
        "state": "/var/lib/pivot-probe/state.json",
        "max_bytes": 1000,
        "tensor_bytes": 2000,
        "rows": 16,
        "expiry": 7200,
        "expiry_restart": False,
        "disable_cuda_graph": False,
        "allow_restart": True,
        "ready_url": "",
    }
    return Wanted.from_mapping({**values, **changes})


def facts(**changes: Any) -> dict[str, Any]:
    """A running service without the probe; changes name parts by `part_item`."""
    found: dict[str, Any] = {
        "now": NOW,
        "interpreter": "/usr/bin/python3",
        "unit": {
            "loaded": True,
            "active": "active",
            "stale": False,
            "restarts": [],
            "pid": 42,
            "uid": 990,
            "gid": 991,
            "mode": "0555",
            "exec_start": {"text": "/opt/llm/bin/python -m sglang.launch_server --config /etc/llm.yaml"},
        },
        "process": {"plugins": "cpu_lab", "pythonpath": None, "records": None, "until": None},
        "engine": {"version": "0.5.23", "package": "/opt/llm/lib/sglang"},
        "installed": {
            "root": False,
            "files": {},
            "dropin": None,
            "script": False,
            "expiry": {"timer": None, "service": None},
            "timer": False,
        },
        "records": {"exists": False, "files": 0, "free": 10**12, "uid": None, "gid": None, "mode": None},
        "state": {"phase": "off", "unit": "llm.service"},
        "neighbours": [],
    }
    for name, value in changes.items():
        part, item = name.split("_", 1)
        found[part][item] = value
    return found


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def switched_on(asked: Wanted) -> dict[str, Any]:
    """The facts after a plan was carried out."""
    before = facts()
    plan = plan_on(before, asked, PACKAGE)
    after = copy.deepcopy(before)
    after["process"] = {
        "plugins": "cpu_lab,pivot_probe",
        "pythonpath": "/opt/pivot-probe",
        "records": "/var/log/pivot-probe",
        "until": UNTIL,
    }
    after["installed"] = {
        "root": True,
        "files": {"environment": digest(plan.environment), **{name: digest(text) for name, text in PACKAGE.items()}},
        "dropin": digest(plan.dropin),
        "script": True,
        "expiry": {"timer": digest(plan.timer), "service": digest(plan.service)},
        "timer": True,
    }
    after["records"] = {"exists": True, "files": 2, "free": 10**12, "uid": 990, "gid": 991, "mode": "0750"}
    after["state"] = {
        "phase": "on",
        "unit": asked.unit,
        "since": "2025-01-02T03:04:05Z",
        "plugins": "cpu_lab",
        "pythonpath": None,
        "active": True,
        "until": UNTIL,
        "expiry": asked.expiry,
        "expiry_restart": asked.expiry_restart,
        "expired": None,
        "asked": None,
    }
    return after


# --- the plan


def test_on_changes_everything_once_and_then_nothing() -> None:
    plan = plan_on(facts(), wanted(), PACKAGE)
    assert plan.changes == (
        "the baseline",
        "the expiry timer",
        "the records directory",
        "environment",
        "pivot_probe/__init__.py",
        "the drop-in",
        "the running service",
    )
    assert plan.restart
    assert plan_on(switched_on(wanted()), wanted(), PACKAGE).changes == ()


def test_plugins_and_paths_that_are_named_already_stay() -> None:
    text = plan_on(facts(process_plugins=" a, cpu_lab", process_pythonpath="/x:/y"), wanted(), PACKAGE).environment
    assert 'SGLANG_PLUGINS="a,cpu_lab,pivot_probe"' in text
    assert 'PYTHONPATH="/opt/pivot-probe:/x:/y"' in text


def test_without_a_list_of_plugins_all_load_and_none_is_made() -> None:
    assert "SGLANG_PLUGINS" not in plan_on(facts(process_plugins=None), wanted(), PACKAGE).environment


def test_the_dropin_keeps_the_unit_startable_and_touches_no_command() -> None:
    assert plan_on(facts(), wanted(), PACKAGE).dropin.splitlines()[1:] == [
        "[Service]",
        "EnvironmentFile=-/opt/pivot-probe/environment",
        "ReadWritePaths=-/var/log/pivot-probe",
    ]


def test_cuda_graphs_are_switched_off_by_the_command_line_and_said_aloud() -> None:
    plan = plan_on(facts(), wanted(disable_cuda_graph=True), PACKAGE)
    assert plan.dropin.endswith(
        "ExecStart=\nExecStart=/opt/llm/bin/python -m sglang.launch_server --config /etc/llm.yaml"
        " --disable-cuda-graph\n"
    )
    assert "has not been tried on a GPU" in " ".join(plan.says)
    has_it = {"text": "python -m sglang.launch_server --disable-cuda-graph"}
    assert plan_on(facts(unit_exec_start=has_it), wanted(disable_cuda_graph=True), PACKAGE).dropin.count("graph") == 1


def test_a_repair_is_what_is_missing_and_keeps_the_baseline() -> None:
    interrupted = switched_on(wanted())
    interrupted["state"]["phase"] = "begun"
    interrupted["process"] = {"plugins": "cpu_lab", "pythonpath": None, "records": None, "until": None}
    assert plan_on(interrupted, wanted(), PACKAGE).changes == ("the interrupted switch", "the running service")
    stale = switched_on(wanted())
    stale["installed"]["files"]["pivot_probe/old.py"] = digest("")
    assert plan_on(stale, wanted(), PACKAGE).changes == ("pivot_probe/old.py (stale)",)


@pytest.mark.parametrize(
    ("found", "asked", "said"),
    [
        (facts(unit_loaded=False), wanted(), "debug_probes_unit: there is no unit llm.service on this host"),
        (
            facts(engine_error="No module named 'sglang'"),
            wanted(),
            "debug_probes_python: /opt/llm/bin/python imports no SGLang (No module named 'sglang')",
        ),
        (facts(engine_version="0.5.10.post1"), wanted(), "SGLang 0.5.10.post1 has no plugin framework"),
        (facts(unit_stale=True), wanted(), "the unit's files changed since systemd read them"),
        (facts(), wanted(expiry=19), "debug_probes_expiry: 19 is no number of seconds from 20 to 604800"),
        (facts(), wanted(expiry=604801), "debug_probes_expiry: 604801 is no number of seconds"),
        (facts(unit_active="inactive", unit_pid=0), wanted(), "the service is inactive"),
        (facts(state_phase="restoring"), wanted(), "switching debugging off was interrupted on this host"),
        (facts(process_records="/var/log/pivot-probe"), wanted(), "its baseline is gone"),
        (facts(), wanted(allow_restart=False), "debug_probes_allow_restart is false: nothing was changed"),
        (facts(), wanted(ready_url="127.0.0.1:30000"), "debug_probes_ready_url: 127.0.0.1:30000 is neither"),
        (
            facts(unit_exec_start={"error": "it has 2 ExecStart lines"}),
            wanted(disable_cuda_graph=True),
            "CUDA graphs cannot be switched off for llm.service: it has 2 ExecStart lines",
        ),
        ({"failed": "the state file is broken"}, wanted(), "the state file is broken"),
    ],
)
def test_what_stands_in_the_way_is_one_sentence(found: dict[str, Any], asked: Wanted, said: str) -> None:
    plan = plan_on(found, asked, PACKAGE)
    assert said in plan.refusal
    assert plan.changes == ()


def test_the_oldest_version_with_plugins_is_taken() -> None:
    assert plan_on(facts(engine_version="0.5.11"), wanted(), PACKAGE).refusal == ""
    assert version_tuple("0.5.10.post1") == (0, 5, 10)
    assert version_tuple("unknown") == ()


def test_a_command_that_cannot_be_overlaid_is_no_matter_where_there_are_no_graphs() -> None:
    assert plan_on(facts(unit_exec_start={"error": "it has 2 ExecStart lines"}), wanted(), PACKAGE).refusal == ""


def test_off_takes_away_every_trace_and_then_nothing() -> None:
    plan = plan_off(switched_on(wanted()), wanted())
    assert plan.changes == (
        "the state file",
        "the restore script",
        "the drop-in",
        "the probe's directory",
        "the expiry timer",
        "the probe in the running service",
    )
    assert plan.restart
    assert plan_off(facts(records_exists=True), wanted()) == Plan()


def test_an_interrupted_on_that_was_never_started_needs_no_restart_and_no_consent() -> None:
    plan = plan_off(facts(installed_root=True, state_phase="begun"), wanted(allow_restart=False))
    assert plan.changes == ("the state file", "the probe's directory")
    assert not plan.restart
    assert plan.refusal == ""


def test_a_timer_that_is_left_alone_is_a_trace() -> None:
    left = facts(installed_expiry={"timer": digest("x"), "service": None})
    assert plan_off(left, wanted(allow_restart=False)) == Plan(changes=("the expiry timer",))


def test_a_service_that_was_stopped_meanwhile_is_started_where_it_ran_before() -> None:
    stopped = switched_on(wanted())
    stopped["unit"].update(active="inactive", pid=0)
    stopped["process"]["records"] = None
    assert plan_off(stopped, wanted()).restart
    assert "debug_probes_allow_restart is false" in plan_off(stopped, wanted(allow_restart=False)).refusal


def test_a_baseline_of_another_service_is_left_alone() -> None:
    here = switched_on(wanted())
    other = {**facts(), "state": here["state"], "neighbours": ["llm.service"]}
    other["installed"] = {**other["installed"], "root": True, "files": here["installed"]["files"], "script": True}
    asked = wanted(unit="second.service")
    refusal = plan_on(other, asked, PACKAGE).refusal
    assert "/var/lib/pivot-probe/state.json holds the baseline of llm.service, which has the probe" in refusal
    assert "debug-off with debug_probes_unit: llm.service" in refusal
    assert plan_off(other, asked) == Plan()
    assert plan_off(here, wanted()).changes != ()


def test_off_does_not_restore_from_another_services_baseline() -> None:
    here = switched_on(wanted(unit="second.service", state="/var/lib/second/state.json"))
    here["state"] = {**here["state"], "unit": "llm.service"}
    plan = plan_off(here, wanted(unit="second.service"))
    assert "holds the baseline of llm.service" in plan.refusal
    assert plan.changes == ()


def test_directories_of_another_services_probe_are_refused_and_left_alone() -> None:
    other = {**facts(), "neighbours": ["llm.service"]}
    other["installed"] = {**other["installed"], "root": True}
    asked = wanted(unit="second.service", state="/var/lib/second/state.json")
    refusal = plan_on(other, asked, PACKAGE).refusal
    assert "llm.service has the probe in /opt/pivot-probe or records into /var/log/pivot-probe" in refusal
    assert plan_off(other, asked) == Plan()


def test_off_without_consent_changes_nothing() -> None:
    plan = plan_off(switched_on(wanted()), wanted(allow_restart=False))
    assert "switching debugging off restarts llm.service" in plan.refusal
    assert plan.changes == ()


def test_a_service_that_died_with_the_probe_is_started_again() -> None:
    died = switched_on(wanted())
    died["unit"].update(active="failed", pid=0)
    died["process"]["records"] = None
    assert plan_off(died, wanted()).restart


@pytest.mark.parametrize("active", ["activating", "deactivating"])
def test_a_service_on_its_way_may_come_up_with_the_probe(active: str) -> None:
    found = facts(state_phase="begun", unit_active=active)
    assert plan_off(found, wanted()).restart
    assert "debug_probes_allow_restart is false" in plan_off(found, wanted(allow_restart=False)).refusal


def test_differences_are_errors_and_a_lost_baseline_is_a_warning() -> None:
    result = {
        "changed": True,
        "baseline": "2025-01-02T03:04:05Z",
        "differences": [{"part": "unit", "item": "line 3", "before": "User=llm", "after": None}],
    }
    [finding] = restore_findings(result, "gpu1")
    assert (finding.code, finding.severity) == ("PROBE-RESTORE", Severity.ERROR)
    assert "unit, line 3: was 'User=llm', is absent" in finding.message
    assert restore_findings({**result, "differences": []}, "gpu1") == []
    [lost] = restore_findings({"changed": True, "baseline": None, "differences": []}, "gpu1")
    assert (lost.code, lost.severity) == ("PROBE-NO-BASELINE", Severity.WARNING)


def test_a_restore_without_findings_says_what_was_compared() -> None:
    compared = {"unit": 20, "environment": 9}
    result = {"changed": True, "baseline": "2025-01-02T03:04:05Z", "differences": [], "compared": compared}
    assert restore_text(result) == "equal to the baseline of 2025-01-02T03:04:05Z: unit (20), environment (9)"
    nothing = {"changed": False, "baseline": None, "differences": [], "compared": {}}
    assert restore_findings(nothing, "gpu1") == []
    assert restore_text(nothing) == "nothing of the probe was left"


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"stdout": '{"failed": "the disk is full"}', "msg": "non-zero return code"}, "the disk is full"),
        ({"stdout": '{"changed": true}', "msg": "non-zero return code"}, "non-zero return code"),
        ({"stdout": "Traceback", "msg": "non-zero return code\n"}, "non-zero return code"),
        ({"msg": "unreachable"}, "unreachable"),
        ({}, "no message"),
    ],
)
def test_a_failed_task_is_one_sentence(result: dict[str, Any], said: str) -> None:
    assert failure_text(result) == said


def test_the_payload_is_a_distribution_that_an_entry_point_finds(tmp_path: Path) -> None:
    files = payload(ROOT / "probe")
    [points] = [text for name, text in files.items() if name.endswith(".dist-info/entry_points.txt")]
    assert points == "[sglang.srt.plugins]\npivot_probe = pivot_probe:register\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    [found] = importlib.metadata.distributions(path=[str(tmp_path)])
    assert found.name == "pivot-probe"
    assert [(point.group, point.name) for point in found.entry_points] == [("sglang.srt.plugins", "pivot_probe")]
    with pytest.raises(ValueError, match=r"debug_probes_package: .* holds no pyproject\.toml"):
        payload(tmp_path)


# --- the end by itself


def test_recording_ends_by_the_clock_of_the_host_and_a_timer_restores() -> None:
    plan = plan_on(facts(), wanted(), PACKAGE)
    assert plan.until == UNTIL
    assert f'PIVOT_PROBE_UNTIL="{UNTIL}"' in plan.environment
    assert 'PIVOT_PROBE_TENSOR_BYTES="2000"' in plan.environment
    assert "OnCalendar=2025-01-02 05:00:00 UTC" in plan.timer
    assert "Persistent=true" in plan.timer
    assert "ExecStart=/usr/bin/python3 -I /var/lib/pivot-probe/restore.py expire\n" in plan.service
    assert "Restart=on-failure\nRestartSec=5min\n" in plan.service  # a model that loads, a full disk
    assert f"Recording ends by itself at {UNTIL}; then the probe stays in until debug-off." in plan.says
    assert plan_on(facts(unit_restarts=[20, 61.5]), wanted(), PACKAGE).until == "2025-01-02T05:01:01Z"
    consent = plan_on(facts(), wanted(expiry_restart=True), PACKAGE)
    assert f"Recording ends by itself at {UNTIL}; then the service is restored and restarted." in consent.says


def test_words_of_the_timers_command_are_quoted() -> None:
    odd = wanted(state='/srv/my "probe" 5%/$x/state.json')
    lines = plan_on(facts(), odd, PACKAGE).service.splitlines()
    assert r'ExecStart=/usr/bin/python3 -I "/srv/my \"probe\" 5%%/$$x/restore.py" expire' in lines


def test_later_runs_do_not_move_the_end_until_it_has_passed_or_another_is_asked_for() -> None:
    later = {**switched_on(wanted()), "now": "2025-01-02T04:59:59Z"}
    assert plan_on(later, wanted(), PACKAGE).changes == ()
    assert plan_on(later, wanted(), PACKAGE).until == UNTIL
    other = plan_on(later, wanted(expiry=3600), PACKAGE)
    assert other.until == "2025-01-02T05:59:59Z"
    assert other.changes == ("the expiry", "the expiry timer", "environment", "the running service")
    passed = {**switched_on(wanted()), "now": "2025-01-02T05:00:00Z"}
    passed["state"]["expired"] = "2025-01-02T05:00:00Z"
    passed["installed"]["timer"] = False
    again = plan_on(passed, wanted(), PACKAGE)
    assert again.until == "2025-01-02T07:00:00Z"
    assert again.restart
    assert "debug_probes_allow_restart is false" in plan_on(passed, wanted(allow_restart=False), PACKAGE).refusal


@pytest.mark.parametrize(
    ("state", "now", "said"),
    [
        ({"phase": "off"}, NOW, ""),
        ({"phase": "begun", "until": UNTIL}, NOW, "HALF-WAY at llm.service"),
        ({"phase": "restoring", "until": UNTIL}, NOW, "HALF-WAY at llm.service"),
        ({"phase": "on", "until": UNTIL}, NOW, f"DEBUG PROBE IN llm.service until {UNTIL}"),
        ({"phase": "on", "until": UNTIL}, UNTIL, f"recording ended at {UNTIL}; --tags debug-off takes it away"),
    ],
)
def test_the_banner(state: dict[str, Any], now: str, said: str) -> None:
    text = banner("llm.service", state, now)
    assert said in text
    assert bool(text) == bool(said)


# --- what is said first


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([], "How long llm.service takes to restart is not known yet: its journal holds none that could be timed."),
        ([25.4], "A restart of llm.service takes about 25 s (by its journal: one restart)."),
        (
            [20.0, 26.0, 900.0],
            "A restart of llm.service takes about 26 s (by its journal: 20 s to 15 min, 3 restarts).",
        ),
    ],
)
def test_how_long_a_restart_takes_is_said_first(seconds: list[float], said: str) -> None:
    assert said in plan_on(facts(unit_restarts=seconds), wanted(), PACKAGE).says
    running = switched_on(wanted())
    running["unit"]["restarts"] = seconds
    assert plan_off(running, wanted()).says == (said,)
    assert plan_off(facts(installed_root=True, state_phase="begun", unit_restarts=seconds), wanted()).says == ()


def test_hooks_are_looked_up_in_the_description_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(version: str, **hooks: bool | None) -> dict[str, Any]:
        return {"version": version, "hooks": {"p.Registry.register": True, **hooks}}

    real = dict.fromkeys(targets(ROOT / "probe"), True)
    assert engine_findings({"version": "0.5.23", "hooks": real}, "gpu1") == []
    assert engine_findings(engine("0.5.99", inherited=None), "gpu1") == []
    [old] = engine_findings(engine("0.5.9"), "gpu1")
    assert (old.code, old.severity) == ("PROBE-OLD-ENGINE", Severity.ERROR)
    assert "playbooks/inspect.yml works there, hidden states over HTTP (--enable-return-hidden-states) do" in old.fix
    [missing] = engine_findings(engine("0.5.99", own=False), "gpu1")  # the host's own source says so
    assert (missing.code, missing.severity) == ("PROBE-HOOK", Severity.WARNING)
    assert "lacks own:" in missing.message
    described = {"flags": {}, "hooks": {"kept": False}}
    monkeypatch.setattr("pivot.engines.descriptions.load", lambda _version: described)
    [missing] = engine_findings(engine("0.5.24", kept=None, other=True), "gpu1")
    assert "lacks kept:" in missing.message
    plan = plan_on(facts(engine_hooks={"r": True, "kept": True}), wanted(), PACKAGE, "gpu1")
    assert plan.refusal == ""
    assert "PROBE-HOOK" in "\n".join(plan.says)
    refused = plan_on(facts(engine_hooks={"r": False, "other": True}), wanted(), PACKAGE, "gpu1")
    assert refused.refusal.startswith("ERROR   PROBE-HOOK")
    assert refused.changes == ()


def test_a_volume_with_too_little_room_is_said_first() -> None:
    assert space_findings(facts(records_free=3000), wanted(), "gpu1") == []
    [found] = space_findings(facts(records_free=2999), wanted(), "gpu1")
    assert (found.code, found.severity) == ("PROBE-SPACE", Severity.WARNING)
    assert "PROBE-SPACE" in "\n".join(plan_on(facts(records_free=0), wanted(), PACKAGE).says)


def test_what_else_the_restart_brought_in_is_a_warning() -> None:
    item = {"part": "launch configuration", "item": "/etc/llm.yaml", "before": "aa", "after": "bb"}
    [found] = switched_findings({"others": [item]}, "gpu1")
    assert (found.code, found.severity) == ("PROBE-OTHER-CHANGE", Severity.WARNING)
    assert "launch configuration, /etc/llm.yaml: was 'aa', is 'bb'" in found.message


def test_a_restart_that_brought_in_the_probe_alone_is_no_finding() -> None:
    assert switched_findings({"others": []}, "gpu1") == []


# --- the file on the host
