"""What `inspect_server.py` reads on a host: code, headers, configs, units, processes; bounded, and without secrets."""

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pivot.findings import Severity
from pivot.program import program
from pivot.serving import inspect

from .test_inspect import CONTRACT, MASK, MODELS, SCRIPT, codes, found_on_host, host_side, tensors


def test_a_host_says_where_its_code_comes_from(tmp_path: Path) -> None:
    site = tmp_path / "v/lib/python3.11/site-packages"
    record = site / "sglang-0.5.23.dist-info"
    record.mkdir(parents=True)
    (record / "direct_url.json").write_text('{"url": "file:///opt/my%20sglang", "dir_info": {"editable": true}}')
    other = site / "flashinfer_python-0.6.8.dist-info"
    other.mkdir()
    (other / "direct_url.json").write_text('{"url": "file:///opt/flashinfer", "dir_info": {"editable": true}}')
    (site / "stray.pth").write_text("import os\n# /no\n/opt/patches\n")
    (tmp_path / "w/sglang").mkdir(parents=True)
    (tmp_path / "w/sglang/__init__.py").write_text("")
    paths = host_side.Paths(0, {"PYTHONPATH": f"relative:{tmp_path}/extra"})
    paths.base = str(tmp_path / "w")
    found = host_side.engine(str(tmp_path / "v/bin/python"), paths)
    assert [(item["version"], item["editable"]) for item in found["installs"]] == [("0.5.23", "/opt/my sglang")]
    assert found["paths"] == [
        [f"{tmp_path}/extra", "PYTHONPATH"],
        ["/opt/flashinfer", "editable installation of flashinfer_python"],
        ["import os", str(site / "stray.pth")],
        ["/opt/patches", str(site / "stray.pth")],
        [str(tmp_path / "w/sglang"), "the working directory"],
    ]


def test_a_changed_byte_of_the_engine_is_named(tmp_path: Path) -> None:
    site = tmp_path / "v/lib/python3.11/site-packages"
    (site / "sglang-0.5.23.dist-info").mkdir(parents=True)
    (site / "sglang/srt").mkdir(parents=True)
    (site / "sglang/srt/a.py").write_text("a = 1\n")
    digest = "y3i9ihf3t1H-DUZjNm3LwlcgQDPvfd1ksfKWlXO1suI"  # of that: sha256, urlsafe base64
    row = f"sglang/srt/a.py,sha256={digest},6\n"
    (site / "sglang-0.5.23.dist-info/RECORD").write_text(row)
    paths = host_side.Paths(0, {})
    assert host_side.engine(str(tmp_path / "v/bin/python"), paths)["installs"][0]["altered"] == []
    (site / "sglang/srt/a.py").write_text("a = 2\n")
    altered = host_side.engine(str(tmp_path / "v/bin/python"), paths)["installs"][0]["altered"]
    assert altered == [["sglang/srt/a.py", "changed"]]
    (site / "sglang-0.5.23.dist-info/RECORD").write_text('"' + row * 10_000)
    altered = host_side.engine(str(tmp_path / "v/bin/python"), paths)["installs"][0]["altered"]
    assert altered == [["sglang-0.5.23.dist-info/RECORD", "unreadable"]]


def test_changed_files_of_an_editable_installation_are_counted(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *who, "-C", str(tmp_path / "s"), *words], check=True, capture_output=True)

    (tmp_path / "s").mkdir()
    (tmp_path / "s/a.py").write_text("a = 1\n")
    git("init")
    git("add", "a.py")
    git("commit", "-m", "x")
    (tmp_path / "s/a.py").write_text("a = 2\n")
    record = tmp_path / "sglang-1.dist-info"
    record.mkdir()
    (record / "direct_url.json").write_text(json.dumps({"url": f"file://{tmp_path}/s", "dir_info": {"editable": True}}))
    index = (tmp_path / "s/.git/index").read_bytes()
    assert host_side.source(str(record), host_side.Paths(0, {})) == {"editable": f"{tmp_path}/s", "changed": 1}
    assert (tmp_path / "s/.git/index").read_bytes() == index


