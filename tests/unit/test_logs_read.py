"""Logs as they really come: every expectation is written by hand."""

# ruff: noqa: E501 - lines as they are logged

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pivot.logs import gpu_logs, server_log

DATA = Path(__file__).parent / "data/logs"


def server(text: str | bytes, **options: str) -> server_log.ServerLog:
    raw = text if isinstance(text, bytes) else text.encode()
    return server_log.ServerLog(**options).read(io.BytesIO(raw))


def recorded(name: str) -> server_log.Run:
    """The one run of a log that SGLang 0.5.23 wrote on a CPU."""
    log = server((DATA / f"{name}-0.5.23.log").read_bytes())
    assert log.starts == 1
    assert log.current is not None
    return log.current


B17 = """\
[10:00:01] Load weight begin. avail mem=94.80 GB
[10:04:12] Load weight end. elapsed=251.0 s, type=KimiK25ForConditionalGeneration, quant=compressed-tensors, avail mem=24.10 GB
[10:04:13] Load weight begin. avail mem=24.00 GB
[10:04:20] Load weight end. elapsed=6.9 s, type=LlamaForCausalLMEagle3, avail mem=22.90 GB
[10:06:40] The server is fired up and ready to roll!
[10:20:00] Decode batch, #running-req: 1, #token: 812, token usage: 0.00, accept len: 1.03, accept rate: 0.01, cuda graph: True, gen throughput (token/s): 31.20, #queue-req: 0
[10:31:10 TP3] Scheduler watchdog timeout (self.watchdog_timeout=300)
[10:31:10] GET /health 200
"""


def before(prefix: str) -> Callable[[str], str]:
    """The text with something before each line."""
    return lambda text: "".join(f"{prefix}{line}\n" for line in text.splitlines())


def in_json(**more: str) -> Callable[[str], str]:
    """Each line in a mapping of its own, where TEXT stands."""
    return lambda text: "".join(json.dumps(more).replace("TEXT", line) + "\n" for line in text.splitlines())


# the same log as it may arrive
FORMS = {
    "plain": lambda text: text,
    "windows": lambda text: text.replace("\n", "\r\n"),
    "coloured": lambda text: "".join(f"\x1b[32m{line}\x1b[0m\n" for line in text.splitlines()),
    "progress bars": lambda text: text.replace("\n[", "\nLoading shards:  50% 1/2\rLoading shards: 100% 2/2\r["),
    "journal": before("2026-11-29T11:00:00.000000+0000 h sglang[7]: "),
    "journal, short": before("Nov 29 11:00:00 gpu-host7 sglang[7]: "),
    "journal, short and precise": before("Nov  3 11:00:00.123456 gpu-host7 python3[4711]: "),
    "journal, full": before("Sun 2026-11-29 11:00:00 CET gpu-host7 sglang[7]: "),
    "journal, no host": before("2026-11-29T11:00:00+0100 sglang[7]: "),
    "journal, unix time": before("1796122800.123456 gpu-host7 sglang[7]: "),
    "journal, since boot": before("[ 1000.123456] gpu-host7 sglang[7]: "),
    "journal, JSON": in_json(
        __REALTIME_TIMESTAMP="1796122800123456", _PID="7", SYSLOG_IDENTIFIER="sglang", MESSAGE="TEXT"
    ),
    "docker, with times": before("2026-11-29T11:00:00.123456789Z "),
    "docker, its file": in_json(log="TEXT\n", stream="stderr", time="2026-11-29T11:00:00.123456789Z"),
    "compose": before("sglang-1  | "),
    "compose, with times": before("sglang-1  | 2026-11-29T11:00:00.123456789Z "),
    "kubernetes": before("2026-11-29T11:00:00.123456789+02:00 stderr F "),
    "syslog": before("<30>1 2026-11-29T11:00:00.123Z gpu-host7 sglang 4711 - - "),
    "byte order mark": lambda text: "\ufeff" + text,
    "a line of megabytes before": lambda text: "x" * (3 << 20) + "\n" + text,
    "no end of line": lambda text: text.rstrip("\n"),
}


