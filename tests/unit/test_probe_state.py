"""The toggle's file on the host: what it finds, hides, compares, restores, and refuses in a sentence."""

import copy
import importlib.metadata
import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from .test_debug_probes import NOW, ROOT, digest


def load_state_file() -> Any:
    spec = importlib.util.spec_from_file_location("probe_state", ROOT / "roles/debug_probes/files/probe_state.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


probe_state = load_state_file()


def test_hooked_functions_are_found_in_the_source_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "eng"
    (package / "sub").mkdir(parents=True)
    (package / "sub" / "mod.py").write_text(
        "raise SystemExit\nclass Own:\n    def forward(self): ...\n    async def verify(self): ...\n"
        "class Child(Own):\n    pass\n"
    )
    (package / "sub" / "newer.py").write_text("def (")
    for target, expected in {
        "eng.sub.mod.Own.forward": True,
        "eng.sub.mod.Own.verify": True,
        "eng.sub.mod.Own.lost": False,
        "eng.sub.mod.Gone.forward": False,
        "eng.sub.gone.Own.forward": False,
        "eng.sub.mod.Child.forward": None,
        "eng.sub.newer.Own.forward": None,
    }.items():
        assert probe_state.defined(package, target) is expected, target


def test_a_process_that_is_being_started_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bytes | OSError] = [PermissionError(), PermissionError(), b"A=1\0SYSTEMD_EXEC_PID=7\0"]

    def read(_path: Path) -> bytes:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    waits: list[float] = []
    monkeypatch.setattr(probe_state.time, "sleep", waits.append)
    monkeypatch.setattr(Path, "read_bytes", read)
    assert probe_state.process_environment(1576) == {"A": "1"}
    assert waits == [0.1, 0.1]
    answers[:] = [PermissionError()]
    with pytest.raises(PermissionError):
        probe_state.process_environment(1576)
    answers[:] = [ProcessLookupError()]
    assert probe_state.process_environment(1576) == {}


def test_restarts_are_timed_by_the_journal() -> None:
    restart = [(100.0, "stopping"), (103.0, "stopped"), (103.1, "starting"), (103.2, "started"), (125.1, "ready")]
    assert probe_state.restart_seconds(restart) == [25.0]
    # days lie between the stop and the start: they are no part of it
    late = [(100.0, "stopping"), (103.0, "stopped"), (90000.0, "started"), (90020.5, "ready")]
    assert probe_state.restart_seconds(late) == [23.5]
    # systemd itself waits until it serves
    waited = [(10.0, "starting"), (30.0, "ready"), (31.0, "started")]
    assert probe_state.restart_seconds(waited) == [21.0]
    # a crash, and a start that came to nothing
    crashed = [*waited, (500.0, "starting"), (503.0, "starting"), (533.0, "started"), (533.5, "ready")]
    assert probe_state.restart_seconds(crashed) == [21.0, 30.5]
    assert probe_state.restart_seconds([(10.0, "starting"), (10.2, "started")]) == []
    assert probe_state.restart_seconds([]) == []
    many = [(base + when, word) for base in range(0, 7000, 1000) for when, word in waited]
    assert probe_state.restart_seconds(many) == [21.0] * 5


