"""Files that launch settings name: found in the settings, and judged by what a host says of them."""

import os
import pwd
import runpy
import tempfile
from pathlib import Path

import pytest
import yaml

from pivot.inventory import paths

ROOT = Path(__file__).parents[2]
STATE = runpy.run_path(str(ROOT / "roles/sglang_server/files/server_state.py"))
THERE = {"kind": "file", "readable": True}


def named(flags=None, environment=None):
    return [
        (item.where.split(".")[1], item.path, item.written)
        for item in paths.named(flags or {}, environment or {}, "/var/lib/s", {})
    ]


def found(flags=None, environment=None, seen=None, served=None):
    wanted = paths.named(flags or {}, environment or {}, "/var/lib/s", served or {})
    answers = {item.path: THERE for item in wanted} if seen is None else {item.path: seen for item in wanted}
    return [f"{item.code} {item.severity}: {item.message}" for item in paths.check("h", wanted, answers, "s")]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"chat-template": "/etc/sglang/chat.jinja"}, [("chat-template", "/etc/sglang/chat.jinja", False)]),
        ({"chat-template": "chat.jinja"}, [("chat-template", "/var/lib/s/chat.jinja", False)]),
        ({"chat-template": "llama-2"}, []),  # one that SGLang knows by name
        ({"tokenizer-path": "/models/t"}, [("tokenizer-path", "/models/t", False)]),
        ({"tokenizer-path": "org/name"}, []),
        ({"lora-paths": ["a=/l/a", "/l/b", "c=org/c"]}, [("lora-paths", "/l/a", False), ("lora-paths", "/l/b", False)]),
        ({"crash-dump-folder": "/var/log/x"}, [("crash-dump-folder", "/var/log/x", True)]),
        ({"fastapi-root-path": "/api", "uvicorn-access-log-exclude-prefixes": ["/metrics"]}, []),
        ({"tp-size": 8, "trust-remote-code": True, "model-loader-extra-config": {"a": "/b"}}, []),
    ],
)
def test_paths_of_flags(flags, expected):
    assert named(flags) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NCCL_GRAPH_FILE": "/etc/sglang/graph.xml"}, [("NCCL_GRAPH_FILE", "/etc/sglang/graph.xml", False)]),
        ({"NCCL_TOPO_FILE": "topo.xml"}, [("NCCL_TOPO_FILE", "/var/lib/s/topo.xml", False)]),
        ({"NCCL_TUNER_PLUGIN": "/opt/t.so"}, [("NCCL_TUNER_PLUGIN", "/opt/t.so", False)]),
        ({"NCCL_NET_PLUGIN": "aws-ofi"}, []),
        ({"LD_PRELOAD": "/a.so:/b.so"}, [("LD_PRELOAD", "/a.so", False), ("LD_PRELOAD", "/b.so", False)]),
        ({"NCCL_DEBUG_FILE": "/var/log/n.%h.%p"}, [("NCCL_DEBUG_FILE", "/var/log/n.%h.%p", True)]),
        ({"NCCL_TOPO_DUMP_FILE": "/t.xml"}, [("NCCL_TOPO_DUMP_FILE", "/t.xml", True)]),
        ({"SGLANG_TORCH_PROFILER_DIR": "/prof"}, [("SGLANG_TORCH_PROFILER_DIR", "/prof", True)]),
        ({"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "8", "NCCL_GRAPH_FILE": None, 1: "/x"}, []),
    ],
)
def test_paths_of_variables(environment, expected):
    assert named({}, environment) == expected


def test_what_is_there_and_readable_is_silent():
    assert found({"chat-template": "/etc/sglang/chat.jinja"}, {"NCCL_GRAPH_FILE": "/etc/sglang/graph.xml"}) == []
    assert found({"crash-dump-folder": "/var/lib/s/crash"}, {"NCCL_DEBUG_FILE": "/run/s/n.%p"}) == []


MISSING, CLOSED = {"kind": "missing", "readable": False}, {"kind": "file", "readable": False}
CHAT = "LAUNCH-FILE error: sglang_server_launch.chat-template names"


@pytest.mark.parametrize(
    ("flags", "seen", "said"),
    [
        ({"chat-template": "/etc/c.jinja"}, MISSING, f"{CHAT} /etc/c.jinja, which is not there in the container"),
        ({"chat-template": "/etc/c.jinja"}, CLOSED, f"{CHAT} /etc/c.jinja, which the service's user cannot read"),
        (
            {"chat-template": "/root/c.jinja"},
            THERE,
            f"{CHAT} /root/c.jinja, which the unit's sandbox hides from the service",
        ),
        (
            {"chat-template": "/a/../home/c.jinja"},
            THERE,
            f"{CHAT} /a/../home/c.jinja, which the unit's sandbox hides from",
        ),
    ],
)
def test_what_is_wrong_with_a_flag_is_named(flags, seen, said):
    (line,) = found(flags, seen=seen)
    assert line.startswith(said)