def safetensors(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(**changes: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}
    return json.dumps({"__metadata__": {"format": "pt"}, "fc.weight": tensor}).encode()


def test_a_header_is_read(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "m.safetensors", entry(), bytes(24))
    assert host_side.header(path) == {"fc.weight": {"dtype": "F32", "shape": [2, 3]}}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (entry(), b"", None),  # truncated
        (entry(), bytes(30), None),
        (entry(shape=[2, 4]), bytes(24), None),
        (entry(shape=[-2, -3]), bytes(24), None),
        (entry(shape=[10**400]), bytes(24), None),
        (entry(shape=[True, 6]), bytes(24), None),
        (entry(shape="23"), bytes(24), None),
        (entry(dtype="F33"), bytes(24), None),
        (entry(dtype=["F32"]), bytes(24), None),
        (entry(data_offsets=[0]), bytes(24), None),
        (entry(data_offsets=[24, 0]), bytes(24), None),
        (b"[]", b"", None),
        (b"\xff\xfe", b"", None),
        (b"[" * 100000, b"", None),
        (entry(), bytes(24), 1 << 63),
        (entry(), bytes(24), 12),
        (b'{"a": 1}', b"", None),
    ],
)
def test_a_header_that_lies_is_refused_in_a_sentence(
    tmp_path: Path, header: bytes, data: bytes, length: int | None
) -> None:
    path = safetensors(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(host_side.Failed):
        host_side.header(path)


def test_a_damaged_header_is_a_header_or_a_sentence(tmp_path: Path) -> None:
    rng = random.Random(20261130)  # noqa: S311 - the same in every run
    whole = safetensors(tmp_path / "m.safetensors", entry(), bytes(24)).read_bytes()
    path, refused = tmp_path / "any.safetensors", 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.choice([*b'0123456789{}[]",:x-', 0, 255])
        path.write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
        try:
            assert isinstance(host_side.header(path), dict)
        except host_side.Failed as failed:
            refused += 1
            assert len(str(failed)) < 300
    assert refused > 300


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 1 << 33))
        stream.truncate(1 << 34)  # sparse
    with pytest.raises(host_side.Failed, match="more than 4 MiB"):
        host_side.header(path)


def test_configs_that_cannot_be_used_are_problems(tmp_path: Path) -> None:
    look = host_side.Look()
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop/config.json").symlink_to("config.json")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/config.json")
    contents = {"broken": b'{"a": ', "latin": '{"a": "é"}'.encode("latin-1"), "deep": b"[" * 100000}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
    for name in ("loop", "pipe", "missing", *contents):
        assert host_side.config_of(str(tmp_path / name), name, look) is None
    assert [what for what, _ in look.problems] == ["loop", "pipe", "missing", *contents]
    assert not any("Traceback" in sentence for _, sentence in look.problems)


def test_numbers_and_nesting_without_end_are_told_bounded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": ' + "9" * 500_000 + ', "a": ' + "[" * 200 + "]" * 200 + "}")
    told = host_side.config_of(str(tmp_path), "x", host_side.Look())
    assert told["hidden_size"] == "a number of 500000 digits"
    assert len(json.dumps(told)) < 500


def test_lone_surrogates_do_not_leave_the_host() -> None:
    json.dumps(host_side.Look().told({"\ud800": ["\udfff"]}), ensure_ascii=False).encode()


def test_links_in_another_root_are_followed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {
        "/proc/7/root/srv/current": "/opt/model",
        "/proc/7/root/opt/model/config.json": "../shared/./config.json",
        "/proc/7/root/out": "../../../../etc/shadow",
        "/proc/7/root/loop": "loop",
    }

    def readlink(path: str) -> str:
        if path not in links:
            raise FileNotFoundError(path)
        return links[path]

    monkeypatch.setattr(host_side.os, "readlink", readlink)
    assert host_side.inside("/proc/7/root/srv/current/config.json") == "/proc/7/root/opt/shared/config.json"
    assert host_side.inside("/proc/7/root/out") == "/proc/7/root/etc/shadow"
    assert host_side.inside("/proc/7/root/loop") == "/proc/7/root/loop"
    assert host_side.inside("/srv/current") == "/srv/current"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python3", "-m", "sglang.launch_server", "--model-path", "x"], True),
        (["/v/bin/python", "/v/bin/sglang", "serve", "--model-path", "x"], True),
        (["sglang", "serve", "--model-path", "x"], True),
        (["grep", "sglang.launch_server", "log"], False),
        (["vim", "/etc/sglang", "serve"], False),
        (["sglang::scheduler"], False),
        ([], False),
    ],
)
def test_which_command_lines_serve(argv: list[str], expected: bool) -> None:
    assert host_side.serves(argv) is expected


def test_the_first_level_of_a_config_file() -> None:
    text = "# x\n\"api-key\": 'it''s'\nmodel-path: /a b # c\nhost: \"::1\" # d\nport:\n  nested: 1\n"
    found = host_side.top_level(text)
    assert found["model-path"] == "/a b"
    assert found["host"] == "::1"
    assert found["port"] == ""


def test_a_repository_is_found_in_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "hub/models--org--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("abc123\n")
    paths = host_side.Paths(0, {"HF_HOME": str(tmp_path)})
    assert paths.model("org/name") == f"{cache}/snapshots/abc123"
    assert paths.model("org/name", "def456") == f"{cache}/snapshots/def456"
    assert paths.model("/srv/x") == "/srv/x"


