"""States of a server that runs or hangs, and what is suspected then, each from a bundle made by hand."""

# ruff: noqa: E501 - lines as they are logged

import json
import shutil
from pathlib import Path

import pytest

from pivot.logs import diagnosis
from pivot.logs.diagnosis import State
from pivot.logs.evidence import read

from .server_bundle import RUNNING, SCHEDULER, SERVER, at, bundle, codes, crash, decode, look, start, unit

DATA = Path(__file__).parent / "data/logs"


def test_a_healthy_server_is_without_a_suspect(tmp_path: Path) -> None:
    found = look(tmp_path, start() + decode(29, count=40))
    assert (found.verdict.state, codes(found)) == (State.SERVING, [])
    assert found.verdict.why == "accept length 3.10, 80 tok/s over 40 decode lines"
    assert [line.line for line in found.verdict.evidence] == [8, 48]
    assert "nothing suspicious" in diagnosis.render(found)


def test_b17_is_broken_although_health_is_green() -> None:
    log = Path(__file__).parents[1] / "data/field-cases/B17-server.log"
    found = diagnosis.diagnose(read(log))
    assert found.verdict.state == State.HUNG
    assert codes(found) == ["DIAG-WATCHDOG", "DIAG-ACCEPT-NONE", "DIAG-HEALTH-LIES"]
    words = found.suspects[1].finding.message
    order = ["d2t", "captured layers", "attention backend", "quantisation", "pair"]
    assert [words.index(word) for word in order] == sorted(words.index(word) for word in order)
    assert [(phase.name, phase.seconds) for phase in found.phases][1] == (
        "weights of KimiK25ForConditionalGeneration",
        251.0,
    )
    assert found.verdict.evidence[0].line == 7


@pytest.mark.parametrize(
    ("recording", "state"),
    [("healthy", State.STOPPED), ("nodraft", State.STOPPED), ("killed", State.CRASHED), ("stopped", State.HUNG)],
)
def test_logs_alone(recording: str, state: State) -> None:
    assert diagnosis.diagnose(read(DATA / f"{recording}-0.5.23.log")).verdict.state == state


BEGUN = "[2026-11-29 10:00:00] server_args=ServerArgs(tp_size=1)\n"
TRACE = 'Traceback (most recent call last):\n  File "/opt/x.py", line 3, in <module>\n'
LOADING = "[2026-11-29 10:00:30] Load weight begin. avail mem=94.80 GB\n"


@pytest.mark.parametrize(
    ("text", "state", "why"),
    [
        (
            "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --topkk 1\n",
            State.CRASHED,
            "launch_server.py: error: unrecognized arguments: --topkk 1",
        ),
        (
            TRACE + "ModuleNotFoundError: No module named 'a'\n",
            State.CRASHED,
            "ModuleNotFoundError: No module named 'a'",
        ),
        (BEGUN + TRACE + "OSError: no config.json\n", State.CRASHED, "OSError: no config.json"),
        (
            BEGUN + LOADING + "ERROR:    [Errno 98] error while attempting to bind: address already in use\n",
            State.CRASHED,
            "a port that it needs is taken",
        ),
        # it went on
        (BEGUN + TRACE + "OSError: no file\n" + LOADING, State.STARTING, "weights of the target; no earlier start"),
        (
            BEGUN + "INFO:     Shutting down\nINFO:     Finished server process [3121]\n",
            State.STOPPED,
            "it was asked to end",
        ),
        ("[10:00:00 TP0] Scheduler hit an exception: Tra", State.CRASHED, "a process hit an exception (Scheduler)"),
        ("hello\nworld\n", State.UNKNOWN, "no line of it is one of a server's log"),
    ],
)
def test_a_log_alone_that_ends_in_an_error_of_its_start(tmp_path: Path, text: str, state: State, why: str) -> None:
    file = tmp_path / "server.log"
    file.write_text(text)
    found = diagnosis.diagnose(read(file))
    assert found.verdict.state == state
    assert found.verdict.why.startswith(why)
    assert ("nothing suspicious" in diagnosis.render(found)) == (state in diagnosis.GOOD)