@pytest.mark.parametrize("how", FORMS)
def test_b17_in_every_form(how: str) -> None:
    log = server(FORMS[how](B17))
    run = log.current
    assert run is not None
    assert log.starts == 1
    assert [(load.model, load.seconds, load.quant, load.available) for load in run.loads] == [
        ("KimiK25ForConditionalGeneration", 251.0, "compressed-tensors", 24.1),
        ("LlamaForCausalLMEagle3", 6.9, "", 22.9),
    ]
    assert run.ready is not None
    assert run.decode.accept_length == 1.03
    assert run.decode.speed == 31.2
    watchdog = run.note("watchdog")
    assert watchdog is not None
    assert watchdog.groups == ("Scheduler", "300")
    assert run.health_good is not None
    shift = 1 if how == "a line of megabytes before" else 0
    assert watchdog.first.line == 7 + shift
    assert "[10:31:10 TP3] Scheduler watchdog timeout (self.watchdog_timeout=300)" in watchdog.first.text
    assert run.leader == ""


TWO_RANKS = """\
[2026-05-03 22:41:07] server_args=ServerArgs(tp_size=2)
[2026-05-03 22:41:25 {0}] Load weight begin. avail mem=93.96 GB
[2026-05-03 22:41:25 {1}] Load weight begin. avail mem=93.96 GB
[2026-05-03 22:48:05 {0}] Load weight end. elapsed=399.81 s, type=KimiK25ForConditionalGeneration, avail mem=24.61 GB
[2026-05-03 22:48:05 {1}] Load weight end. elapsed=399.90 s, type=KimiK25ForConditionalGeneration, avail mem=24.61 GB
[2026-05-03 22:48:30 {0}] Capture cuda graph begin. This can take up to several minutes. avail mem=9.31 GB
[2026-05-03 22:48:30 {1}] Capture cuda graph begin. This can take up to several minutes. avail mem=9.31 GB
[2026-05-03 22:49:00 {0}] Capture cuda graph end. Time elapsed: 30.11 s.
[2026-05-03 22:49:00 {1}] Capture cuda graph end. Time elapsed: 30.15 s.
[2026-05-03 22:49:17] The server is fired up and ready to roll!
"""


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize(
    "ranks",
    [("TP0", "TP1"), ("DP0 TP0 EP0", "DP1 TP0 EP0"), ("ATTN_CP0 MOE_DP0 TP0", "ATTN_CP0 MOE_DP1 TP1"), ("", "")],
)
def test_ranks_that_load_side_by_side_are_one_load(how: str, ranks: tuple[str, str]) -> None:
    run = server(FORMS[how](TWO_RANKS.format(*ranks).replace(" ]", "]"))).current
    assert run is not None
    assert [load.model for load in run.loads] == ["KimiK25ForConditionalGeneration"]
    assert [phase.name for phase in run.phases] == [
        "imports",
        "weights of KimiK25ForConditionalGeneration",
        "memory pools",
        "CUDA graphs",
        "warm-up",
    ]


def test_a_time_of_json_counts() -> None:
    first = json.dumps({"time": "2026-11-29T11:00:07.5Z", "log": "Load weight begin.\n"})
    last = json.dumps({"time": "2026-11-29T11:00:20.5Z", "log": "The server is fired up and ready to roll!\n"})
    run = server(f"{first}\n{last}\n").current
    assert run is not None
    assert (run.start_seconds, run.zone) == (13.0, True)


@pytest.mark.parametrize("line", ["{", '{"log": 5}', '{"a": "b"}', "[1]", '{"log": "x"', "{" * 9000])
def test_what_is_no_json_of_a_logger_is_a_line_like_any_other(line: str) -> None:
    log = server(f"{line}\n{line} CUDA out of memory\n")
    assert log.current is not None
    assert set(log.current.notes) == {"gpu-memory"}


def test_no_name_before_a_colon_is_taken_for_a_host() -> None:
    run = server("2026-11-29T11:00:00.123Z CUDA error: an illegal memory access was encountered\n").current
    assert run is not None
    assert set(run.notes) == {"cuda"}


def test_decode_lines_that_count_iterations() -> None:
    line = "[2026-11-29 10:00:00 TP0] Decode batch [4040], #running-req: 1, #token: 812, accept len: 2.50, accept rate: 0.50, cuda graph: True, gen throughput (token/s): 80.00, #queue-req: 0\n"
    run = server(line + line.replace("Decode", "Prefill") + line.replace("batch [", "batch of [")).current
    assert run is not None
    assert (run.decode.lines, run.decode.accept_length, run.decode.speed) == (1, 2.5, 80.0)


