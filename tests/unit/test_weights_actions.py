"""The two actions that a play follows its weights with: what they print, through lost connections, and how they end."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure

from pivot.checkpoints import weights_send

ROOT = Path(__file__).parents[2]
FIELDS: dict[str, Any] = {"phase": "verifying m", "done": 5 * 10**8, "total": 10**9, "rate": 1e8, "ended": ""}
WORKING = {**FIELDS, "alive": True, "unit": "pivot-weights-0"}
DONE = {**FIELDS, "alive": False, "ended": "ok", "published": ["/models/m/r1"], "failed": {}}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"plugins/action/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is displayed."""
    from ansible.utils.display import Display  # noqa: PLC0415 - it reads the settings of a run when it is imported

    found: list[str] = []
    monkeypatch.setattr(Display, "display", lambda _, text, *__, **___: found.append(text))
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("ansible.plugins.action.ActionBase.run", lambda *_: {})
    return found


def follow(answers: list[Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run weights_follow with a host that answers so; its result, and what the host was asked."""
    module, asked = load("weights_follow"), []
    action = object.__new__(module.ActionModule)
    action._task = SimpleNamespace(args={"script": "look", "watch": {"root": "/models", "run": "/run/x"}})

    def answer(**call: Any) -> dict[str, Any]:
        argument = json.loads(call["module_args"]["argv"][-1])
        asked.append(argument)
        said = answers.pop(0)
        if isinstance(said, Exception):
            raise said
        return {"rc": 0, "stdout": json.dumps(said)}

    action._execute_module = answer
    return action.run(None, {"inventory_hostname": "infer1"}), asked


def test_a_job_is_followed_with_a_line_now_and_then(lines: list[str]) -> None:
    result, asked = follow([WORKING, WORKING, DONE])
    assert result == {"changed": True, "told": DONE}
    assert lines == ["infer1: verifying m, 500.0 MB of 1.0 GB, 100.0 MB/s, 5 s left"] * 2
    assert [call["seconds"] for call in asked] == [2, 5, 10]
    assert asked[0]["action"] == "watch"


def test_a_lost_connection_is_said_and_taken_up_again(lines: list[str]) -> None:
    result, _ = follow([WORKING, AnsibleConnectionFailure("gone"), AnsibleConnectionFailure("gone"), DONE])
    assert result["changed"]
    assert lines[1:] == ["infer1: the connection is lost, the job goes on; trying again"] * 2


def test_a_connection_that_stays_away_is_given_up(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000, 10**6, 600))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    result, _ = follow([AnsibleConnectionFailure("gone")] * 3)
    assert result["failed"]
    assert result["msg"].startswith("no connection for 15 minutes; the job goes on without it: run again later")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {**DONE, "ended": "failed", "failed": {"/models/m/r1": {"a": "is missing"}}},
            "not published, files did not arrive as pinned: /models/m/r1: a is missing. Wrong ones were removed",
        ),
        ({**DONE, "ended": "failed", "error": "the volume of /models is full"}, "the volume of /models is full"),
        (
            {**WORKING, "alive": False},
            "the job ended without a word (killed, or the host was restarted; journalctl -u pivot-weights-0): run",
        ),
    ],
)
def test_a_job_that_failed_is_a_sentence(said: dict[str, Any], message: str, lines: list[str]) -> None:
    result, _ = follow([said])
    assert result["failed"]
    assert result["msg"].startswith(message)
    assert lines == []


def test_verification_alone_changes_nothing(lines: list[str]) -> None:
    result, _ = follow([{**DONE, "published": []}])
    assert not result["changed"]


# ---- the sender


def send(monkeypatch: pytest.MonkeyPatch, place: Path, sends: list[dict[str, Any]], *alive: bool) -> dict[str, Any]:
    module = load("weights_send")
    action = object.__new__(module.ActionModule)
    action._task = SimpleNamespace(args={"host": "infer1:", "root": "/models", "sends": sends})
    answers = list(alive)
    monkeypatch.setattr(weights_send, "place_of", lambda *_: place)
    monkeypatch.setattr(weights_send, "alive", lambda _: answers.pop(0))
    monkeypatch.setattr(weights_send, "begin", lambda _, given: (place / "began").write_text(str(len(given))))
    result: dict[str, Any] = action.run(None, {"inventory_hostname": "infer1"})
    return result


def told(place: Path, **more: Any) -> None:
    (place / "progress.json").write_text(json.dumps({**FIELDS, "error": "", **more}))


def test_what_nobody_sends_needs_no_waiting(lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert send(monkeypatch, tmp_path, [], False) == {"changed": False}


def test_an_earlier_runs_sender_is_followed(lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told(tmp_path, ended="failed", error="rsync ended with 23")
    clock = iter(range(1000, 10**6, 3))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    result = send(monkeypatch, tmp_path, [], True, True, False)
    assert result == {"changed": True, "msg": "rsync ended with 23"}  # this run sends what is missing
    assert lines == ["infer1: verifying m, 500.0 MB of 1.0 GB, 100.0 MB/s, 5 s left"]
    assert not (tmp_path / "began").exists()


def test_a_sender_that_failed_is_a_sentence(lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told(tmp_path, ended="ok")
    assert send(monkeypatch, tmp_path, [{}], False) == {"changed": True, "msg": "sent"}
    assert (tmp_path / "began").read_text() == "1"
    told(tmp_path, ended="failed", error="the volume of /models is full")
    assert send(monkeypatch, tmp_path, [{}], False) == {"failed": True, "msg": "the volume of /models is full"}
    told(tmp_path)
    assert "was killed: run again" in send(monkeypatch, tmp_path, [{}], False)["msg"]