# --- starting


def test_starting_says_the_phase_since_when_and_how_long_it_takes(tmp_path: Path) -> None:
    log = unit(25, "Starting sglang.service - SGLang server (h)...") + at(25, "server_args=ServerArgs()", 10)
    log += at(26, "Load weight begin. avail mem=94.80 GB")
    found = look(
        tmp_path,
        log,
        properties={**RUNNING, "ActiveState": "activating", "SubState": "start-post"},
        **{"server-before.log": start()},
    )
    assert found.verdict.state == State.STARTING
    assert found.verdict.why == "weights of the target for 240 s; it usually takes 240 s, a whole start takes 10 min"
    assert found.usual["weights of Target"] == 240.0
    assert [line.line for line in found.verdict.evidence] == [3]
    assert codes(found) == []


def test_starting_for_the_first_time(tmp_path: Path) -> None:
    log = unit(29, "Starting sglang.service - SGLang server (h)...")
    found = look(tmp_path, log, properties={**RUNNING, "ActiveState": "activating"})
    assert (found.verdict.state, found.verdict.why) == (
        State.STARTING,
        "imports for 60 s; no earlier start to compare with",
    )


# --- serving badly


def test_a_draft_that_gives_nothing(tmp_path: Path) -> None:
    found = look(tmp_path, start() + decode(29, "1.02", count=9))
    assert (found.verdict.state, codes(found)) == (State.BAD, ["DIAG-ACCEPT-NONE"])


@pytest.mark.parametrize("steps", ["3", ""])
def test_the_most_that_is_possible_on_every_line(tmp_path: Path, steps: str) -> None:
    launch = f"model-path: /models/t\nspeculative-num-steps: {steps}\n" if steps else "model-path: /models/t\n"
    found = look(tmp_path, start() + decode(29, "4.00", count=9), **{"config/etc/sglang/launch.yaml": launch})
    assert (found.verdict.state, codes(found)) == (State.BAD, ["DIAG-ACCEPT-MAX"])


def test_simulated_acceptance(tmp_path: Path) -> None:
    environment = {"SGLANG_SIMULATE_ACC_LEN": "3"}
    found = look(tmp_path, start() + decode(29, "2.97", count=2), **{"process/environment.json": environment})
    assert codes(found) == ["DIAG-ACCEPT-MAX"]
    assert "SGLANG_SIMULATE_ACC_LEN is 3" in found.suspects[0].finding.message


def test_acceptance_that_falls_with_the_context(tmp_path: Path) -> None:
    log = start() + decode(20, "2.30", 2000, 6) + decode(29, "1.30", 16000, 6)
    found = look(tmp_path, log)
    assert (found.verdict.state, codes(found)) == (State.BAD, ["DIAG-ACCEPT-CONTEXT"])
    assert "2.30 to 2048 tokens, 1.30 at 16384" in found.suspects[0].finding.message


def test_acceptance_that_stays_or_rises_is_no_decline(tmp_path: Path) -> None:
    assert codes(look(tmp_path, start() + decode(20, "2.30", 2000, 6) + decode(29, "2.10", 16000, 6))) == []


def test_a_drafter_that_is_configured_and_not_used(tmp_path: Path) -> None:
    launch = "speculative-algorithm: EAGLE3\n"
    found = look(tmp_path, start() + decode(29, None, count=5), **{"config/etc/sglang/launch.yaml": launch})
    assert (found.verdict.state, codes(found)) == (State.BAD, ["DIAG-NO-SPECULATION"])


def test_the_target_twice_e13(tmp_path: Path) -> None:
    found = look(tmp_path, start().replace("type=Drafter", "type=Target") + decode(29, count=3))
    assert (found.verdict.state, codes(found)) == (State.BAD, ["DIAG-TARGET-TWICE"])
    assert [line.line for line in found.suspects[0].evidence] == [4, 6]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("KV cache pool is full. Retract requests. #retracted_reqs: 1", "DIAG-KV-MEMORY"),
        ("skipping unexpected weight midlayer.foo.weight", "DIAG-WEIGHT-NAMES"),
    ],
)
def test_serving_and_yet(tmp_path: Path, text: str, code: str) -> None:
    found = look(tmp_path, start() + at(20, text) + decode(29, count=3))
    assert (found.verdict.state, codes(found)) == (State.BAD, [code])


