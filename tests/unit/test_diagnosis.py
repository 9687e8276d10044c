"""States and suspects, each from a bundle made by hand."""

# ruff: noqa: E501 - lines as they are logged

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pivot.logs import diagnosis
from pivot.logs.diagnosis import Diagnosis, State
from pivot.logs.evidence import read

DATA = Path(__file__).parent / "data/logs"
RUNNING = {"ActiveState": "active", "SubState": "running", "Result": "success", "LoadState": "loaded", "NRestarts": "0"}
SCHEDULER = {"pid": 12, "name": "sglang::schedul", "state": "S", "busy": 0.4, "seconds": 9.0, "waits_in": "0"}
SERVER = {"pid": 11, "name": "python3", "state": "S", "busy": 0.0, "seconds": 3.0, "waits_in": "0"}
FINE = [{"path": path, "status": 200, "seconds": 0.1} for path in ("/health", "/server_info", "/metrics")]


def at(minute: int, text: str, second: int = 0) -> str:
    return f"2026-11-29T10:{minute:02d}:{second:02d}.000000+0000 h sglang[11]: [2026-11-29 10:{minute:02d}:{second:02d}] {text}\n"


def unit(minute: int, text: str, second: int = 0) -> str:
    return f"2026-11-29T10:{minute:02d}:{second:02d}.000000+0000 h systemd[1]: {text}\n"


def start(minute: int = 0, *, ready: bool = True) -> str:
    """A start of ten minutes, as the journal has it."""
    lines = [
        unit(minute, "Starting sglang.service - SGLang server (h)..."),
        at(minute, "server_args=ServerArgs(model_path='/models/t')", 20),
        at(minute + 1, "Load weight begin. avail mem=94.80 GB"),
        at(minute + 5, "Load weight end. elapsed=240.0 s, type=Target, avail mem=24.10 GB"),
        at(minute + 5, "Load weight begin. avail mem=24.00 GB", 10),
        at(minute + 5, "Load weight end. elapsed=6.9 s, type=Drafter, avail mem=22.90 GB", 20),
        at(minute + 6, "max_total_num_tokens=4096, chunked_prefill_size=4096"),
    ]
    return "".join([*lines, *([at(minute + 10, "The server is fired up and ready to roll!")] if ready else [])])


def decode(minute: int, length: str | None = "3.10", tokens: int = 800, count: int = 1) -> str:
    accept = f"accept len: {length}, accept rate: 0.70, " if length else ""
    text = f"Decode batch, #running-req: 1, #token: {tokens}, token usage: 0.10, {accept}cuda graph: True, gen throughput (token/s): 80.00, #queue-req: 0"
    return at(minute, text) * count


def bundle(tmp_path: Path, log: str, **files: Any) -> Path:
    """A bundle taken at 10:30. files: names with __ for / and _dot_ for a dot; values as text or JSON."""
    path = tmp_path / "b"
    path.mkdir()
    manifest = {"schema": 2, "host": "infer1", "unit": "sglang.service", "time": "2026-11-29T103000Z", "files": []}
    (path / "server.log").write_text(log)
    properties = files.pop("properties", RUNNING)
    (path / "unit-properties.txt").write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    files = {"processes.json": [SERVER, SCHEDULER], "answers.json": FINE, "manifest.json": manifest, **files}
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def look(tmp_path: Path, log: str, **files: Any) -> Diagnosis:
    return diagnosis.diagnose(read(bundle(tmp_path, log, **files)))


def codes(found: Diagnosis) -> list[str]:
    return [suspect.finding.code for suspect in found.suspects]


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


# --- crashed


def crash(minute: int, *, counter: int = 0) -> str:
    again = (
        unit(minute, f"sglang.service: Scheduled restart job, restart counter is at {counter}.", 9) if counter else ""
    )
    return (
        unit(minute, "Starting sglang.service - SGLang server (h)...")
        + at(minute, "server_args=ServerArgs()", 1)
        + at(minute, "Scheduler hit an exception: Traceback (most recent call last):", 2)
        + at(minute, "x", 2).partition(": [")[0]
        + ": RuntimeError: captured 2 of 3 aux hidden states\n"
        + unit(minute, "sglang.service: Main process exited, code=killed, status=9/KILL", 5)
        + unit(minute, "sglang.service: Failed with result 'signal'.", 6)
        + again
    )


FAILED = {**RUNNING, "ActiveState": "failed", "SubState": "failed", "Result": "signal"}


def test_crashed_says_why(tmp_path: Path) -> None:
    found = look(tmp_path, crash(5), properties=FAILED, **{"processes.json": [], "answers.json": []})
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-EXCEPTION"])
    assert found.verdict.why == "RuntimeError: captured 2 of 3 aux hidden states"