def test_b17_phases() -> None:
    run = server(B17).current
    assert run is not None
    assert [(phase.name, phase.seconds) for phase in run.phases] == [
        ("imports", 0.0),
        ("weights of KimiK25ForConditionalGeneration", 251.0),
        ("memory pools", 1.0),
        ("weights of LlamaForCausalLMEagle3", 7.0),
        ("warm-up", 140.0),
    ]
    assert run.start_seconds == 399.0


def test_a_log_without_dates_goes_over_midnight() -> None:
    log = server("[23:59:50] Load weight begin.\n[00:00:20] The server is fired up and ready to roll!\n")
    assert log.current is not None
    assert log.current.start_seconds == 30.0


def test_a_healthy_server_of_0_5_23() -> None:
    run = recorded("healthy")
    assert [load.model for load in run.loads] == ["KimiK25ForConditionalGeneration", "LlamaForCausalLMEagle3"]
    assert run.start_seconds == 30.0
    assert run.pool_tokens == 4096
    assert run.decode.lines == 12
    assert round(run.decode.accept_length or 0, 2) == 3.29
    assert run.clean
    assert run.errors == []
    assert set(run.notes) == {"asked"}


def test_a_scheduler_that_was_killed() -> None:
    run = recorded("killed")
    dead = run.note("dead")
    assert dead is not None
    assert dead.groups == ("scheduler_0", "-9")
    assert not run.clean
    assert run.ended is not None


def test_a_scheduler_that_was_stopped() -> None:
    run = recorded("stopped")
    assert run.note("health-failed") is not None
    assert run.health_bad is not None
    assert run.health_bad.count == 1
    assert run.health_good is None


def test_a_server_without_drafter_has_speed_but_no_acceptance() -> None:
    run = recorded("nodraft")
    assert run.decode.lines == 40
    assert run.decode.accept_length is None
    assert run.decode.speed is not None


@pytest.mark.parametrize(
    ("line", "kind", "groups"),
    [
        # SGLang, from the sources of 0.5.9 to 0.5.23
        ("[10:00:00 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "watchdog", None),
        ("Detokenizer watchdog timeout (self.watchdog_timeout=30.5, self.soft=True)", "watchdog-soft", None),
        ("Rank 3 scheduler is dead. Please check if there are relevant logs.", "dead", ("3",)),
        ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If", "dead", ("0", "-9")),
        ("Scheduler or DataParallelController 4242 terminated with -6", "dead", ("4242", "-6")),
        ("[10:00:00] Received sigquit from a child process. It usually means the child failed.", "quit", ()),
        ("[10:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):", "hit", ("Scheduler",)),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has", "gpu-memory", ()),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "kv-room", ()),
        ("Decode out of memory. Try to lower your batch size.", "kv-memory", ()),
        ("KV cache pool is full. Retract requests. #retracted_reqs: 1", "kv-memory", ()),
        ("ValueError: The memory capacity is unbalanced. Some GPUs may be occupied", "unbalanced", ()),
        ("OSError: [Errno 28] No space left on device: '/models/x'", "volume-full", ()),
        ("OSError: [Errno 98] Address already in use", "port", ()),
        ("[10:00:00] Health check failed. Server couldn't get a response from detokenizer", "health-failed", ()),
        ("Initialization failed. warmup error: Traceback (most recent call last):", "warmup-failed", ()),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "cuda", ()),
        ("Failed to initialize NVML: Driver/library version mismatch", "driver", ()),
        ("ImportError: /c/.cache/flashinfer/0.6/x.so: undefined symbol: _ZN3c10", "jit", ()),
        ("Custom allreduce is disabled because your platform lacks GPU P2P capability", "peer", ()),
        (
            "[rank3]:[E1129 10:00:00.1 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600010 milliseconds",
            "collective",
            ("ALLREDUCE",),
        ),
        # NCCL and systemd
        (
            "llm01:2200:2300 [3] NCCL WARN Error: failed to extend /dev/shm/nccl-Ab12Cd to 9637892 bytes, error: "
            "No space left on device (28)",
            "shm-full",
            (),
        ),
        ("sglang.service: Main process exited, code=killed, status=9/KILL", "exited", ("killed", "9/KILL")),
        ("sglang.service: Failed with result 'oom-kill'.", "failed", ("oom-kill",)),
        ("sglang.service: Scheduled restart job, restart counter is at 7.", "restart", ("7",)),
        ("2026-11-29T21:06:15+0000 h sglang[9]: no token was generated within 240 s", "start-timeout", ()),
        ("sglang.service: Start request repeated too quickly.", "gave-up", ()),
        ("sglang.service: Found left-over process 4711 (sglang::schedul) in control group", "left-behind", ("4711",)),
    ],
)
def test_each_kind_of_line_is_known(line: str, kind: str, groups: tuple[str, ...] | None) -> None:
    log = server(f"unrelated\n{line}\n")
    assert log.current is not None
    note = log.current.note(kind)
    assert note is not None
    assert note.first.line == 2
    if groups is not None:
        assert note.groups == groups


