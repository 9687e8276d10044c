"""The collector as it runs on a host, and what the controller makes of its files."""

import contextlib
import hashlib
import http.server
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pivot.bundles import bundle, bundle_table
from pivot.bundles.redact import MASK
from pivot.program import program

ROOT = Path(__file__).resolve().parents[2]
COLLECTOR = program(ROOT / "roles/log_bundle/files/collect")
KEY = "k3y-in-launch/yaml+x"


def request(tmp_path: Path, **options: Any) -> dict[str, Any]:
    """A collector's argument with hand-made rows instead of a whole host."""
    rows = bundle_table.table(
        unit="nosuch-pivot-test.service",
        config_paths=options.get("config_paths", []),
        probe_records=options.get("probe_records", []),
        listed_paths=options.get("listed_paths", []),
        log_limit=options.get("log_limit", bundle_table.MIB),
        **{name: options[name] for name in ("flight_records", "dumps", "copy_dumps", "nccl_logs") if name in options},
    )
    rows = [
        row
        for row in rows
        if row["name"] in options.get("names", ("config", "probe", "process", "unit.txt", "system/listing.txt"))
    ]
    return {
        "rows": rows,
        "unit": "nosuch-pivot-test.service",
        "total_limit": options.get("total_limit", 1 << 24),
        "directories": options.get("directories", [str(tmp_path)]),
        "owner": "me",
        "prompts": options.get("prompts", False),
    }


def collect(argument: dict[str, Any], *before: str) -> subprocess.CompletedProcess[str]:
    """Run the collector, behind other words of its command line."""
    argv = [*before, sys.executable, "-I", "-", json.dumps(argument)]
    return subprocess.run(argv, input=COLLECTOR, capture_output=True, text=True, check=False, timeout=60)


def answer(argument: dict[str, Any]) -> dict[str, Any]:
    done = collect(argument)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def entry(found: dict[str, Any], name: str) -> dict[str, Any]:
    (match,) = [item for item in found["entries"] if item["name"] == name]
    return dict(match)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    directory = tmp_path / "etc"
    directory.mkdir()
    (directory / "launch.yaml").write_text(f'host: 127.0.0.1\nport: 1\napi-key: "{KEY}"\n')
    (directory / "environment").write_text("HF_TOKEN=hf_EXAMPLEEXAMPLEEXAMPLE\nSGLANG_ENABLE_SPEC_V2=on\n")
    (directory / "state.pkl").write_bytes(b"\x80\x04\0binary")
    (directory / "weights").symlink_to("/models/x")
    return directory


