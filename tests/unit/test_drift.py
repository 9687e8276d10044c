"""What runs against what was meant: every difference is named, and equal things are silent."""

import pytest

from pivot.serving import drift, launch

ARGV = ["/opt/r/bin/python", "-m", "sglang.launch_server", "--config", "/etc/sglang/launch.yaml"]
WANTED = {
    "files": {"/etc/sglang/launch.yaml": "aa"},
    "argv": ARGV,
    "environment": {"NCCL_DEBUG": "WARN"},
    "settings": {
        "model-path": "/models/a b/50%/$HOME",
        "api-key": "made-up-key",
        "tp-size": 8,
        "mem-fraction-static": 0.85,
        "context-length": "128k",
        "trust-remote-code": True,
        "gc-threshold": [700, 10],
        "model-loader-extra-config": {"num_threads": 16, "enable_multithread_load": True},
        "watchdog-timeout": 1200,
    },
}
LINE = (
    "--model-path /models/a b/50%/$HOME --api-key made-up-key --tp-size 8 --mem-fraction-static 0.85 "
    "--context-length 128k --trust-remote-code --gc-threshold 700 10 "
    '--model-loader-extra-config {"enable_multithread_load": true, "num_threads": 16} --watchdog-timeout 1200'
)
INFO = {
    "model_path": "/models/a b/50%/$HOME",
    "api_key": "made-up-key",
    "tp_size": 8,
    "mem_fraction_static": 0.85,
    "context_length": 128000,
    "trust_remote_code": True,
    "gc_threshold": [700, 10],
    "model_loader_extra_config": '{"enable_multithread_load": true, "num_threads": 16}',
    "watchdog_timeout": 1200.0,
    "launch_command": LINE,
    "something_else": None,
}


def running(drop_ins=(), **changes):
    process = {"argv": ARGV, "environment": {"NCCL_DEBUG": "WARN"}, "started": WANTED["files"]}
    return {"running": {**process, **changes}, "drop_ins": list(drop_ins)}


def found(state=None, info=None, wanted=None):
    return [
        f"{finding.code} {finding.severity}: {finding.message}"
        for finding in drift.check("llm01", wanted or WANTED, state or running(), INFO if info is None else info)
    ]


# --- whether a restart is due


def test_a_server_that_is_as_wanted_needs_no_restart():
    assert drift.restart_reasons(WANTED, running()) == []
    assert drift.restart_reasons(WANTED, {"running": None}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"argv": ["/opt/old/bin/python", *ARGV[1:]]}, "command line begins with /opt/old/bin/python -m"),
        ({"argv": [*ARGV, "--tp-size", "4"]}, "--tp-size is on its command line and in no inventory"),
        ({"argv": ARGV[:-2]}, "--config is missing on its command line"),
        ({"argv": [*ARGV[:-1], "/b.yaml"]}, "--config is ['/b.yaml'], not ['/etc/sglang/launch.yaml'] on its command"),
        ({"environment": {"NCCL_DEBUG": "TRACE"}}, "NCCL_DEBUG is 'TRACE' in its environment, not 'WARN'"),
        ({"environment": {"NCCL_DEBUG": "WARN "}}, "NCCL_DEBUG is 'WARN ' in its environment, not 'WARN'"),
        ({"environment": {}}, "NCCL_DEBUG is None"),
        ({"started": {"/etc/sglang/launch.yaml": "bb"}}, "started with another /etc/sglang/launch.yaml"),
        ({"started": None}, "started with another"),
    ],
)
def test_field_case_b28_the_running_process_decides(changes, words):
    (reason,) = drift.restart_reasons(WANTED, running(**changes))
    assert words in reason


def test_arguments_appended_by_a_drop_in_are_not_a_difference():
    more = [*ARGV, "--disable-cuda-graph"]
    assert drift.restart_reasons(WANTED, running(argv=more))
    assert drift.restart_reasons(WANTED, running(["50-pivot-probe.conf"], argv=more)) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*ARGV[:-2], "--config=/etc/sglang/launch.yaml"], "the wanted flags in another order or spelling"),
        ([*ARGV[:-2], "--config=/b.yaml"], "--config is ['/b.yaml'], not ['/etc/sglang/launch.yaml'] on its command"),
        ([*ARGV, "--tp-size=4"], "--tp-size is on its command line and in no inventory"),
        ([*ARGV, "--api-key=made-up-running"], "--api-key is on its command line and in no inventory"),
    ],
)
def test_a_flag_with_an_equals_sign_is_that_flag(argv, words):
    (reason,) = drift.restart_reasons(WANTED, running(argv=argv))
    assert words in reason
    assert "made-up" not in reason


def test_a_secret_behind_an_equals_sign_of_the_running_server_is_not_shown():
    said = found(info={**INFO, "launch_command": f"{LINE} --admin-api-key=made-up-running"})
    assert said[0] == "SERVER-EXTRA error: --admin-api-key of the running server is in no inventory"
    assert not [line for line in said if "made-up" in line]


def test_the_order_of_flags_is_a_difference():
    wanted = {**WANTED, "argv": [*ARGV, "--disable-cuda-graph", "--no-enable-tf32-matmul"]}
    (reason,) = drift.restart_reasons(wanted, running(argv=[*ARGV, "--no-enable-tf32-matmul", "--disable-cuda-graph"]))
    assert "in another order" in reason