def test_while_on_only_what_the_probe_brings_may_differ() -> None:
    before = {
        "unit": ["User=llm"],
        "settings": {
            "EnvironmentFiles": "/a (ignore_errors=no)",
            "ReadWritePaths": "",
            "ExecStart": "x",
            "User": "llm",
        },
        "command line": ["python", "--config", "/a.yaml"],
        "environment": {"HOME": "1"},
        "launch configuration": {"/a.yaml": "2"},
        "plugins": {"SGLANG_PLUGINS": "cpu_lab", "cpu_lab": "x:y (lab 1)"},
    }
    after = copy.deepcopy(before)
    after["settings"].update(EnvironmentFiles="/a (ignore_errors=no) /p (ignore_errors=yes)", ReadWritePaths="/r")
    after["environment"].update(PYTHONPATH="3", PIVOT_PROBE_DIR="4", SGLANG_PLUGINS="5")
    after["plugins"].update(SGLANG_PLUGINS="cpu_lab,pivot_probe", pivot_probe="z (pivot-probe 1)")
    assert probe_state.other_changes(before, after, graphs_off=False) == []
    graphs = copy.deepcopy(after)
    graphs["command line"].append("--disable-cuda-graph")
    graphs["settings"]["ExecStart"] = "x --disable-cuda-graph"
    assert probe_state.other_changes(before, graphs, graphs_off=True) == []
    assert len(probe_state.other_changes(before, graphs, graphs_off=False)) == 2
    for part, item, value in [
        ("settings", "User", "root"),
        ("settings", "EnvironmentFiles", "/p (ignore_errors=yes)"),
        ("environment", "HOME", "9"),
        ("launch configuration", "/a.yaml", "9"),
        ("plugins", "SGLANG_PLUGINS", "pivot_probe"),
        ("plugins", "other", "o:o (other 1)"),
    ]:
        changed = copy.deepcopy(after)
        changed[part][item] = value
        [found] = probe_state.other_changes(before, changed, graphs_off=False)
        assert (found["part"], found["item"], found["after"]) == (part, item, value)


@pytest.mark.parametrize(
    ("consent", "need", "active", "restored"),
    [
        (False, "restart", "active", None),  # it runs on, with a probe that has stopped recording
        (True, "restart", "active", {"allow_restart": True, "start": True}),
        (False, "start", "failed", {"allow_restart": False, "start": False}),
        (True, "start", "failed", {"allow_restart": True, "start": True}),
        # somebody has stopped it: it stays down
        (True, "start", "inactive", {"allow_restart": True, "start": False}),
        (False, "", "active", {"allow_restart": False, "start": False}),
    ],
)
def test_at_expiry_a_restart_needs_consent_and_a_restore_does_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    consent: bool,
    need: str,
    active: str,
    restored: dict[str, bool] | None,
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(probe_state, "_settle", lambda *_arguments, **_options: None)
    monkeypatch.setattr(probe_state, "_need", lambda *_arguments: need)
    monkeypatch.setattr(probe_state, "show", lambda *_arguments: {"ActiveState": active})
    monkeypatch.setattr(probe_state, "restore", lambda settings: given.append(settings) or {"changed": True})
    path = tmp_path / "state.json"
    settings = {"unit": "llm.service", "state": str(path)}
    assert probe_state.expire(settings) == {"changed": False}  # it was switched off meanwhile
    probe_state.write_state(path, {"format": 2, "phase": "on", "expiry_restart": consent, "expired": None})
    result = probe_state.expire(settings)
    if restored is None:
        assert given == []
        assert "llm.service keeps the probe until debug-off" in result["kept"]
        assert probe_state.read_state(path)["expired"]
    else:
        assert given == [{**settings, **restored}]