def test_files_are_masked_on_the_host_and_kept_private(tmp_path: Path, config: Path) -> None:
    log = tmp_path / "probe.jsonl"
    log.write_text(f'{{"note": "the key {KEY} in passing"}}\n')
    found = answer(request(tmp_path, config_paths=[str(config)], probe_records=[str(log)]))
    staging = Path(found["staging"])
    assert staging.stat().st_mode & 0o777 == 0o700
    files = [path for path in staging.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert not [path for path in files if KEY in path.read_text() or "hf_EXAMPLE" in path.read_text()]
    assert (staging / f"probe{log}").read_text() == f'{{"note": "the key {MASK} in passing"}}\n'
    assert (staging / f"config{config}/environment").read_text() == f"HF_TOKEN={MASK}\nSGLANG_ENABLE_SPEC_V2=on\n"
    assert (staging / f"config{config}/weights.link").read_text() == "link to /models/x\n"
    assert entry(found, f"config{config}/state.pkl")["reason"] == "not copied: 9 bytes that are no text"
    launch = entry(found, f"config{config}/launch.yaml")
    raw = (staging / launch["name"]).read_bytes()
    assert (launch["sha256"], launch["bytes"], launch["masked"]) == (hashlib.sha256(raw).hexdigest(), len(raw), 1)


def test_weights_and_vocabularies_behind_links_are_not_read(tmp_path: Path, config: Path) -> None:
    weights, vocabulary = tmp_path / "model.safetensors", tmp_path / "tokenizer.json"
    with weights.open("wb") as file:
        file.truncate(1 << 30)
    vocabulary.write_text('{"vocab": {"Authorization": 18945}}')
    (config / "model.safetensors").symlink_to(weights)
    (config / "tokenizer.json").symlink_to(vocabulary)
    log = tmp_path / "probe.jsonl"
    log.write_text(f"max_total_num_tokens=18945, {KEY}\n")
    done = collect(
        request(tmp_path, config_paths=[str(config)], probe_records=[str(log)]), "prlimit", f"--as={1 << 29}"
    )
    assert done.returncode == 0, done.stderr
    staging = Path(json.loads(done.stdout)["staging"])
    assert (staging / f"probe{log}").read_text() == f"max_total_num_tokens=18945, {MASK}\n"


def test_a_long_file_of_the_configuration_is_learnt_from_by_its_beginning(tmp_path: Path, config: Path) -> None:
    with (config / "long.yaml").open("w") as file:
        file.write("admin-api-key: Zq9-made-up\n")
        file.truncate(1 << 30)
    log = tmp_path / "probe.jsonl"
    log.write_text("Zq9-made-up\n")
    argument = request(tmp_path, config_paths=[str(config)], probe_records=[str(log)], names=("config", "probe"))
    done = collect(argument, "prlimit", f"--as={1 << 29}")
    assert done.returncode == 0, done.stderr
    assert (Path(json.loads(done.stdout)["staging"]) / f"probe{log}").read_text() == f"{MASK}\n"


def test_a_server_that_ends_while_it_is_looked_at_does_not_end_the_run(tmp_path: Path, config: Path) -> None:
    gone = subprocess.Popen(["sleep", "0"])
    gone.wait()
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho MainPID={gone.pid}\necho LoadState=loaded\necho ActiveState=activating\n")
    systemctl.chmod(0o755)
    argument = request(tmp_path, config_paths=[str(config)])
    done = collect(argument, "env", f"PATH={tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert entry(found, "process")["reason"] == "the service's main process has just ended"
    assert entry(found, f"config{config}/launch.yaml")["masked"] == 1


def test_what_is_missing_has_its_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    found = answer(request(tmp_path, config_paths=["/nonexistent/pivot"]))
    assert entry(found, "config")["reason"] == "nothing there: /nonexistent/pivot"
    assert entry(found, "process")["reason"] == "the service is not running"
    assert entry(found, "probe")["reason"] == "nothing there: no path was given"


@pytest.mark.parametrize("code", ["utf-16-le", "utf-16-be"])
def test_letters_of_two_bytes_are_masked(tmp_path: Path, config: Path, code: str) -> None:
    log, marked = tmp_path / "probe.jsonl", tmp_path / "marked.jsonl"
    wide = f"the key {KEY} here\nand password=Zq9-made-up\n".encode(code)
    log.write_bytes(b"a line of ordinary letters\n" * 200 + wide)
    marked.write_bytes(b"\xff\xfe" + "密码".encode("utf-16-le") * 3000)
    found = answer(request(tmp_path, config_paths=[str(config)], probe_records=[str(log), str(marked)]))
    text = (Path(found["staging"]) / f"probe{log}").read_text().replace("\0", "")
    assert text.endswith(f"the key {MASK} here\nand password={MASK}\n")
    assert entry(found, f"probe{marked}")["reason"] == "not copied: 12002 bytes that are no text"


def test_a_long_file_keeps_its_beginning_and_end_with_a_mark(tmp_path: Path) -> None:
    log = tmp_path / "big.jsonl"
    log.write_text("".join(f"line {number:06d} password=pw{number:06d}\n" for number in range(20000)))
    found = answer(request(tmp_path, probe_records=[str(log)], log_limit=100_000))
    one = entry(found, f"probe{log}")
    text = (Path(found["staging"]) / one["name"]).read_text()
    assert one["truncated"]
    assert text.startswith("line 000000 ")
    assert text.endswith(f"line 019999 password={MASK}\n")
    assert text.count("[cut: ") == 1
    assert "bytes left out" in one["reason"]
    assert "pw0" not in text


def test_a_line_that_is_cut_leaves_no_part_of_a_secret(tmp_path: Path) -> None:
    log = tmp_path / "long.jsonl"
    log.write_text(
        "x " * 500 + "y" * (bundle_table.MIB - 1010) + " hf_EXAMPLEEXAMPLEEXAMPLE " + "z" * 1000 + "\nnext\n"
    )
    found = answer(request(tmp_path, probe_records=[str(log)], log_limit=4 * bundle_table.MIB))
    one = entry(found, f"probe{log}")
    text = (Path(found["staging"]) / one["name"]).read_text()
    assert one["truncated"]
    assert "hf_" not in text
    assert text.endswith("\nnext\n")


def test_the_total_limit_is_kept_and_said(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text("abc\n" * 20000)
    found = answer(request(tmp_path, probe_records=[str(tmp_path / "*.jsonl")], total_limit=170_000))
    size = sum(path.stat().st_size for path in Path(found["staging"]).rglob("*") if path.is_file())
    assert size < 175_000
    assert "total limit" in entry(found, f"probe{tmp_path}/3.jsonl")["reason"]


def test_cores_are_listed_never_copied(tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    crash.mkdir()
    with (crash / "core.7").open("wb") as core:
        core.truncate(91 << 30)
    found = answer(request(tmp_path, listed_paths=[str(crash)]))
    text = (Path(found["staging"]) / "system/listing.txt").read_text()
    assert text.split()[0] == str(91 << 30)
    assert text.endswith(f"{crash}/core.7\n")
    assert [item["name"] for item in found["entries"] if item["bytes"]] == ["system/listing.txt"]


def test_nowhere_to_write_is_one_sentence(tmp_path: Path) -> None:
    done = collect(request(tmp_path, directories=["/nonexistent/a"]))
    assert done.returncode == 1
    assert done.stderr == "there is no writable directory for the bundle among /nonexistent/a\n"


def test_a_run_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    argument = request(tmp_path)
    argument["rows"] = [{"name": "broken"}]
    assert collect(argument).returncode == 1
    assert not list(tmp_path.glob("pivot-bundle-*"))


def test_a_run_that_loses_its_connection_leaves_nothing_behind(tmp_path: Path) -> None:
    argument = request(tmp_path)
    argument["rows"] = [{**argument["rows"][0], "what": ["sleep", "30"]}]
    argv = [sys.executable, "-I", "-c", COLLECTOR, json.dumps(argument)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("pivot-bundle-*")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signal.SIGHUP)
        assert child.wait(timeout=30) == 1
    assert not list(tmp_path.glob("pivot-bundle-*"))


def test_staging_into_which_a_killed_run_still_writes_is_removed(tmp_path: Path) -> None:
    old = tmp_path / "pivot-bundle-me-old"
    old.mkdir()

    def write() -> None:
        with contextlib.suppress(FileNotFoundError):
            for number in itertools.count():
                (old / str(number)).touch()
                time.sleep(0.0002)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    found = answer(request(tmp_path))
    writer.join(10)
    assert not writer.is_alive()
    assert list(tmp_path.glob("pivot-bundle-*")) == [Path(found["staging"])]


def test_staging_of_a_dead_run_is_removed_and_a_fresh_one_kept(tmp_path: Path) -> None:
    old, fresh = tmp_path / "pivot-bundle-old", tmp_path / "pivot-bundle-fresh"
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (1, 1))
    answer(request(tmp_path))
    assert (old.exists(), fresh.exists()) == (False, True)


def test_what_an_interrupted_run_of_the_same_owner_left_is_removed(tmp_path: Path) -> None:
    left = Path(answer(request(tmp_path))["staging"])
    other = Path(answer({**request(tmp_path), "owner": "you"})["staging"])
    again = Path(answer(request(tmp_path))["staging"])
    assert (left.exists(), other.exists(), again.exists()) == (False, True, True)
    assert bundle.owner("/a/h") != bundle.owner("/b/h")


def test_a_node_gives_its_facts_and_what_it_knows_of_the_container(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    pct = bin_ / "pct"
    pct.write_text(
        '#!/bin/sh\n[ "$1 $2" = "config 101" ] && echo "memory: 6144" && echo "description: token=made-up-1"\n'
    )
    pct.chmod(0o755)
    facts = program(ROOT / "roles/proxmox_host/files/node_facts.py")
    asked = {**request(tmp_path), "unit": "", "rows": bundle_table.node_table("101", facts)}
    argv = [sys.executable, "-I", "-", json.dumps(asked)]
    env = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}
    done = subprocess.run(argv, input=COLLECTOR, capture_output=True, text=True, check=True, timeout=60, env=env)
    found = json.loads(done.stdout)
    staging = Path(found["staging"])
    assert json.loads((staging / "node/facts.json").read_text())["kernel"] == os.uname().release
    assert (staging / "node/container.conf").read_text() == f"memory: 6144\ndescription: token={MASK}\n"
    assert (staging / "node/proc/cmdline").read_text() == Path("/proc/cmdline").read_text()
    assert entry(found, "node/facts.json")["source"] == "node_facts.py"
    without = {**asked, "rows": bundle_table.node_table("102", "raise SystemExit('no facts')")}
    found = answer(without)
    assert entry(found, "node/facts.json")["reason"] == "node_facts.py ended with status 1: no facts"
    assert entry(found, "node/container.conf")["failed"]


def test_every_row_of_the_table_can_be_collected() -> None:
    rows = bundle_table.table(
        unit="u", config_paths=["/c"], probe_records=["/p"], listed_paths=["/l"], log_limit=1 << 20
    )
    text = (ROOT / "roles/log_bundle/files/collect/__main__.py").read_text()
    assert [row["kind"] for row in rows if f"def take_{row['kind']}(" not in text] == []
    assert {row["sensitivity"] for row in rows} == {"plain", "secrets", "prompts"}
    described = bundle_table.describe(rows, "/a")
    assert described.count("\n") == len(rows)
    assert "server.log" in described


def test_more_rows_come_from_the_inventory_and_are_checked() -> None:
    options: dict[str, Any] = {"unit": "u", "config_paths": [], "probe_records": [], "listed_paths": [], "log_limit": 9}
    extra = {"name": "mine", "kind": "files", "what": ["/x"]}
    (row,) = [row for row in bundle_table.table(**options, extra=[extra]) if row["name"] == "mine"]
    assert (row["limit"], row["sensitivity"], row["required"]) == (9, "secrets", False)
    for wrong, said in (
        ({**extra, "kind": "journal"}, "needs the kind files or command"),
        ({**extra, "what": "/x"}, "a list as what"),
        ({**extra, "name": "../x"}, "needs a relative name"),
        ({**extra, "limit": 3}, "has an unknown limit"),
        ({"name": "x", "kind": "files"}, "has no what"),
        ({**extra, "sensitivity": "none"}, "plain or secrets is right"),
    ):
        with pytest.raises(ValueError, match=said):
            bundle_table.table(**options, extra=[wrong])


def test_flight_records_come_as_json_and_can_run_nothing(tmp_path: Path) -> None:
    good, bad = tmp_path / "nccl_trace_rank_0", tmp_path / "nccl_trace_rank_1"
    good.write_bytes(pickle.dumps({"version": "2.9", "entries": [{"state": "started", "frames": ("a", 1)}]}))
    bad.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    found = answer(request(tmp_path, names=("flight",), flight_records=[str(tmp_path / "nccl_trace_rank_*")]))
    text = (Path(found["staging"]) / f"flight{good}.json").read_text()
    assert json.loads(text)["entries"][0]["state"] == "started"
    assert "no flight-recorder dump" in entry(found, f"flight{bad}.json")["reason"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("asked", [False, True])
def test_dumps_are_copied_only_when_asked_for(tmp_path: Path, asked: bool) -> None:
    crash = tmp_path / "crash"
    crash.mkdir()
    (crash / "req.pkl").write_bytes(b"\0prompts\0")
    with (crash / "huge.core").open("wb") as core:
        core.truncate(91 << 30)
    names = ("dumps", "system/listing.txt")
    found = answer(request(tmp_path, names=names, dumps=[str(crash)], copy_dumps=asked, listed_paths=[str(crash)]))
    listing = (Path(found["staging"]) / "system/listing.txt").read_text()
    assert "req.pkl" in listing
    copied = [item["name"] for item in found["entries"] if item["bytes"] and item["item"] == "dumps"]
    assert copied == ([f"dumps{crash}/req.pkl"] if asked else [])
    if asked:
        assert "are more than the limit" in entry(found, f"dumps{crash}/huge.core")["reason"]


def test_a_log_that_grows_is_taken_as_it_was(tmp_path: Path) -> None:
    log = tmp_path / "nccl.h.1"
    log.write_text("h:1:2 [0] NCCL INFO line\n" * 30000)
    size = log.stat().st_size
    with subprocess.Popen(["sh", "-c", 'while echo more; do :; done >>"$1"', "sh", str(log)]) as writer:
        try:
            found = answer(
                request(tmp_path, names=("nccl",), nccl_logs=[str(tmp_path / "nccl*")], log_limit=64 * bundle_table.MIB)
            )
        finally:
            writer.kill()
    one = entry(found, f"nccl{log}")
    taken = (Path(found["staging"]) / one["name"]).stat().st_size
    assert not one["truncated"]
    assert size <= taken <= log.stat().st_size


@pytest.mark.parametrize("kept", [False, True])
def test_texts_of_requests_are_left_out_unless_asked_for(tmp_path: Path, kept: bool) -> None:
    log = tmp_path / "a.jsonl"
    log.write_text("[10:00:00] Receive: obj=GenerateReqInput(text='my private story')\nnext\n")
    found = answer(request(tmp_path, names=("probe",), probe_records=[str(log)], prompts=kept))
    one = entry(found, f"probe{log}")
    assert ("private story" in (Path(found["staging"]) / one["name"]).read_text()) is kept
    assert one["masked_as"] == ({} if kept else {"text of a request": 1})


def test_the_limit_that_was_reached_is_named(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    log.write_text("abc\n" * 20000)
    argument = {
        **request(tmp_path, probe_records=[str(log)], total_limit=2000),
        "total_limit_is": "free space of log_bundle_dest",
    }
    assert entry(answer(argument), "probe" + str(log))["reason"].endswith("(free space of log_bundle_dest)")


class Server(http.server.BaseHTTPRequestHandler):
    """Answers as SGLang does without metrics, to those who have the key; /health never comes."""

    def do_GET(self) -> None:
        if self.path == "/health":
            time.sleep(20)
        good = self.headers.get("Authorization") == f"Bearer {KEY}"
        body = json.dumps({"api_key": KEY, "served": 1}).encode()
        self.send_response(404 if self.path == "/metrics" else 200 if good else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize("key", [KEY, "another"])
def test_answers_are_asked_for_all_at_once(tmp_path: Path, key: str) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    launch = tmp_path / "launch.yaml"
    launch.write_text(f"host: 127.0.0.1\nport: {server.server_address[1]}\napi-key: {key}\n")
    argument = request(
        tmp_path, names=("answers.json", "server_info.json", "metrics.txt", "config"), config_paths=[str(launch)]
    )
    changed = COLLECTOR.replace("self.pid = int(", "self.pid = os.getpid() or int(")
    changed = changed.replace("ASK_SECONDS = 22", "ASK_SECONDS = 6")
    assert len({COLLECTOR, changed}) == 2
    argv = [sys.executable, "-I", "-", json.dumps(argument)]
    done = subprocess.run(argv, input=changed, capture_output=True, text=True, check=True, timeout=60)
    server.shutdown()
    found = json.loads(done.stdout)
    answers = {one["path"]: one for one in json.loads((Path(found["staging"]) / "answers.json").read_text())}
    assert answers["/health"]["status"] is None
    assert answers["/health"]["error"]
    assert entry(found, "metrics.txt")["reason"].startswith("/metrics: Not Found")
    assert not entry(found, "metrics.txt")["failed"]
    if key == KEY:
        text = (Path(found["staging"]) / "server_info.json").read_text()
        assert json.loads(text) == {"api_key": MASK, "served": 1}
    else:
        assert answers["/server_info"]["status"] == 401
        assert entry(found, "server_info.json")["failed"]