@pytest.mark.parametrize(
    "line",
    [
        "[10:00:00] server_args=ServerArgs(watchdog_timeout=300, api_key=None, error='No space left on device')",
        "[10:00:00] Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
        "OpenAIServingResponses init failed (ModuleNotFoundError: No module named 'openai_harmony')",
        "[10:00:00] Load weight begin. avail mem=94.80 GB",
        "[10:00:00] init_cpu_threads_env and shared memory based AllReduce is disabled, only intel amx",
        '[10:00:00] INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK',
        "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence this",
        "CustomAllreduce is disabled because this process group spans across nodes.",
        # what somebody asked
        "[10:00:00] Receive: obj=GenerateReqInput(rid='a', text='CUDA out of memory: Scheduler hit an exception')",
        "[10:00:00] Receive OpenAI: obj={'messages': [{'content': 'NCCL WARN, watchdog timeout (self.watchdog_timeout=3'}]}",
        "[10:00:00] Finish: obj=GenerateReqInput(rid='a', text='why'), out={'text': 'No space left on device'}",
        '{"timestamp": "2026-11-29T10:00:00", "event": "request.received", "obj": {"text": "CUDA out of memory"}}',
        '[10:00:00] {"timestamp": "2026-11-29T10:00:00", "event": "request.finished", "out": "bad_alloc: Errno 28"}',
    ],
)
def test_what_says_nothing_bad_is_not_noted(line: str) -> None:
    log = server(line + "\n")
    assert log.current is None or log.current.notes == {}
    assert log.current is None or log.current.errors == []


def test_no_space_in_shared_memory_is_no_full_volume() -> None:
    log = server("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'\n")
    assert log.current is not None
    assert set(log.current.notes) == {"shm-full"}


def test_restarts_are_runs_of_their_own() -> None:
    one = (
        "2026-11-29T10:0{0}:00.000000+0000 h systemd[1]: Starting sglang.service - SGLang server (h)...\n"
        "2026-11-29T10:0{0}:05.000000+0000 h sglang[1{0}]: [2026-11-29 10:0{0}:05] server_args=ServerArgs(port=1)\n"
        "2026-11-29T10:0{0}:06.000000+0000 h sglang[1{0}]: RuntimeError: shard is missing\n"
        "2026-11-29T10:0{0}:07.000000+0000 h systemd[1]: sglang.service: Main process exited, code=exited, status=1/FAILURE\n"
        "2026-11-29T10:0{0}:07.000000+0000 h systemd[1]: sglang.service: Failed with result 'exit-code'.\n"
        "2026-11-29T10:0{0}:09.000000+0000 h systemd[1]: sglang.service: Scheduled restart job, restart counter is at {0}.\n"
        "2026-11-29T10:0{0}:09.000000+0000 h systemd[1]: Stopped sglang.service - SGLang server (h).\n"
    )
    log = server("".join(one.format(number) for number in (1, 2, 3)), unit="sglang.service")
    assert log.starts == 3
    assert [run.cause[0] for run in log.runs if run.cause] == ["RuntimeError: shard is missing"] * 3
    assert [run.begin.line for run in log.runs if run.begin] == [1, 8, 15]
    assert not any(run.clean for run in log.runs)