def test_health_that_was_too_slow_once_makes_nothing_bad(tmp_path: Path) -> None:
    log = start() + at(20, "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.")
    found = look(tmp_path, log + decode(29, count=3))
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-HEALTH-SLOW"])


def test_it_generates_and_health_is_late(tmp_path: Path) -> None:
    answers = [
        {"path": "/health", "status": 503, "seconds": 20.0},
        {"path": "/server_info", "status": 200, "seconds": 3.0},
    ]
    found = look(tmp_path, start() + decode(29, count=3), **{"answers.json": answers})
    assert (found.verdict.state, codes(found)) == (State.BAD, [])


# --- hung


def test_a_scheduler_that_is_stopped(tmp_path: Path) -> None:
    answers = [
        {"path": "/health", "status": 503, "seconds": 20.0},
        {"path": "/server_info", "status": None, "seconds": 25.0, "error": "timed out"},
    ]
    found = look(
        tmp_path,
        start() + decode(12, count=3),
        **{"processes.json": [SERVER, {**SCHEDULER, "state": "T"}], "answers.json": answers},
    )
    assert (found.verdict.state, codes(found)) == (State.HUNG, ["DIAG-PROCESS-STOPPED"])
    assert found.verdict.why == "sglang::schedul is stopped (state T)"
    assert found.suspects[0].finding.fix.startswith("kill -CONT 12")


def test_a_server_that_answers_no_more(tmp_path: Path) -> None:
    answers = [
        {"path": "/health", "status": 503, "seconds": 20.0},
        {"path": "/server_info", "status": None, "seconds": 25.0, "error": "timed out"},
    ]
    found = look(tmp_path, start() + decode(12, count=3), **{"answers.json": answers})
    assert (found.verdict.state, found.verdict.why) == (State.HUNG, "it was ready, and answers no more")
    assert [str(line) for line in found.verdict.evidence] == [
        "answers.json: /health: 503 after 20.0 s",
        "answers.json: /server_info: timed out after 25.0 s",
    ]


def nccl(*ranks: int, complete: bool = True) -> str:
    line = "h:11:{0} [{0}] NCCL INFO ncclCommInitRank comm 0x1 rank {0} nranks 2 cudaDev {0} commId 0x7 - Init {1}\n"
    way = "h:11:{0} [{0}] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
    return "".join(
        line.format(rank, "START") + way.format(rank) + (line.format(rank, "COMPLETE") if complete else "")
        for rank in ranks
    )


def test_initialised_and_then_silence_n01(tmp_path: Path) -> None:
    log = unit(0, "Starting sglang.service - SGLang server (h)...") + at(1, "server_args=ServerArgs()")
    files = {"nccl/h.11": nccl(0, 1), "processes.json": [{**SCHEDULER, "busy": 1.0}]}
    found = look(tmp_path, log, properties={**RUNNING, "ActiveState": "activating"}, **files)
    assert (found.verdict.state, codes(found)) == (State.HUNG, ["DIAG-P2P"])
    assert found.verdict.why == "2 ranks are initialised, and for 29 min no collective followed"
    assert "over P2P" in found.suspects[0].finding.message
    assert found.verdict.evidence[0].file == "nccl/h.11"


def test_a_rank_that_does_not_get_there(tmp_path: Path) -> None:
    log = unit(0, "Starting sglang.service - SGLang server (h)...") + at(1, "server_args=ServerArgs()")
    files = {"nccl/h.11": nccl(0) + nccl(1, complete=False)}
    found = look(tmp_path, log, properties={**RUNNING, "ActiveState": "activating"}, **files)
    assert (found.verdict.state, found.verdict.why) == (State.HUNG, "rank 1 did not get through NCCL's initialisation")


