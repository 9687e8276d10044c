"""The toggle: what it decides, and what its file on the host finds, hides, restores and proves."""

import copy
import hashlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pivot.findings import Severity
from pivot.probe import Plan, Wanted, payload, plan_off, plan_on, restore_findings, restore_text, version_tuple

ROOT = Path(__file__).parents[2]
PACKAGE = {"pivot_probe/__init__.py": "x = 1\n"}


def load_state_file() -> Any:
    spec = importlib.util.spec_from_file_location("probe_state", ROOT / "roles/debug_probes/files/probe_state.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


probe_state = load_state_file()


def wanted(**changes: Any) -> Wanted:
    values = {
        "unit": "llm.service",
        "python": "/opt/llm/bin/python",
        "root": "/opt/pivot-probe",
        "records": "/var/log/pivot-probe",
        "max_bytes": 1000,
        "rows": 16,
        "disable_cuda_graph": False,
        "allow_restart": True,
        "ready_url": "",
    }
    return Wanted.from_mapping({**values, **changes})


def facts(**changes: Any) -> dict[str, Any]:
    """A running service without the probe; changes name parts by `part_item`."""
    found: dict[str, Any] = {
        "unit": {
            "loaded": True,
            "active": "active",
            "pid": 42,
            "uid": 990,
            "gid": 991,
            "mode": "0555",
            "exec_start": {"text": "/opt/llm/bin/python -m sglang.launch_server --config /etc/llm.yaml"},
        },
        "process": {"plugins": "cpu_lab", "pythonpath": None, "records": None},
        "engine": {"version": "0.5.23", "package": "/opt/llm/lib/sglang"},
        "installed": {"root": False, "files": {}, "dropin": None, "script": False},
        "records": {"exists": False, "files": 0, "uid": None, "gid": None, "mode": None},
        "state": {"phase": "off"},
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
    }
    after["installed"] = {
        "root": True,
        "files": {"environment": digest(plan.environment), **{name: digest(text) for name, text in PACKAGE.items()}},
        "dropin": digest(plan.dropin),
        "script": True,
    }
    after["records"] = {"exists": True, "files": 2, "uid": 990, "gid": 991, "mode": "0750"}
    after["state"] = {"phase": "on", "since": "2025-01-02T03:04:05Z", "plugins": "cpu_lab", "pythonpath": None}
    return after


# --- the plan


def test_on_changes_everything_once_and_then_nothing() -> None:
    plan = plan_on(facts(), wanted(), PACKAGE)
    assert plan.changes == (
        "the baseline",
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
    interrupted["process"] = {"plugins": "cpu_lab", "pythonpath": None, "records": None}
    assert plan_on(interrupted, wanted(), PACKAGE).changes == ("the baseline", "the running service")
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
        (facts(engine_version="0.5.10.post1"), wanted(), "SGLang 0.5.10.post1 of /opt/llm/bin/python has no plugin"),
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
        "the probe in the running service",
    )
    assert plan.restart
    assert plan_off(facts(records_exists=True), wanted()) == Plan()


def test_an_interrupted_on_that_was_never_started_needs_no_restart_and_no_consent() -> None:
    plan = plan_off(facts(installed_root=True, state_phase="begun"), wanted(allow_restart=False))
    assert plan.changes == ("the state file", "the probe's directory")
    assert not plan.restart
    assert plan.refusal == ""


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


# --- the file on the host


def test_secrets_are_hidden_and_still_compared() -> None:
    hidden = probe_state.redacted_lines("User=llm\nEnvironment=HF_TOKEN=hf_abc", "salt")
    assert hidden[0] == "User=llm"
    assert "hf_abc" not in hidden[1]
    assert hidden != probe_state.redacted_lines("User=llm\nEnvironment=HF_TOKEN=hf_abd", "salt")
    command = ["python", "--api-key", "abc", "--admin-api-key=def", "--config", "/etc/x.yaml"]
    shown = probe_state.redacted_command(command, "salt")
    assert shown[::4] == ["python", "--config"]
    assert shown[5] == "/etc/x.yaml"
    assert "abc" not in shown[2]
    assert "def" not in shown[3]


def test_the_units_own_command_is_read_with_continuations_and_resets() -> None:
    text = (
        "[Service]\nExecStart=/bin/old\nExecStart=\nExecStart=/bin/new \\\n    --config %h/x\nExecStartPost=/bin/true\n"
    )
    assert probe_state.exec_start(text) == {"text": "/bin/new  --config %h/x"}
    assert probe_state.exec_start("ExecStart=/a\nExecStart=/b\n") == {"error": "it has 2 ExecStart lines"}
    assert "secret" in probe_state.exec_start("ExecStart=/a --api-key x\n")["error"]
    assert probe_state.exec_start("ExecStart=/a --max-total-tokens 4096\n") == {"text": "/a --max-total-tokens 4096"}


def test_what_a_command_last_did_is_no_part_of_its_configuration() -> None:
    run = "ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; pid=5 ; code=(null) ; status=0/0"
    shown = f"{{ path=/bin/a ; argv[]=/bin/a -x ; {run} }}"
    assert probe_state.PER_RUN.sub("", shown) == "{ path=/bin/a ; argv[]=/bin/a -x}"


def test_a_trees_hash_sees_contents_and_names_but_no_compiled_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("x")
    first = probe_state.tree(tmp_path)
    assert first["sha256"] == digest(f"a/b.py\0{digest('x')}\n")
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "b.pyc").write_text("y")
    assert probe_state.tree(tmp_path) == first
    (tmp_path / "a" / "b.py").rename(tmp_path / "a" / "c.py")
    assert probe_state.tree(tmp_path)["sha256"] != first["sha256"]