def test_a_server_that_was_stopped_ended_cleanly() -> None:
    log = server(
        "2026-11-29T10:00:00+00:00 h systemd[1]: Stopping sglang.service - SGLang server (h)...\n"
        "2026-11-29T10:00:01+00:00 h sglang[1]: [2026-11-29 10:00:01] Gracefully exiting... Remaining number of requests 0.\n"
        "2026-11-29T10:00:04+00:00 h systemd[1]: sglang.service: Deactivated successfully.\n"
    )
    assert log.current is not None
    assert log.current.clean
    assert log.current.ended is not None


def test_of_interleaved_ranks_one_counts_for_the_phases() -> None:
    lines = ["[10:00:00] server_args=ServerArgs(tp_size=2)"]
    lines += [f"[10:00:10 {rank}] Load weight begin. avail mem=94.80 GB" for rank in ("TP1", "TP0")]
    lines += [
        f"[10:01:10 {rank}] Load weight end. elapsed=60.0 s, type=Target, avail mem=9.0 GB" for rank in ("TP0", "TP1")
    ]
    lines.append("[10:01:20] The server is fired up and ready to roll!")
    run = server("\n".join(lines)).current
    assert run is not None
    assert [(phase.name, phase.seconds) for phase in run.phases] == [
        ("imports", 10.0),
        ("weights of Target", 60.0),
        ("warm-up", 10.0),
    ]
    assert len(run.loads) == 1


@pytest.mark.parametrize(
    "pair",
    [
        (
            "Capture cuda graph begin. This can take up to several minutes.",
            "Capture cuda graph end. Time elapsed: 1 s.",
        ),
        ("Capture draft extend CUDA graph begin. step=1,", "Capture draft extend CUDA graph end. elapsed=1"),
        ("Capture target verify CUDA graph begin. backend=full,", "Capture target verify CUDA graph end. bs=[1]"),
        ("Capture cpu graph begin. This", "Capture cpu graph end. Time"),
    ],
)
def test_graphs_of_all_versions(pair: tuple[str, str]) -> None:
    run = server(f"[10:00:00] Load weight begin.\n[10:00:05] {pair[0]}\n[10:00:25] {pair[1]}\n").current
    assert run is not None
    assert [(phase.name, phase.seconds) for phase in run.phases][1:] == [("memory pools", 5.0), ("CUDA graphs", 20.0)]
    assert run.capturing is None
    assert server(f"[10:00:05] {pair[0]}\n").runs[0].capturing is not None


def test_acceptance_by_context() -> None:
    lines = [
        f"[10:00:00] Decode batch, #running-req: 2, #full token: {tokens}, full token usage: 0.1, accept len: {length}, x: 1"
        for tokens, length in ((2000, "3.0"), (2040, "2.0"), (64000, "1.2"))
    ]
    decode = server("\n".join(lines)).runs[0].decode
    assert {bucket: (count, total) for bucket, (count, total, _) in decode.by_context.items()} == {
        10: (2, 5.0),
        15: (1, 1.2),
    }
    assert decode.lowest is not None
    assert decode.lowest[0] == 1.2


def test_gaps_of_a_journal_are_no_notes_of_the_server() -> None:
    log = server("2026-11-29T10:00:00+0000 h systemd-journald[88]: Suppressed 4711 messages from sglang.service\n")
    assert log.gaps["suppressed"].groups == ("4711",)
    assert log.current is None or log.current.notes == {}


def test_long_logs_take_no_more_memory() -> None:
    line = (
        "[10:00:00] Decode batch, #running-req: 1, #token: 9, accept len: 2.00, gen throughput (token/s): 1.0, x: 1\n"
    )
    log = server((line + "RuntimeError: again\n" + B17) * 2000)
    assert log.starts > server_log.RUNS
    assert len(log.runs) == server_log.RUNS
    assert max(len(run.errors) for run in log.runs) <= 12


NCCL = """\
llm01:2200:2300 [{0}] NCCL INFO ncclCommInitRank comm 0x1 rank {0} nranks 2 cudaDev {0} commId 0x7 - Init START
llm01:2200:2300 [{0}] NCCL INFO NCCL version 2.27.5+cuda13.0
llm01:2200:2300 [{0}] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
llm01:2200:2300 [{0}] NCCL INFO ncclCommInitRank comm 0x1 rank {0} nranks 2 cudaDev {0} commId 0x7 - Init COMPLETE
"""