@pytest.mark.parametrize(
    ("found", "units", "expected"),
    [
        ([70], {70: "chat.service"}, (70, "chat.service")),  # another unit
        ([70], {}, (70, "")),  # of no unit
        ([70, 80], {80: "sglang.service"}, (80, "sglang.service")),  # the asked-for one of two
    ],
)
def test_which_server_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, found: list[int], units: dict[int, str], expected: tuple[int, str]
) -> None:
    monkeypatch.setattr(host_side, "servers", lambda: found)
    monkeypatch.setattr(host_side, "unit_of", lambda pid: units.get(pid, ""))
    monkeypatch.setattr(host_side, "show", lambda unit: {"LoadState": "not-found"})
    look = host_side.Look()
    assert host_side.choose({"unit": "sglang.service", "pid": 0}, look) == expected
    assert [what for what, _ in look.problems] == ["several"] * (len(found) - 1)


def test_a_named_unit_that_does_not_serve_while_another_does_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_side, "servers", lambda: [70])
    monkeypatch.setattr(host_side, "unit_of", lambda pid: "chat.service")
    monkeypatch.setattr(host_side, "show", lambda unit: {"LoadState": "loaded"})
    look = host_side.Look()
    assert host_side.choose({"unit": "sglang.service", "pid": 0}, look) == (70, "chat.service")
    host = {**found_on_host(), "problems": look.problems}
    assert codes(host) == {"INSPECT-OTHER": "warning"}


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/system.slice/chat.service\n", "chat.service"),
        ("1:name=systemd:/system.slice/a.service/b.service\n", "b.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/tmux-spawn-1.scope\n", ""),
        ("0::/system.slice/docker-0123.scope\n", ""),
    ],
)
def test_the_unit_of_a_process(monkeypatch: pytest.MonkeyPatch, cgroup: str, expected: str) -> None:
    monkeypatch.setattr(host_side, "read", lambda path, limit, whole: cgroup.encode())
    assert host_side.unit_of(1) == expected


def test_too_many_tensors_are_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_side, "MOST_TENSORS", 3)
    for name in "abcd":
        safetensors(tmp_path / f"{name}.safetensors", entry(), bytes(24))
    look = host_side.Look()
    assert host_side.tensors_of(str(tmp_path), look) is None
    assert "d.safetensors and those before it" in look.problems[0][1]
    (tmp_path / "d.safetensors").unlink()
    assert host_side.tensors_of(str(tmp_path), look) is not None


def test_a_unit_that_is_not_running_is_read_and_its_absence_said(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "{ path=/v/python ; argv[]=/v/python -m sglang.launch_server --port 1 ; ignore_errors=no ; pid=0 }"
    facts = {"LoadState": "loaded", "ExecStart": command, "Environment": 'A=1 "B=x y"'}
    monkeypatch.setattr(host_side, "servers", list)
    monkeypatch.setattr(host_side, "show", lambda unit: facts)
    given = {"unit": "sglang.service", "pid": 0}
    assert host_side.choose(given, host_side.Look()) == (0, "sglang.service")
    assert host_side.planned(facts) == (
        ["/v/python", "-m", "sglang.launch_server", "--port", "1"],
        ["A=1", "B=x y"],
    )
    monkeypatch.setattr(host_side, "show", lambda unit: {"LoadState": "not-found"})
    with pytest.raises(host_side.Failed, match="no SGLang server runs here"):
        host_side.choose(given, host_side.Look())


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """A process that looks like a server started by hand, with the lab's models."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "launch.yaml").write_text(
        f"model-path: {MODELS}/target\nspeculative-draft-model-path: {MODELS}/drafter\n"
        "api-key: very-private-word\nhost: 127.0.0.1\nport: 1\n"
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-B",
            "-m",
            "sglang.launch_server",
            "--config",
            "launch.yaml",
            "--admin-api-key",
            "for-admins",
        ],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HF_TOKEN": "hf-so-secret", "OMP_NUM_THREADS": "1", "OTHER": "left out"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout and process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def look_at(pid: int, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    asked = json.dumps({"unit": "sglang.service", "pid": pid})
    script = program(SCRIPT)
    command = [python, "-I", "-B", "-", asked]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False, timeout=60)


def test_a_process_is_read_without_its_secrets(server: Any) -> None:
    done = look_at(server.pid)
    assert (done.returncode, done.stderr) == (0, "")
    for secret in ("very-private-word", "for-admins", "hf-so-secret", "left out"):
        assert secret not in done.stdout
    found = json.loads(done.stdout)
    assert found["environment"] == {"HF_TOKEN": MASK, "OMP_NUM_THREADS": "1"}
    assert found["argv"][-2:] == ["--admin-api-key", MASK]
    assert found["target"]["config"]["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert found["drafter"]["tensors"] == tensors()
    assert [what for what, _ in found["problems"]] == ["server_info"]  # nothing listens on port 1
    answer = inspect.examine("h1", {**found, "engine": {**found["engine"], "version": "0.5.23"}}, CONTRACT)
    assert [item.code for item in answer.findings if item.severity is Severity.ERROR] == []
    assert answer.layers.endswith("agrees")


def test_a_process_that_is_gone_is_one_sentence() -> None:
    done = look_at(2**22 + 1)
    assert done.returncode == host_side.FAILED
    assert "server_inspect_pid" in json.loads(done.stdout)["failed"]
    assert done.stderr == ""