def test_a_secret_is_never_in_a_reason():
    wanted = {**WANTED, "environment": {"HF_TOKEN": "made-up-wanted"}}
    (reason,) = drift.restart_reasons(wanted, running(environment={"HF_TOKEN": "made-up-running"}))
    assert "HF_TOKEN" in reason
    assert "made-up" not in reason


def test_a_secret_is_known_by_its_digest():
    wanted = {**WANTED, "environment": {"HF_TOKEN": "made-up-1", "https_proxy": "http://user:made-up-1@proxy:3128"}}
    hidden = {name: f"sha256:{launch.sha256(value)}" for name, value in wanted["environment"].items()}
    assert drift.restart_reasons(wanted, running(environment=hidden)) == []
    other = dict.fromkeys(hidden, f"sha256:{launch.sha256('made-up-2')}")
    reasons = drift.restart_reasons(wanted, running(environment=other))
    assert [reason.split(" ")[0] for reason in reasons] == ["HF_TOKEN", "https_proxy"]
    assert not [reason for reason in reasons if "made-up" in reason or "sha256" in reason]
    assert "not 'http://user:<redacted>@proxy:3128'" in reasons[1]


def test_a_restart_that_nobody_consented_to_names_its_reasons():
    (finding,) = drift.restart_findings("infer1", ["its port is 1", "its key is new"], allowed=False)
    assert finding.code == "SERVER-RESTART-NEEDED"
    assert finding.message.endswith("restarted: its port is 1; its key is new")
    assert drift.restart_findings("infer1", ["its port is 1"], allowed=True) == []
    assert drift.restart_findings("infer1", [], allowed=False) == []


# --- all differences


def test_equal_is_silent():
    assert found() == []
    assert drift.check("llm01", WANTED, running(), None) == []  # a server that was not asked


def test_no_process_is_one_finding():
    assert [line.split(":")[0] for line in found({"running": None})] == ["SERVER-DOWN error"]


def test_an_environment_file_that_was_edited_by_hand():
    state = running(
        environment={"NCCL_DEBUG": "TRACE"},
        started={"/etc/sglang/launch.yaml": "aa"},
        others=["NCCL_P2P_DISABLE"],
    )
    assert found(state) == [
        "SERVER-DRIFT error: NCCL_DEBUG is 'TRACE' in its environment, not 'WARN'",
        "SERVER-EXTRA error: NCCL_P2P_DISABLE of its environment is in no inventory",
    ]


def test_a_launch_file_that_was_edited_by_hand():
    state = running(started={"/etc/sglang/launch.yaml": "bb"})
    info = {**INFO, "tp_size": 4, "launch_command": LINE.replace("size 8", "size 4") + " --enable-torch-compile"}
    assert found(state, info) == [
        "SERVER-DRIFT error: it was started with another /etc/sglang/launch.yaml",
        "SERVER-DRIFT error: tp-size is 4 in the running server, not 8",
        "SERVER-EXTRA error: --enable-torch-compile of the running server is in no inventory",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_size": 4}, "tp-size is 4 in the running server, not 8, though it was started with the wanted value"),
        ({"trust_remote_code": False}, "trust-remote-code is False"),
        ({"context_length": 131000}, "context-length is 131000 in the running server, not '128k'"),
        ({"gc_threshold": [700]}, "gc-threshold is [700]"),
        ({"model_loader_extra_config": "{}"}, "model-loader-extra-config is '{}'"),
        ({"watchdog_timeout": 300.0}, "watchdog-timeout is 300.0"),
        ({"model_path": "/models/a b/50%/root"}, "model-path is '/models/a b/50%/root'"),
    ],
)
def test_what_the_engine_changed_is_a_warning(changes, said):
    (line,) = found(info={**INFO, **changes})
    assert line.startswith("SERVER-ADJUSTED warning: ")
    assert said in line


def test_arguments_that_arrived_otherwise_are_a_fault_that_names_the_flag():
    (line,) = found(info={**INFO, "launch_command": LINE.replace("$HOME", "/root")})
    assert line == "SERVER-INEXACT error: SGLang read other arguments than were written: from --model-path on"


def test_the_probe_may_add_what_it_needs():
    state = running(["50-pivot-probe.conf"], argv=[*ARGV, "--disable-cuda-graph"], others=["SGLANG_PLUGINS"])
    assert found(state, {**INFO, "launch_command": LINE + " --disable-cuda-graph"}) == []
    site = running(["10-site.conf"], others=["SGLANG_PLUGINS"])
    assert [line.split(":")[0] for line in found(site)] == ["SERVER-EXTRA error"]


def test_another_key_is_named_and_not_shown():
    (line,) = found(info={**INFO, "api_key": "made-up-other"})
    assert "api-key is <redacted> in the running server, not <redacted>" in line


def test_the_merged_line_is_what_sglang_says():
    """Recorded from SGLang 0.5.23, whose --config reader writes the file's settings before the arguments."""
    settings = {"model-path": "/m", "served-model-name": 'kimi %h $HOME "q" \\ é', "trust-remote-code": True, "port": 1}
    argv = [*ARGV, "--no-enable-tf32-matmul", "--lora-paths", "a=b"]
    assert drift.merged_line(settings, argv) == (
        '--model-path /m --served-model-name kimi %h $HOME "q" \\ é --trust-remote-code --port 1 '
        "--no-enable-tf32-matmul --lora-paths a=b"
    )
    assert drift.merged_line(WANTED["settings"], ARGV) == LINE
    assert launch.argv("/p", "/c.yaml", {}) == ["/p", "-m", "sglang.launch_server", "--config", "/c.yaml"]