def test_nccl_initialised_and_silent() -> None:
    log = gpu_logs.NcclLog().read(io.BytesIO(b"".join(NCCL.format(rank).encode() for rank in (0, 1))))
    assert (len(log.complete), len(log.missing), log.size) == (2, 0, 2)
    assert {one.rank for one in log.ranks.values()} == {0, 1}
    assert sum(one.collectives for one in log.ranks.values()) == 0
    assert {name for one in log.ranks.values() for name in one.transports} == {b"P2P"}


def test_nccl_a_rank_that_does_not_get_there() -> None:
    text = NCCL.format(0) + NCCL.format(1).splitlines()[0] + "\n"
    log = gpu_logs.NcclLog().read(io.BytesIO(text.encode()))
    assert [one.rank for one in log.missing] == [1]


def test_nccl_of_several_files_and_with_times() -> None:
    log = gpu_logs.NcclLog()
    for rank in (0, 1):
        text = "".join(f"[2026-11-29 10:00:00] {line}\n" for line in NCCL.format(rank).splitlines())
        log.read(io.BytesIO(text.encode()), f"nccl/{rank}.log")
    warning = "[2026-11-29 10:00:09] llm01:2200:2300 [1] misc/shmutils.cc:87 NCCL WARN Error: failed to extend {} to 9 bytes\n"
    log.read(io.BytesIO(warning.format("/tmp/x").encode()), "nccl/1.log")  # noqa: S108 - a text
    assert len(log.complete) == 2
    assert log.warnings[0][1].file == "nccl/1.log"
    op = "llm01:2200:2300 [1] NCCL INFO AllReduce: opCount 1a sendbuff 0x1 recvbuff 0x2 count 9\n"
    log.read(io.BytesIO(op.encode()))
    assert sum(one.collectives for one in log.ranks.values()) == 1


def test_nccl_b15() -> None:
    line = (
        "llm01:2200:2300 [3] NCCL WARN Error: failed to extend /dev/shm/nccl-Ab12Cd to 9637892 bytes, error: "
        "No space left on device (28)\n"
    )
    log = gpu_logs.NcclLog().read(io.BytesIO(line.encode()))
    assert set(log.notes) == {"shm-full"}


def test_nccl_a_name_of_garbage() -> None:
    line = (
        "llm01:1:2 [0] NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-\x01\x7f (size 0), "
        "error: No such file or directory (2)\n"
    )
    log = gpu_logs.NcclLog().read(io.BytesIO(line.encode()))
    assert set(log.notes) == {"shm-name"}


def test_kernel_messages_b13() -> None:
    text = (
        "[ 812.1] NVRM: Xid (PCI:0000:a1:00): 62, 00000000 00000000 (GSP halt)\n"
        "[ 812.4] NVRM: Xid (PCI:0000:a1:00): 154, GPU recovery action changed to GPU Reset Required\n"
        "[ 900.0] NVRM: Xid (PCI:0000:21:00): 31, pid=4242, name=sglang::schedul\n"
        "2026-11-29T10:00:00.000000+0000 h kernel: NVRM: API mismatch: client 580.105.08, module 580.95.05\n"
        "[ 901.0] Out of memory: Killed process 4242 (python) total-vm:1kB\n"
    )
    log = gpu_logs.KernelLog().read(io.BytesIO(text.encode()))
    assert [(xid.device, xid.number, xid.klass) for xid in log.xids] == [
        ("0000:a1:00", 62, "fatal"),
        ("0000:a1:00", 154, "fatal"),
        ("0000:21:00", 31, "application"),
    ]
    assert set(log.notes) == {"driver", "host-memory"}


def test_kernel_messages_of_one_card_are_kept_by_their_first_and_last() -> None:
    line = "[ 9.0] NVRM: Xid (PCI:0000:{0:02x}:00): 13, x\n"
    log = gpu_logs.KernelLog().read(io.BytesIO("".join(line.format(card) * 300 for card in (1, 2)).encode()))
    assert [(xid.device, xid.evidence.line) for xid in log.xids] == [
        ("0000:01:00", 1),
        ("0000:01:00", 300),
        ("0000:02:00", 301),
        ("0000:02:00", 600),
    ]
    flood = "".join(f"[ 9.0] NVRM: Xid (PCI:{card:04x}:00:00): 13, x\n" for card in range(5000))
    assert len(gpu_logs.KernelLog().read(io.BytesIO(flood.encode())).xids) == 200