def test_what_is_wrong_with_a_variable_is_named():
    assert found({}, {"NCCL_GRAPH_FILE": "/etc/g.xml"}, MISSING) == [
        "LAUNCH-FILE error: sglang_server_environment.NCCL_GRAPH_FILE names /etc/g.xml, "
        "which is not there in the container"
    ]
    assert found({}, {"NCCL_DEBUG_FILE": "/var/log/n.%p"}, THERE) == [
        "LAUNCH-WRITE warning: sglang_server_environment.NCCL_DEBUG_FILE would have /var/log/n.%p written, "
        "which the unit's sandbox keeps read-only"
    ]


def test_what_the_sandbox_does_is_known_beforehand():
    flags = {"chat-template": "/root/c.jinja", "tokenizer-path": "/models/t", "crash-dump-folder": "/var/log/x"}
    assert [item.code for item in paths.beforehand("h", flags, {}, {"sglang_server_name": "s"})] == [
        "LAUNCH-FILE",
        "LAUNCH-WRITE",
    ]
    assert paths.beforehand("h", {"crash-dump-folder": "/var/lib/s/x"}, {}, {"sglang_server_name": "s"}) == []


SERVED = {
    "sglang_server_model_path": "/models/t",
    "sglang_server_drafter_path": None,
    "sglang_server_python": "/opt/sglang/current/bin/python",
}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("sglang_server_model_path", "/root/models/t"),
        ("sglang_server_drafter_path", "/tmp/d"),  # noqa: S108
        ("sglang_server_python", "/home/me/sglang/bin/python"),
    ],
)
def test_what_is_served_has_to_be_where_the_service_sees_it(name, place):
    (line,) = found(served={**SERVED, name: place})
    assert line == f"LAUNCH-FILE error: {name} names {place}, which the unit's sandbox hides from the service"
    (finding,) = paths.beforehand("h", {}, {}, {**SERVED, name: place})
    assert finding.fix == "put it elsewhere, for example below /models or /opt, and name it there"


def test_what_is_served_is_looked_for_elsewhere_but_has_to_be_readable():
    assert found(served=SERVED) == []
    assert found(served=SERVED, seen=MISSING) == []  # the role says which playbook brings it; in check mode none has
    assert [line.split(",")[1] for line in found(served=SERVED, seen=CLOSED)] == [
        " which the service's user cannot read"
    ] * 2


def test_before_the_user_exists_nothing_is_said_of_reading():
    assert found({"chat-template": "/etc/c.jinja"}, seen={"kind": "file", "readable": None}) == []


def test_a_host_says_what_is_there(tmp_path):
    seen = STATE["seen"]
    file = tmp_path / "a.xml"
    file.write_text("x")
    assert seen(str(tmp_path / "none"), "root")["kind"] == "missing"
    assert seen(str(file), "no-such-user-here") == {"kind": "file", "readable": None}
    assert seen(str(tmp_path), "root")["kind"] == "directory"


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_whether_a_user_may_read_is_asked_of_the_kernel():
    seen, user = STATE["seen"], "nobody"
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories let nobody pass
        place = Path(name)
        file = place / "a.json"
        file.write_text("{}")
        place.chmod(0o755)
        file.chmod(0o640)
        assert seen(str(file), user) == {"kind": "file", "readable": False}
        assert seen(str(file), user, ["root"])["readable"]  # a group that the unit gives
        assert seen(str(file), user, ["no-such-group-here"])["readable"] is None
        file.chmod(0o604)
        assert seen(str(file), user)["readable"]
        assert not seen(str(file), user, ["root"])["readable"]  # the group's bits count, not those of others
        place.chmod(0o700)
        assert not seen(str(file), user)["readable"]
        assert not seen(name, user)["readable"]
        os.chown(place, pwd.getpwnam(user).pw_uid, 0)
        assert seen(name, user) == {"kind": "directory", "readable": True}


def test_what_the_firewall_calls():
    nft = yaml.safe_load((ROOT / "roles/sglang_server/vars/main.yml").read_text())["__sglang_server_nft"]
    assert paths.check("h", [paths.Named(**nft)], {"/usr/sbin/nft": THERE}, "s") == []
    (finding,) = paths.check("h", [paths.Named(**nft)], {"/usr/sbin/nft": {"kind": "missing", "readable": False}}, "s")
    assert finding.message == "sglang_server_firewall needs /usr/sbin/nft, which is not there in the container"
    assert finding.fix == "apt-get install nftables there, or set sglang_server_firewall: false"