def test_differences_name_part_and_item() -> None:
    before = {"unit": ["a", "b"], "environment": {"X": "1"}}
    assert probe_state.differences(before, copy.deepcopy(before)) == []
    after = {"unit": ["a", "c"], "environment": {"X": "1", "Y": "2"}}
    assert probe_state.differences(before, after) == [
        {"part": "unit", "item": "line 2", "before": "b", "after": "c"},
        {"part": "environment", "item": "Y", "before": None, "after": "2"},
    ]


def test_the_state_is_replaced_in_one_step_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "state.json"
    probe_state.write_state(path, {"format": 1, "phase": "on"})
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert probe_state.read_state(path) == {"format": 1, "phase": "on"}
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"format": 2})])
def test_a_state_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(probe_state.Failed, match="state file"):
        probe_state.read_state(path)


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def full(_settings: Any) -> None:
        raise OSError(28, "No space left on device", "/opt/pivot-probe/environment")

    monkeypatch.setattr(probe_state, "begin", full)
    monkeypatch.setattr(probe_state, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(probe_state.sys, "argv", ["x", json.dumps({"do": "begin"})])
    assert probe_state.main() == probe_state.FAILED
    assert json.loads(capsys.readouterr().out) == {"failed": "No space left on device (/opt/pivot-probe/environment)"}


def test_the_probes_directory_holds_what_was_sent_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "probe"
    probe_state._lay_out(root, {"p/a.py": "1", "p/b.py": "2"})
    probe_state._lay_out(root, {"p/a.py": "3"})
    assert probe_state._files(root) == {"p/a.py": digest("3")}
    assert (root / "p" / "a.py").stat().st_mode & 0o777 == 0o644


def test_records_of_the_session_before_are_set_aside_once(tmp_path: Path) -> None:
    for session in ("one", "two"):
        (tmp_path / f"{session}.jsonl").write_text(session)
        probe_state._set_aside(tmp_path)
    assert [path.name for path in sorted(tmp_path.rglob("*.jsonl"))] == ["two.jsonl"]
    assert (tmp_path / "previous" / "two.jsonl").exists()


def test_the_restore_knows_what_to_do_without_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = tmp_path / "restore.py"
    copied.write_text((ROOT / "roles/debug_probes/files/probe_state.py").read_text())
    spec = importlib.util.spec_from_file_location("restore", copied)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.sys.argv = ["restore.py"]
    assert module.main() == 0
    assert json.loads(capsys.readouterr().out) == {"changed": False}
