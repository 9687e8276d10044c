"""The host's side of model_weights, run as the role runs it, on directories of this machine."""

import fcntl
import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pivot.checkpoints import weights
from pivot.checkpoints.weights import Action

from .test_manifest import GOOD_MANIFEST
from .weights_host import FILES, TOY, US, Host, flip, toy, write_files


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture(scope="module")
def state() -> ModuleType:
    """weights_state.py as a module."""
    spec = importlib.util.spec_from_file_location("weights_state", FILES / "weights_state.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def release(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["models"][0]["release"]
    return found


# ---- one run after another


def test_fresh_host(host: Host) -> None:
    answer = host.look()
    assert answer["free_bytes"] > 0
    assert release(answer)["state"] == "absent"
    assert answer["holder"] is None
    assert answer["job"] == {}
    assert not host.root.exists()
    assert not host.runs.exists()


def test_publication_and_a_second_look(host: Host) -> None:
    assert host.converge() == ["publish"]
    assert host.served() == TOY
    assert host.names() == [".verified-r1.json", "r1"]
    assert (host.release / "config.json").stat().st_mode & 0o777 == 0o644
    assert (host.release / "sub").stat().st_mode & 0o777 == 0o755
    before = host.record.read_bytes()
    assert host.converge() == []
    assert host.record.read_bytes() == before


def test_full_verification_hashes_every_time(host: Host) -> None:
    host.converge()
    assert host.converge(verify="full") == ["verify"]
    assert host.converge(verify="full") == ["verify"]
    assert host.converge() == []


def test_a_file_that_arrives_damaged_is_removed_and_named(host: Host) -> None:
    (step,) = host.plan().of(Action.PUBLISH)
    host.run("prepare", step.for_host())
    host.receive(step.send)
    flip(host.incoming / "config.json")
    host.start(step)
    told = host.end()
    assert (told["ended"], told["published"]) == ("failed", [])
    assert list(told["failed"]) == [str(host.release)]
    assert list(told["failed"][str(host.release)]) == ["config.json"]
    assert not host.release.exists()
    (again,) = host.plan().of(Action.PUBLISH)
    assert again.send == ("config.json",)
    assert host.converge() == ["publish"]
    assert host.served() == TOY


@pytest.mark.parametrize("name", sorted(TOY))
def test_one_flipped_byte_is_seen_and_repaired(host: Host, name: str) -> None:
    host.converge()
    flip(host.release / name)
    assert host.plan().steps[0].action is Action.VERIFY
    assert host.converge() == ["verify", "publish"]
    assert host.served() == TOY
    assert host.names() == [".verified-r1.json", "r1"]
    assert host.converge() == []


def test_two_files_of_one_size_swapped(tmp_path: Path) -> None:
    contents = {"config.json": b"{}", "a.safetensors": b"a" * 5000, "b.safetensors": b"b" * 5000}
    host = Host(tmp_path, contents=contents)
    host.converge()
    (host.release / "a.safetensors").rename(host.release / "x")
    (host.release / "b.safetensors").rename(host.release / "a.safetensors")
    (host.release / "x").rename(host.release / "b.safetensors")
    assert host.converge() == ["verify", "publish"]
    assert host.served() == contents


def test_a_manifest_of_another_repository_publishes_nothing(tmp_path: Path) -> None:
    other = {name: data[::-1] for name, data in TOY.items()}
    host = Host(tmp_path, wanted=toy(source=str(tmp_path / "source")), contents=other)
    (said,) = host.converge()
    assert list(json.loads(said)[str(host.release)]) == sorted(TOY)
    assert not host.release.exists()
    host.contents = TOY
    assert host.converge() == ["publish"]
    assert host.served() == TOY


def test_kinds_of_damage(host: Host) -> None:
    host.converge()
    (host.release / "config.json").unlink()
    (host.release / "config.json").symlink_to("/etc/hostname")
    (host.release / "sub/model.safetensors").write_bytes(b"short")
    (host.release / "mine.txt").write_text("a file of the user")
    found = release(host.look())
    assert found["odd"] == {"config.json": "a symbolic link"}
    assert found["files"] == {"sub/model.safetensors": [5, None]}
    assert found["headers"] == {"sub/model.safetensors": "its header is cut off, or it is no safetensors file"}
    assert found["extra"] == ["mine.txt"]


def test_the_header_of_a_cut_file_says_what_is_missing(host: Host, state: ModuleType, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode()
    path = tmp_path / "x.safetensors"
    whole = struct.pack("<Q", len(header)) + header + bytes(9)
    path.write_bytes(whole)
    assert state.header_problem(path) == ""
    path.write_bytes(whole[:-4])
    assert state.header_problem(path) == f"its header promises {len(whole)} bytes, it has {len(whole) - 4}"
    path.write_bytes(whole[:20])
    assert state.header_problem(path) == "its header is cut off, or it is no safetensors file"
    for offsets in ("x", [1], None, {}):
        torn = json.dumps({"a": {"data_offsets": [0, offsets]}}).encode()
        path.write_bytes(struct.pack("<Q", len(torn)) + torn)
        assert state.header_problem(path) == "its header is damaged"
    path.write_bytes(struct.pack("<Q", 2) + b"[]")
    assert state.header_problem(path) == "its header is damaged"


def test_an_unfinished_download_is_seen(host: Host) -> None:
    host.converge()
    (host.release / "config.json").rename(host.release / "config.json.incomplete")
    assert release(host.look())["incomplete"] == ["config.json"]


def test_what_has_begun_to_arrive_is_kept(host: Host) -> None:
    (step,) = host.plan().of(Action.PUBLISH)
    host.run("prepare", step.for_host())
    host.receive(("config.json",))
    (host.incoming / "sub").mkdir()
    (host.incoming / "sub/model.safetensors").write_bytes(TOY["sub/model.safetensors"][:3])
    (host.incoming / "sub/.model.safetensors.Xy12").write_bytes(b"rsync's own")
    (again,) = host.plan("j0").of(Action.PUBLISH)
    assert (again.send, again.size) == (("sub/model.safetensors",), 6997)
    host.run("prepare", again.for_host())
    assert (host.incoming / "sub/model.safetensors").stat().st_size == 3
    assert not (host.incoming / "sub/.model.safetensors.Xy12").exists()
    assert host.converge() == ["verify", "publish"]
    assert host.served() == TOY


def test_a_whole_but_wrong_file_of_an_interrupted_run_goes(host: Host) -> None:
    (step,) = host.plan().of(Action.PUBLISH)
    host.run("prepare", step.for_host())
    host.receive(step.send)
    flip(host.incoming / "config.json")
    assert host.converge() == ["verify", "publish"]
    assert host.served() == TOY


def test_interrupted_between_the_two_renames(host: Host) -> None:
    host.converge()
    flip(host.release / "config.json")
    host.release.rename(host.base / ".replaced-r1-7")
    host.incoming.mkdir()
    host.receive(tuple(TOY))
    assert host.converge() == ["verify", "publish"]
    assert host.names() == [".verified-r1.json", "r1"]
    assert host.served() == TOY


def test_interrupted_before_the_leftovers_went(host: Host) -> None:
    host.converge()
    (host.base / ".replaced-r1-7").mkdir()
    (host.release / "config.json").chmod(0o600)
    os.link(host.release / "sub/model.safetensors", host.base / ".replaced-r1-7/x")
    assert host.converge() == ["verify", "settle"]
    assert host.names() == [".verified-r1.json", "r1"]
    assert host.converge() == []  # what was hashed is known, although modes and links have changed since


@pytest.mark.parametrize("text", ['{"format": 2}', '{"format": 2, "hashes": null}', "[]", "null", "1"])
def test_a_record_of_another_shape_is_no_record(host: Host, text: str) -> None:
    host.converge()
    host.record.write_text(text)
    assert host.converge() == ["verify"]
    assert host.converge() == []


@pytest.mark.parametrize("entry", [None, "x", ["a"], ["a", "1", "c"], [1, 2, 3], {}, ["a", True, "c"], ["", 1, ""]])
def test_an_entry_of_another_shape_is_not_believed(host: Host, entry: Any) -> None:
    host.converge()
    content = json.loads(host.record.read_text())
    host.record.write_text(json.dumps({**content, "hashes": dict.fromkeys(content["hashes"], entry)}))
    assert host.converge() == ["verify"]
    assert host.converge() == []


def test_a_torn_record_is_no_record(host: Host) -> None:
    host.converge()
    host.record.write_text('{"format": 2, "ha')
    assert release(host.look())["files"]["config.json"] == [2, None]
    assert host.converge() == ["verify"]
    assert host.converge() == []


def test_something_else_in_the_place_of_the_release(host: Host, tmp_path: Path) -> None:
    host.base.mkdir(parents=True)
    host.release.symlink_to(tmp_path)
    assert (release(host.look())["state"], release(host.look())["kind"]) == ("foreign", "a symbolic link")


def test_names_that_are_no_utf8_are_written_out(host: Host) -> None:
    host.converge()
    name = os.fsdecode(b"caf\xe9")
    (host.release / name).mkdir(mode=0o700)
    (host.release / name / "notes").write_text("…")
    found = release(host.look())
    assert (found["extra"], found["modes"]) == (["caf\\xe9/notes"], ["caf\\xe9"])
    (finding,) = host.plan().findings
    assert finding.fix == f"move {host.release}/caf\\xe9/notes elsewhere"
    assert host.converge() == ["settle"]
    assert (host.release / name).stat().st_mode & 0o777 == 0o755


def test_what_others_cannot_read_behind_links_is_named(held: Host) -> None:
    holder = Path(held.wanted.paths[0])
    (holder / "config.json").chmod(0o640)
    assert [finding.code for finding in held.plan().findings] == ["WEIGHTS-CLOSED"]
    assert held.converge() == ["verify", "publish"]
    assert release(held.look())["closed"] == ["config.json"]
    assert [finding.code for finding in held.plan().findings] == ["WEIGHTS-CLOSED"]
    (holder / "config.json").chmod(0o644)
    assert held.plan().findings == ()
    (holder / "sub").chmod(0o750)
    assert release(held.look())["closed"] == ["sub/model.safetensors"]


def test_errors_are_sentences(host: Host) -> None:
    host.root.write_text("a file where the root has to be")
    assert "where a directory has to be" in host.look()["error"]
    host.root.unlink()
    wrong = {**host.wanted.for_host(), "files": {"../x": [1, "0" * 64]}}
    assert "is not a relative name" in host.run("look", wrong)["error"]


# ---- a path of the host that holds the model


@pytest.fixture
def held(tmp_path: Path) -> Host:
    """A host with the model in a directory that nobody may write."""
    holder = write_files(tmp_path / "mnt/toy", TOY)
    return Host(tmp_path, wanted=toy(paths=(str(holder),), source="/nonexistent"))


def look_of_tree(place: Path) -> list[tuple[str, int, int]]:
    return [(str(path), path.lstat().st_ino, path.lstat().st_ctime_ns) for path in sorted(place.rglob("*"))]


def test_a_path_is_verified_and_linked_and_never_written(held: Host) -> None:
    holder = Path(held.wanted.paths[0])
    before = look_of_tree(holder)
    assert held.converge() == ["verify", "publish"]
    assert held.served() == TOY
    assert (held.release / "config.json").readlink() == holder / "config.json"
    assert held.converge() == []
    assert look_of_tree(holder) == before


def test_a_path_that_is_written_with_more_slashes_is_linked_once(tmp_path: Path) -> None:
    manifest, holder = tmp_path / "toy.json", write_files(tmp_path / "mnt/toy", TOY)
    pins = {name: {"sha256": pin.sha256, "size": pin.size} for name, pin in toy().manifest.files.items()}
    manifest.write_text(json.dumps({**GOOD_MANIFEST, "files": pins}))
    entry = {"repository": "lab/toy", "revision": "r1", "manifest": str(manifest), "paths": [f"{tmp_path}//mnt/toy/"]}
    host = Host(tmp_path, wanted=weights.want([entry])[0])
    assert host.converge() == ["verify", "publish"]
    assert (host.release / "config.json").readlink() == holder / "config.json"
    assert host.converge() == []


def test_a_change_in_the_path_is_seen(held: Host) -> None:
    held.converge()
    flip(Path(held.wanted.paths[0]) / "config.json")
    assert [step.action for step in held.plan().steps] == [Action.VERIFY]
    made = verified(held)
    assert [finding.code for finding in made.findings if finding.severity == "error"] == ["WEIGHTS-SOURCE"]
    assert {"WEIGHTS-HASH"} <= {finding.code for finding in made.findings}


def verified(host: Host) -> Any:
    (step,) = host.plan().of(Action.VERIFY)
    job = host.start(step)
    assert host.end()["ended"] == "ok"
    return host.plan(job)


def test_a_damaged_path_is_named_and_passed_over(held: Host) -> None:
    flip(Path(held.wanted.paths[0]) / "config.json")
    held.wanted = toy(paths=held.wanted.paths, source=str(held.source))
    made = verified(held)
    (step,) = made.steps
    assert (step.links, step.send) == ({}, tuple(sorted(TOY)))
    (finding,) = made.findings
    assert finding.code == "WEIGHTS-HASH"
    assert f"{held.wanted.paths[0]}: config.json has sha256" in finding.message
    assert "it is not used" in finding.message
    assert held.converge() == ["publish"]
    assert held.served() == TOY


# ---- what was hashed, and when


def test_a_clock_that_was_set_back_makes_it_hash_again(state: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    status = path.stat()
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    record = state.Record(tmp_path / "record")
    record.add(status, "0" * 64, changed + state.TICK)
    monkeypatch.setattr(time, "time_ns", lambda: changed + state.TICK)
    assert record.sha256(status) == "0" * 64
    # the clock is now behind the time of hashing: nobody knows what happened meanwhile
    monkeypatch.setattr(time, "time_ns", lambda: changed + state.TICK - 1)
    assert record.sha256(status) is None
    # hashed while the clock stood behind the file's times
    monkeypatch.setattr(time, "time_ns", lambda: changed + 10 * state.TICK)
    record.add(status, "0" * 64, changed - 3600 * 10**9)
    assert record.sha256(status) is None
    # unless this very run has hashed it
    record.job = "j1"
    record.add(status, "0" * 64, changed - 3600 * 10**9)
    assert record.sha256(status) == "0" * 64
    assert state.Record(tmp_path / "record", "j1").sha256(status) is None  # never written


def test_files_from_the_future_are_hashed_in_every_run_and_served(host: Host) -> None:
    host.converge()
    later = time.time() + 86400
    os.utime(host.release / "config.json", (later, later))
    assert host.converge() == ["verify"]
    assert host.converge() == ["verify"]
    assert host.served() == TOY


def test_each_part_of_a_files_identity_counts(state: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    status = path.stat()
    record = state.Record(tmp_path / "record")
    record.add(status, "0" * 64, time.time_ns())
    time.sleep(0.03)
    record.add(status, "0" * 64, time.time_ns())
    assert record.sha256(status) == "0" * 64
    fields = ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"]
    for field in fields:
        other = type("Status", (), {name: getattr(status, name) - (name == field) for name in fields})
        assert record.sha256(other) is None, field


# ---- concurrent runs


def test_a_second_run_is_told_who_holds_the_lock(host: Host) -> None:
    host.converge()
    flip(host.release / "config.json")
    (step,) = host.plan().of(Action.VERIFY)
    with (host.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps({"by": "ann@laptop:/src", "doing": "receiving lab/toy@r1", "pid": 4711}))
        lock.flush()
        assert host.look()["holder"] == {"by": "ann@laptop:/src", "doing": "receiving lab/toy@r1", "pid": 4711}
        (finding,) = host.plan().findings
        assert finding.code == "WEIGHTS-BUSY"
        assert "ann@laptop:/src is at work there (receiving lab/toy@r1, process 4711" in finding.message
        publish = {"intact": [], "links": {}, "wrong": [], "hub": False}
        for action, more in (("prepare", publish), ("settle", {})):
            answer = host.run(action, {**step.wanted.for_host(), **more})
            assert answer["error"].startswith("ann@laptop:/src is at work in")
            assert "wait until it has ended" in answer["error"]
    assert host.converge() == ["verify", "publish"]


def test_our_own_lock_is_not_anothers(host: Host) -> None:
    host.converge()
    with (host.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps({"by": US, "doing": "receiving", "pid": 1}))
        lock.flush()
        assert host.plan().findings == ()


@pytest.mark.parametrize(("stubborn", "linked"), [(False, False), (True, False), (False, True)])
def test_what_still_receives_for_a_killed_run_is_ended(
    host: Host, stubborn: bool, linked: bool, tmp_path: Path
) -> None:
    if linked:
        (tmp_path / "volume").mkdir()
        host.root.symlink_to(tmp_path / "volume")
    (step,) = host.plan().of(Action.PUBLISH)
    host.run("prepare", step.for_host())
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    code = code if stubborn else "import time; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with (
        subprocess.Popen(command, cwd=host.incoming, stdout=subprocess.PIPE) as receiver,
        subprocess.Popen(command, cwd=host.base, stdout=subprocess.PIPE) as other,
    ):
        for process in (receiver, other):
            assert process.stdout is not None
            process.stdout.readline()
        # nobody waits for it here, so it stays as a zombie, which has no working directory
        assert host.run("prepare", step.for_host()) == {"prepared": 1}
        assert receiver.wait(timeout=5) == (-9 if stubborn else -15)
        assert other.poll() is None
        other.kill()