def settling(monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], *, probe: bool, until: float = 1e9) -> list[float]:
    """A unit that shows these facts until then, over a clock that passes only while somebody sleeps."""
    slept = [0.0]
    monkeypatch.setattr(probe_state.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(probe_state.time, "sleep", slept.append)
    monkeypatch.setattr(probe_state, "show", lambda *_: facts if sum(slept) < until else {"ActiveState": "active"})
    environment = {"PIVOT_PROBE_DIR": "/r"} if probe else {}
    monkeypatch.setattr(probe_state, "process_environment", lambda _pid: environment)
    return slept


LOADING = {"ActiveState": "activating", "MainPID": "7", "TimeoutStartUSec": "1h", "TimeoutStopUSec": "1min 30s"}


def test_a_model_that_loads_is_waited_for_as_long_as_its_unit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = settling(monkeypatch, LOADING, probe=True, until=1334)
    probe_state._settle("llm.service", 600, restarting=False)
    assert sum(slept) == 1334
    slept = settling(monkeypatch, LOADING, probe=False)
    with pytest.raises(probe_state.Failed, match="has been starting or stopping for 3690 s"):
        probe_state._settle("llm.service", 600, restarting=True)
    assert 3690 < sum(slept) < 3692


def test_nobody_waits_for_a_start_with_the_probe_that_is_about_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = settling(monkeypatch, LOADING, probe=True)
    probe_state._settle("llm.service", 600, restarting=True)
    assert probe_state._need("llm.service", None) == "restart"
    # in systemd's pause before the next try there is no process; the drop-in tells
    dropin = tmp_path / "50-pivot-probe.conf"
    monkeypatch.setattr(probe_state, "dropin_path", lambda _unit: dropin)
    slept = settling(monkeypatch, {**LOADING, "MainPID": "0"}, probe=False, until=30)
    dropin.touch()
    probe_state._settle("llm.service", 600, restarting=True)
    assert (sum(slept), probe_state._need("llm.service", None)) == (0, "restart")
    dropin.unlink()
    assert probe_state._need("llm.service", None) == ""
    probe_state._settle("llm.service", 600, restarting=True)
    assert sum(slept) == 30


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1h 30min", 5400), ("1min 30s", 90), ("5s 500ms", 5.5), ("infinity", 0), ("", 0), ("0", 0), ("1d 2h", 93600)],
)
def test_systemds_time_spans_are_read(text: str, seconds: float) -> None:
    assert probe_state.time_span(text) == seconds


def test_a_property_that_systemd_shows_several_times_keeps_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_state, "run", lambda *_command: "EnvironmentFiles=/a\nType=exec\nEnvironmentFiles=/b=c\n")
    assert probe_state.show("x", ["EnvironmentFiles", "Type"]) == {"EnvironmentFiles": "/a\n/b=c", "Type": "exec"}


def test_the_names_of_the_timer_and_times_in_the_state() -> None:
    assert probe_state.expiry_name("sglang.service") == "pivot-probe-sglang"
    assert probe_state.expiry_name("sglang@kimi.service") == "pivot-probe-sglang-kimi"
    assert probe_state.utc(probe_state.moment(NOW)) == NOW


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
    between = "ExecStart=/a \\\n  # the drafter \\\n  --draft d \\\n; ranks\n  --tp 8\n# ExecStart=/b\n"
    assert probe_state.exec_start(between) == {"text": "/a  --draft d  --tp 8"}
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
    probe_state.write_state(path, {"format": 2, "phase": "on"})
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert probe_state.read_state(path) == {"format": 2, "phase": "on"}
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"format": 1})])
def test_a_state_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(probe_state.Failed, match="state file"):
        probe_state.read_state(path)


def test_other_units_with_the_probe_in_these_directories_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_state, "UNITS", tmp_path)
    texts = {
        "mine": "EnvironmentFile=-/opt/probe/environment\nReadWritePaths=-/var/log/probe\n",
        "same-root": "EnvironmentFile=-/opt/probe/environment\nReadWritePaths=-/var/log/other\n",
        "same-records": "EnvironmentFile=-/opt/other/environment\nReadWritePaths=-/var/log/probe\n",
        "apart": "EnvironmentFile=-/opt/probe-two/environment\nReadWritePaths=-/var/log/probe.two\n",
    }
    for name, text in texts.items():
        path = probe_state.dropin_path(f"{name}.service")
        path.parent.mkdir()
        path.write_text(text)
    found = probe_state._neighbours("mine.service", Path("/opt/probe"), Path("/var/log/probe"))
    assert found == ["same-records.service", "same-root.service"]


def test_looking_waits_for_a_switch_that_is_still_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look() -> None:
        with probe_state.alone("look"):
            seen.append("looked")

    monkeypatch.setattr(probe_state, "LOCK", tmp_path / "lock")
    look()
    assert not (tmp_path / "lock").exists()  # looking alone leaves nothing
    other = threading.Thread(target=look)
    with probe_state.alone("restore"):
        other.start()
        other.join(0.2)
        assert seen == ["looked"]
    other.join(5)
    assert seen == ["looked", "looked"]


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
        (tmp_path / f"{session}-7.safetensors").write_text(session)
        probe_state._set_aside(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["two-7.safetensors", "two.jsonl"]
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