REQUEST = (
    at(12, "ERROR:    Exception in ASGI application").replace("[2026-11-29 10:12:00] ", "")
    + "2026-11-29T10:12:00.000000+0000 h sglang[11]: Traceback (most recent call last):\n"
    + "2026-11-29T10:12:00.000000+0000 h sglang[11]: KeyError: 'role'\n"
    + "2026-11-29T10:12:00.000000+0000 h sglang[11]: jinja2.exceptions.TemplateError: roles must alternate\n"
)
HIT = at(13, "Scheduler hit an exception: Traceback (most recent call last):")
RAISED = "2026-11-29T10:13:00.000000+0000 h sglang[11]: IndexError: index 163840 is out of bounds\n"
DIED = at(13, "Subprocess scheduler_2 (pid=12) crashed with exit code -9. Triggering SIGQUIT for cleanup...", 1)
PEER = "2026-11-29T10:13:00.000000+0000 h sglang[11]: torch.distributed.DistBackendError: Connection closed by peer\n"
EARLIER = "2026-11-29T10:00:30.000000+0000 h sglang[11]: ImportError: an optional package is missing\n"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (start() + decode(11) + REQUEST + HIT + RAISED + DIED, "IndexError: index 163840 is out of bounds"),
        (start() + decode(11) + REQUEST * 14 + HIT + RAISED + DIED, "IndexError: index 163840 is out of bounds"),
        (start() + decode(11) + HIT + RAISED * 30 + DIED, "IndexError: index 163840 is out of bounds"),
        (EARLIER + start(ready=False) + HIT + RAISED + DIED, "IndexError: index 163840 is out of bounds"),
        # of a start the first one counts, whichever rank says that it hit one
        (start(ready=False) + RAISED + HIT + PEER + DIED, "IndexError: index 163840 is out of bounds"),
        # requests that fail because of it do not push it out
        (start() + decode(11) + RAISED + REQUEST * 14 + DIED, "IndexError: index 163840 is out of bounds"),
        (start() + decode(11) + REQUEST + DIED, "a scheduler died (scheduler_2 -9)"),
        (start() + decode(11) + REQUEST * 14 + DIED, "a scheduler died (scheduler_2 -9)"),
        (start() + decode(11) + REQUEST + decode(12) + RAISED + DIED, "IndexError: index 163840 is out of bounds"),
        (
            start() + decode(11) + REQUEST + at(12, "Timeout") + RAISED + DIED,
            "IndexError: index 163840 is out of bounds",
        ),
        (
            start(ready=False) + EARLIER + at(10, "The server is fired up and ready to roll!") + DIED,
            "a scheduler died (scheduler_2 -9)",
        ),
    ],
)
def test_an_error_that_a_server_outlived_is_no_cause(tmp_path: Path, log: str, why: str) -> None:
    found = look(tmp_path, log, properties=FAILED, **{"processes.json": [], "answers.json": []})
    assert (found.verdict.state, found.verdict.why) == (State.CRASHED, why)
    assert ("DIAG-EXCEPTION" in codes(found)) == why.startswith("IndexError")


def test_killed_during_a_load(tmp_path: Path) -> None:
    log = start(ready=False) + at(
        7, "Subprocess scheduler_0 (pid=12) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
    )
    log += unit(7, "sglang.service: Main process exited, code=killed, status=9/KILL", 5)
    found = look(tmp_path, log, properties=FAILED, **{"processes.json": []})
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-KILLED"])
    assert found.suspects[0].finding.message.startswith("scheduler_0 was killed by signal 9")


def test_the_main_process_killed_by_somebody(tmp_path: Path) -> None:
    log = start(ready=False) + unit(7, "sglang.service: Main process exited, code=killed, status=9/KILL", 5)
    found = look(tmp_path, log, properties=FAILED)
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-KILLED"])


def test_a_loop_that_systemd_ended(tmp_path: Path) -> None:
    log = (
        crash(1, counter=1)
        + crash(2, counter=2)
        + crash(3, counter=3)
        + unit(4, "sglang.service: Start request repeated too quickly.")
    )
    found = look(tmp_path, log, properties={**FAILED, "NRestarts": "3"})
    assert (found.verdict.state, codes(found)) == (State.LOOPING, ["DIAG-EXCEPTION"])
    assert (
        found.verdict.why
        == "3 starts failed, systemd has given up; the last: RuntimeError: captured 2 of 3 aux hidden states"
    )