def test_silence_of_processes_that_do_nothing(tmp_path: Path) -> None:
    log = unit(0, "Starting sglang.service - SGLang server (h)...") + at(1, "Load weight begin. avail mem=94.80 GB")
    idle = [{**SCHEDULER, "busy": 0.0}]
    found = look(tmp_path, log, properties={**RUNNING, "ActiveState": "activating"}, **{"processes.json": idle})
    assert (found.verdict.state, found.verdict.why) == (
        State.HUNG,
        "weights of the target has said nothing for 29 min, and no process computes or reads",
    )


def test_a_slow_storage_is_a_start_not_a_hang_s12(tmp_path: Path) -> None:
    log = unit(0, "Starting sglang.service - SGLang server (h)...") + at(1, "Load weight begin. avail mem=94.80 GB")
    reading = [{**SCHEDULER, "state": "D", "busy": 0.0, "waits_in": "folio_wait_bit"}]
    found = look(tmp_path, log, properties={**RUNNING, "ActiveState": "activating"}, **{"processes.json": reading})
    assert (found.verdict.state, codes(found)) == (State.STARTING, ["DIAG-STORAGE"])


def test_a_collective_that_timed_out(tmp_path: Path) -> None:
    text = "[rank1]:[E1129 10:20:00 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1)"
    found = look(tmp_path, start() + decode(12) + at(20, text))
    assert (found.verdict.state, codes(found)) == (State.HUNG, ["DIAG-P2P"])


# --- the command, and other machines


def test_the_answer_is_the_same_elsewhere_and_at_another_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = bundle(tmp_path, start() + decode(29, "1.02", count=9))
    first = diagnosis.diagnose(read(here)).as_dict()
    there = tmp_path / "elsewhere/b"
    shutil.copytree(here, there)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert diagnosis.diagnose(read(there)).as_dict() == first
    assert str(tmp_path) not in json.dumps(first)
    assert first["time"] == "2026-11-29 10:30:00 UTC"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = bundle(tmp_path, start() + decode(29, count=3))
    assert diagnosis.main([str(good)]) == 0
    assert "state   SERVING" in capsys.readouterr().out
    (good / "server.log").write_text(crash(5))
    assert diagnosis.main([str(good), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "crashed"
    (good / "manifest.json").write_text('{"schema": 9}')
    assert diagnosis.main([str(good)]) == 2
    assert "schema 9" in capsys.readouterr().err
    (good / "manifest.json").write_text("{")
    assert diagnosis.main([str(good)]) == 2
    assert diagnosis.main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_what_a_bundle_lacks_is_said_when_it_was_needed(tmp_path: Path) -> None:
    entry = {"sha256": None, "required": False, "failed": False, "reason": "there is none"}
    files = [{**entry, "name": "a"}, {**entry, "name": "b", "required": True}, {**entry, "name": "c", "failed": True}]
    files.append({"name": "server.log", "sha256": "x", "truncated": True, "tail": False, "reason": "cut"})
    manifest = {"schema": 2, "host": "h", "unit": "sglang.service", "time": "2026-11-29T103000Z", "files": files}
    found = look(tmp_path, start() + decode(29, count=3), **{"manifest.json": manifest})
    assert found.facts.lacks == ["b: there is none", "c: there is none", "server.log: cut"]
    assert "lacks   server.log: cut" in diagnosis.render(found)


def test_files_that_are_damaged_say_nothing_and_stop_nothing(tmp_path: Path) -> None:
    broken = dict.fromkeys(
        ("processes.json", "answers.json", "process/environment.json", "process/cmdline.json"), "[{]"
    )
    tables = ("system/df.txt", "system/listing.txt", "system/gpu-processes.txt", "system/memory.events")
    noise = dict.fromkeys(tables, "\0 % %% 9 8%\n")
    assert look(tmp_path, start() + decode(29, count=3), **broken, **noise).verdict.state == State.SERVING