def test_a_loop_that_goes_on_while_the_bundle_is_taken(tmp_path: Path) -> None:
    log = crash(1, counter=1) + crash(2, counter=2) + unit(3, "Starting sglang.service - SGLang server (h)...")
    found = look(tmp_path, log, properties={**RUNNING, "ActiveState": "activating", "NRestarts": "2"})
    assert found.verdict.state == State.LOOPING


def test_failed_starts_of_people_are_no_loop(tmp_path: Path) -> None:
    found = look(tmp_path, crash(1) + crash(2) + crash(3), properties=FAILED)
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-EXCEPTION"])


def test_one_restart_that_worked_is_no_loop(tmp_path: Path) -> None:
    found = look(
        tmp_path, crash(1, counter=1) + start(2) + decode(29, count=3), properties={**RUNNING, "NRestarts": "1"}
    )
    assert (found.verdict.state, codes(found)) == (State.SERVING, [])


def test_a_server_that_was_stopped(tmp_path: Path) -> None:
    log = start() + unit(20, "Stopping sglang.service - SGLang server (h)...") + at(20, "SIGTERM received. signum=None")
    log += unit(21, "sglang.service: Deactivated successfully.")
    found = look(tmp_path, log, properties={**RUNNING, "ActiveState": "inactive", "SubState": "dead"})
    assert (found.verdict.state, codes(found)) == (State.STOPPED, [])


def test_no_unit_and_no_log(tmp_path: Path) -> None:
    found = look(tmp_path, "", properties={"LoadState": "not-found", "ActiveState": "inactive"})
    assert (found.verdict.state, found.verdict.why) == (State.UNKNOWN, "there is no unit sglang.service on this host")


# --- suspects that more than a log shows


def test_b15_shared_memory_is_full(tmp_path: Path) -> None:
    warn = "llm01:2200:2300 [3] NCCL WARN Error: failed to extend /dev/shm/nccl-Ab12Cd to 9637892 bytes, error: No space left on device (28)\n"
    listing = "9637892 2026-11-28T08:00:00Z /dev/shm/nccl-old\n9637892 2026-11-29T10:05:00Z /dev/shm/nccl-new\n"
    df = "Filesystem Type Size Used Avail Use% Mounted on\ntmpfs tmpfs 65536K 65100K 436K 100% /dev/shm\n"
    found = look(
        tmp_path, crash(5), properties=FAILED, **{"nccl/h.3": warn, "system/df.txt": df, "system/listing.txt": listing}
    )
    assert codes(found) == ["DIAG-SHM-FULL", "DIAG-EXCEPTION"]
    assert "1 segments there are older" in found.suspects[0].finding.message
    assert [line.file for line in found.suspects[0].evidence] == ["nccl/h.3", "system/df.txt", "system/listing.txt"]
    assert "size, not NCCL flags" in found.suspects[0].finding.fix


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-\x1a\x7f (size 0), error: No such file (2)",
            "DIAG-SHM-NAME",
        ),
        ("NCCL WARN Call to shm_open failed: Permission denied", "DIAG-SHM-DENIED"),
        ("NCCL WARN Cuda failure 'API mismatch'", "DIAG-DRIVER"),
    ],
)
def test_what_nccl_warns_of(tmp_path: Path, text: str, code: str) -> None:
    found = look(tmp_path, crash(5), properties=FAILED, **{"nccl/h.3": f"h:1:2 [0] {text}\n"})
    assert codes(found)[0] == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("OSError: [Errno 28] No space left on device", "DIAG-VOLUME-FULL"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "DIAG-GPU-MEMORY"),
        (
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
            "DIAG-LEFTOVERS",
        ),
        ("OSError: [Errno 98] Address already in use", "DIAG-PORT"),
        ("ImportError: /c/.cache/flashinfer/x.so: undefined symbol: _ZN3c10", "DIAG-JIT-CACHE"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "DIAG-ARCHITECTURE"),
        ("RuntimeError: Failed to initialize NVML: Driver/library version mismatch", "DIAG-DRIVER"),
        ("std::bad_alloc", "DIAG-HOST-MEMORY"),
    ],
)
def test_causes_stand_before_the_exception(tmp_path: Path, text: str, code: str) -> None:
    found = look(tmp_path, crash(5).replace("RuntimeError: captured 2 of 3 aux hidden states", text), properties=FAILED)
    assert codes(found)[0] == code
    assert found.verdict.state == State.CRASHED


def test_a_full_volume_that_nobody_has_met_yet(tmp_path: Path) -> None:
    df = "Filesystem Type Size Used Avail Use% Mounted on\n/dev/sda ext4 9G 9G 0 100% /var/log\n/dev/sdb ext4 9G 9G 0 100% /models\n"
    found = look(tmp_path, start() + decode(29, count=3), **{"system/df.txt": df})
    assert codes(found) == ["DIAG-VOLUME-FULL"]
    assert [line.line for line in found.suspects[0].evidence] == [2]


def test_a_full_volume_that_stops_even_what_comes_before_the_server(tmp_path: Path) -> None:
    log = (
        unit(5, "Starting sglang.service - SGLang server (h)...")
        + "2026-11-29T10:05:01.000000+0000 h sglang[9]: Traceback (most recent call last):\n"
        + "2026-11-29T10:05:01.000000+0000 h sglang[9]: OSError: [Errno 28] No space left on device: '/run/sglang/started.json.new'\n"
        + unit(5, "sglang.service: Control process exited, code=exited, status=1/FAILURE", 1)
        + unit(5, "sglang.service: Failed with result 'exit-code'.", 2)
        + unit(5, "Failed to start sglang.service - SGLang server (h).", 2)
    )
    df = "Filesystem Type Size Used Avail Use% Mounted on\nfull tmpfs 4.0K 4.0K 0 100% /run/sglang\n"
    found = look(tmp_path, log, properties={**FAILED, "Result": "exit-code"}, **{"system/df.txt": df})
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-VOLUME-FULL", "DIAG-EXCEPTION"])
    assert [line.file for line in found.suspects[0].evidence] == ["server.log", "system/df.txt"]


def test_gpus_that_need_a_reset_b13(tmp_path: Path) -> None:
    kernel = "[ 812.1] NVRM: Xid (PCI:0000:a1:00): 62, 0 (GSP halt)\n[ 9.0] NVRM: Xid (PCI:0000:21:00): 94, x\n[ 9.0] NVRM: Xid (PCI:0000:22:00): 31, x\n"
    found = look(tmp_path, crash(5), properties=FAILED, **{"system/kernel.log": kernel})
    assert codes(found) == ["DIAG-GPU-LOST", "DIAG-GPU-ECC", "DIAG-EXCEPTION", "DIAG-GPU-FAULT"]
    assert "0000:a1:00" in found.suspects[0].finding.message
    assert "power the node fully off" in found.suspects[0].finding.fix


def test_a_driver_that_moved_b11(tmp_path: Path) -> None:
    module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    libraries = "libcuda.so.1 -> libcuda.so.580.105.08\n"
    found = look(
        tmp_path,
        crash(5),
        properties=FAILED,
        **{"system/proc/driver/nvidia/version": module, "system/libraries.txt": libraries},
    )
    assert codes(found)[0] == "DIAG-DRIVER"
    assert "the module is 580.95.05, libcuda is 580.105.08" in found.suspects[0].finding.message


def test_somebody_else_on_the_gpus(tmp_path: Path) -> None:
    rows = "pid, process_name, used_gpu_memory\n12, sglang::scheduler, 90000 MiB\n4711, python3, 60000 MiB\n"
    found = look(tmp_path, start() + decode(29, count=3), **{"system/gpu-processes.txt": rows})
    assert codes(found) == ["DIAG-LEFTOVERS"]
    assert "python3 (4711)" in found.suspects[0].finding.message


def test_memory_of_the_host_by_its_cgroup(tmp_path: Path) -> None:
    events = {"system/sys/fs/cgroup/memory.events": "low 0\nhigh 7\noom 1\noom_kill 1\n"}
    assert codes(look(tmp_path, start() + decode(29, count=3), **events)) == ["DIAG-HOST-MEMORY"]


def test_a_start_that_systemd_did_not_wait_for(tmp_path: Path) -> None:
    log = start(ready=False) + unit(9, "sglang.service: start-post operation timed out. Terminating.")
    log += unit(9, "sglang.service: Failed with result 'timeout'.", 2)
    found = look(tmp_path, log, properties={**FAILED, "Result": "timeout"})
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-START-TIMEOUT"])


def test_gaps_of_a_rate_limited_journal_o11(tmp_path: Path) -> None:
    gap = "2026-11-29T10:12:00.000000+0000 h systemd-journald[88]: Suppressed 4711 messages from sglang.service\n"
    found = look(tmp_path, start() + gap + decode(29, count=3))
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-LOG-GAP"])


def test_health_beside_a_server_info_that_never_comes(tmp_path: Path) -> None:
    answers = [
        {"path": "/health", "status": 200, "seconds": 0.1},
        {"path": "/server_info", "status": None, "seconds": 25.0, "error": "timed out"},
    ]
    found = look(tmp_path, start() + decode(29, count=3), **{"answers.json": answers})
    assert codes(found) == ["DIAG-HEALTH-LIES"]


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
