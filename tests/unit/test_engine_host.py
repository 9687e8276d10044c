"""The files that the role sends to hosts: what they see, and what they change, in a directory of the test's own."""

import base64
import hashlib
import importlib.util
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from pivot.program import program

FILES = Path(__file__).parents[2] / "roles" / "sglang_engine" / "files"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FILES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


state, change = load("engine_state"), load("engine_release")


def make_release(path, record=None):
    """A small environment: one distribution `thing` with a script, and the engine."""
    site = path / "lib" / "python3.11" / "site-packages"
    (site / "sglang" / "__pycache__").mkdir(parents=True)
    (path / "bin").mkdir()
    (path / "bin" / "python").symlink_to(sys.executable)
    (path / "bin" / "tool").write_text(f"#!{path}/bin/python\n")
    (path / "pyvenv.cfg").write_text(f"home = /usr/bin\ncommand = python -m venv {path}\n")
    (site / "sglang" / "a.py").write_text("a = 1\n")
    (site / "thing.py").write_text("t = 1\n")
    distribution(site, "Thing", "thing.py", "../../../bin/tool,sha256=x,3\n")
    distribution(site, "sglang", "sglang/a.py", "sglang/__pycache__/a.pyc,,\n")
    if record is not None:
        (path / "release.json").write_text(json.dumps(record))
    return site


def distribution(site, name, file, more):
    """A distribution of one file, with its RECORD."""
    info = site / f"{name.lower()}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\nName: not this one\n")
    content = (site / file).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"{file},sha256={digest},{len(content)}\n{more}{info.name}/RECORD,,\n")


@pytest.fixture
def root(tmp_path):
    make_release(tmp_path / "releases" / "one", {"id": "one", "built": "2026-01-01"})
    (tmp_path / "current").symlink_to("releases/one")
    return tmp_path


def inspect(root, name="one"):
    return state.inspect(str(root / "releases" / name))


def test_a_whole_release_has_no_problems(root):
    report = inspect(root)
    assert report["problems"] == []
    assert report["installed"] == {"Thing": "1.0", "sglang": "1.0"}
    assert report["record"] == {"id": "one", "built": "2026-01-01"}
    site = root / "releases/one/lib/python3.11/site-packages"
    expected = hashlib.sha256((site / "thing-1.0.dist-info/RECORD").read_bytes()).hexdigest()
    assert report["records"]["Thing"] == expected


def test_bytecode_and_times_are_no_damage(root):
    tree = root / "releases" / "one" / "lib" / "python3.11" / "site-packages" / "sglang"
    (tree / "__pycache__" / "a.pyc").write_bytes(b"x")
    os.utime(tree / "a.py", (1, 1))
    assert inspect(root)["problems"] == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("deleted", "sglang: 1 files missing or of another size, e.g. sglang/a.py"),
        ("grown", "sglang: 1 files missing or of another size, e.g. sglang/a.py"),
        ("one byte", "sglang: 1 files are not as published, e.g. sglang/a.py (changed)"),
        ("added", "sglang: 1 files are not as published, e.g. sglang/debug_hidden.py (added)"),
        ("script", "e.g. ../../../bin/tool"),
        ("metadata", "thing-1.0.dist-info cannot be read"),
        ("torn", "thing-1.0.dist-info cannot be read (its RECORD is torn"),
        ("python", "bin/python is missing"),
        ("site", "it has no site-packages"),
    ],
)
def test_damage_is_found(root, damage, words):
    path = root / "releases" / "one"
    site = path / "lib" / "python3.11" / "site-packages"
    if damage == "deleted":
        (site / "sglang" / "a.py").unlink()
    elif damage == "grown":
        (site / "sglang" / "a.py").write_text("a = 10\n")
    elif damage == "one byte":
        (site / "sglang" / "a.py").write_text("a = 2\n")
    elif damage == "added":
        (site / "sglang" / "debug_hidden.py").write_text("")
    elif damage == "script":
        (path / "bin" / "tool").unlink()
    elif damage == "metadata":
        (site / "thing-1.0.dist-info" / "METADATA").unlink()
    elif damage == "torn":
        (site / "thing-1.0.dist-info" / "RECORD").write_text('"' + "x\n" * 100_000)
    elif damage == "python":
        (path / "bin" / "python").unlink()
    else:
        (path / "lib").rename(path / "elsewhere")
    assert words in "; ".join(inspect(root)["problems"])


def test_a_release_that_was_just_built_is_compared_file_by_file(root):
    path = root / "releases" / "one"
    (path / "lib/python3.11/site-packages/thing.py").write_text("t = 2\n")
    assert state.inspect(str(path))["problems"] == []
    (problem,) = state.inspect(str(path), every=True)["problems"]
    assert problem == "Thing: 1 files are not as published, e.g. thing.py (changed)"
    assert run_state(root, path=str(path))["release"]["problems"] == [problem]


def test_names_that_are_no_utf8_are_written_out(root):
    (root / "releases/one/lib/python3.11/site-packages/sglang" / os.fsdecode(b"caf\xe9.py")).write_text("")
    (root / "building" / os.fsdecode(b"caf\xe9")).mkdir(parents=True)
    facts = run_state(root)
    assert facts["release"]["problems"] == ["sglang: 1 files are not as published, e.g. sglang/caf\\xe9.py (added)"]
    assert facts["leftovers"] == ["building/caf\\xe9"]


def run_state(root, **changes):
    arguments = {"root": str(root), "python": sys.executable, "release": "one", "shared": ""} | changes
    command = [sys.executable, "-I", "-", json.dumps(arguments)]
    script = program(FILES / "engine_state.py")
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_state_as_the_role_asks_for_it(root):
    facts = run_state(root)
    assert facts["current"] == "one"
    assert facts["releases"] == [{"id": "one", "built": "2026-01-01", "healthy": ""}]
    (root / "releases/one/healthy").write_text("2026-02-03T04:05:06Z\n")
    assert run_state(root)["releases"] == [{"id": "one", "built": "2026-01-01", "healthy": "2026-02-03T04:05:06Z"}]
    (root / "releases/one/healthy").write_text("")
    assert run_state(root)["releases"][0]["healthy"] == "0"
    assert facts["python"]["implementation"] == "cpython"
    assert facts["python"]["error"] == ""
    assert facts["free_bytes"] > 0
    assert facts["release"]["problems"] == []


def test_the_state_of_a_fresh_host(tmp_path):
    facts = run_state(tmp_path / "none", python="/nowhere/python3")
    assert (facts["current"], facts["releases"], facts["release"]) == (None, [], None)
    assert facts["python"]["error"] == "it does not exist"


def test_a_link_that_leads_elsewhere_is_shown_as_it_is(root):
    (root / "current").unlink()
    (root / "current").symlink_to("/srv/other")
    assert state.current(str(root)) == "/srv/other"


def test_a_release_is_in_use_while_a_process_has_one_of_its_files_mapped(root):
    assert state.in_use(str(root)) == []
    mapped = root / "releases" / "one" / "data"
    mapped.write_bytes(bytes(4096))
    code = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(mapped)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        found = state.in_use(str(root))
        process.communicate(b"\n")
    assert found == ["one"]


def test_a_release_is_in_use_below_a_linked_root_too(root, tmp_path_factory):
    link = tmp_path_factory.mktemp("opt") / "sglang"
    link.symlink_to(root)
    mapped = root / "releases" / "one" / "data"
    mapped.write_bytes(bytes(4096))
    with mapped.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert state.in_use(str(link)) == ["one"]


@pytest.mark.parametrize("setting", ["/opt/sglang", "/opt/sglang/", "//opt//sglang", "/opt/./x/../sglang//"])
def test_the_role_has_one_spelling_of_the_root(setting):
    """`venv` writes that one into scripts, and `finish` looks for it."""
    loader, role = DataLoader(), FILES.parent
    known = loader.load_from_file(str(role / "vars/main.yml"), trusted_as_template=True)
    known |= {"sglang_engine_root": setting, "__sglang_engine_release": {"id": "one"}}
    templar = Templar(loader=loader, variables=known)
    assert templar.template(known["__sglang_engine_building"]) == "/opt/sglang/building/one"
    texts = {path.name: path.read_text() for path in (role / "tasks").glob("*.yml")}
    assert [name for name, text in texts.items() if re.search(r"\bsglang_engine_root", text)] == []


def test_finish_rewrites_paths_and_modes(tmp_path):
    staging, final = tmp_path / "building" / "new", tmp_path / "releases" / "new"
    site = make_release(staging)
    (staging / "bin" / "binary").write_bytes(b"\0" + os.fsencode(staging))
    (site / "sglang" / "a.py").chmod(0o640)
    (staging / "bin" / "tool").chmod(0o770)
    assert change.finish({"staging": str(staging), "final": str(final)}) == {"rewritten": 2}
    assert (staging / "bin" / "tool").read_text() == f"#!{final}/bin/python\n"
    assert str(final) in (staging / "pyvenv.cfg").read_text()
    assert (staging / "bin" / "binary").read_bytes() == b"\0" + os.fsencode(staging)
    assert (site / "sglang" / "a.py").stat().st_mode & 0o777 == 0o644
    assert (staging / "bin" / "tool").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("hidden", [False, True])
def test_everybody_can_read_whatever_the_umask_of_root_is(tmp_path, hidden):
    root = tmp_path / "opt/sglang"
    folders = [root, *(root / name for name in ("releases", "building", "logs", "incoming"))]
    for folder in folders if hidden else []:  # made by an earlier run
        folder.mkdir(mode=0o700, parents=True)
    arguments = {"verb": "prepare", "root": str(root), "incoming": str(root / "incoming/x"), "shared": ""}
    argument = json.dumps({**arguments, "log": str(root / "logs/one.log")})
    script = (FILES / "engine_release.py").read_text()
    subprocess.run([sys.executable, "-I", "-", argument], input=script.encode(), check=True, umask=0o077)
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o755}


def test_modes_are_put_right_after_all_that_writes_into_a_release():
    tasks = yaml.safe_load((FILES.parent / "tasks/install.yml").read_text())
    writing = [number for number, task in enumerate(tasks) if "/bin/python" in str(task) or "venv" in str(task)]
    (finish,) = [number for number, task in enumerate(tasks) if task["name"].startswith("Prepare the environment")]
    assert len(writing) == 3
    assert finish > max(writing)


def publish(root, name):
    arguments = {"root": str(root), "id": name, "staging": str(root / "building" / name), "record": {"id": name}}
    return change.publish(arguments)


def test_publish_moves_the_release_and_switches_the_link(root):
    make_release(root / "building" / "two")
    assert publish(root, "two") == {"current": "two"}
    assert (root / "current").readlink() == Path("releases/two")
    assert json.loads((root / "current" / "release.json").read_text()) == {"id": "two"}
    assert list((root / "building").iterdir()) == []
    assert inspect(root)["problems"] == []


def test_publish_replaces_a_damaged_release_of_the_same_name(root):
    make_release(root / "building" / "one")
    (root / "releases" / "one" / "stale").write_text("x")
    publish(root, "one")
    assert not (root / "releases" / "one" / "stale").exists()
    assert list((root / "building").iterdir()) == []


def test_prepare_clears_what_an_interrupted_build_left_and_ends_its_processes(root):
    leftover = root / "building" / "one"
    make_release(leftover)
    (root / "logs").mkdir()
    (root / "logs" / "one.log").write_text("old")
    arguments = {"root": str(root), "incoming": str(root / "incoming" / "x"), "shared": ""}
    arguments["log"] = str(root / "logs" / "one.log")
    code = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(leftover / "x")], stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # while it is being started, the kernel knows no arguments
        result = change.prepare(arguments)
        assert process.wait(timeout=5) < 0
    assert result == {"ended": [process.pid], "removed": ["one"]}
    assert list((root / "building").iterdir()) == []
    assert (root / "incoming" / "x").is_dir()
    assert not (root / "logs" / "one.log").exists()
    assert change.prepare(arguments) == {"ended": [], "removed": []}


@pytest.mark.parametrize("linked", [False, True])
def test_prepare_ends_what_still_receives_for_a_killed_run(root, linked, tmp_path_factory):
    if linked:
        link = tmp_path_factory.mktemp("opt") / "sglang"
        link.symlink_to(root)
        root = link
    incoming, shared = root / "incoming/x", root / "wheels/x"
    arguments = {"root": str(root), "incoming": str(incoming), "shared": str(shared), "log": str(root / "one.log")}
    change.prepare(arguments)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        subprocess.Popen(command, cwd=incoming) as receiver,
        subprocess.Popen(command, cwd=shared) as sharing,
        subprocess.Popen(command, cwd=root) as other,
    ):
        ended = change.prepare(arguments)
        assert (sorted(ended["ended"]), ended["removed"]) == (sorted([receiver.pid, sharing.pid]), [])
        assert receiver.wait(timeout=5) < 0
        assert sharing.wait(timeout=5) < 0
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("script", ["engine_state", "engine_release"])
def test_a_change_that_a_killed_run_began_is_waited_for(root, script):
    make_release(root / "building" / "two")
    over = root / "over"
    code = f"import fcntl, os, time; fcntl.flock(os.open({str(root)!r}, os.O_RDONLY), fcntl.LOCK_EX); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(1); open({str(over)!r}, 'w')"], stdout=subprocess.PIPE
    ) as publishing:
        publishing.stdout.readline()
        if script == "engine_state":
            run_state(root)
        else:
            change.main({"verb": "tidy", "root": str(root)})
        assert over.exists()
        assert publishing.wait() == 0


def test_a_shared_directory_of_wheels_has_to_be_there(root):
    assert run_state(root)["shared"] == ""
    assert run_state(root, shared=str(root))["shared"] == str(root)
    assert run_state(root, shared=str(root / "wheels"))["shared"] is None


def test_what_a_build_left_is_seen_and_tidied_up(root):
    assert run_state(root)["leftovers"] == []
    (root / "building" / "two" / "bin").mkdir(parents=True)
    (root / "incoming" / "x").mkdir(parents=True)
    (root / ".current.new").symlink_to("releases/two")
    assert run_state(root)["leftovers"] == ["incoming", ".current.new", "building/two"]
    assert change.tidy({"root": str(root)}) == {"ended": []}
    assert run_state(root)["leftovers"] == []
    assert (root / "building").is_dir()
    assert (root / "releases" / "one").is_dir()


def test_a_removal_that_is_interrupted_leaves_no_half_of_a_release(root, monkeypatch):
    def killed(path):
        raise OSError("killed")

    (root / "building/one.old/lib").mkdir(parents=True)  # of an attempt before
    with monkeypatch.context() as patched:
        remove, calls = shutil.rmtree, []
        patched.setattr(change.shutil, "rmtree", lambda path: killed(path) if calls else calls.append(remove(path)))
        with pytest.raises(OSError, match="killed"):
            change.remove({"root": str(root), "ids": ["one"]})
    assert list((root / "releases").iterdir()) == []
    assert state.leftovers(str(root)) == ["building/one.old"]
    change.tidy({"root": str(root)})
    assert state.leftovers(str(root)) == []


def test_remove_takes_releases_with_their_logs_and_refuses_paths(root):
    (root / "logs").mkdir()
    (root / "logs" / "one.log").write_text("x")
    assert change.remove({"root": str(root), "ids": ["one"]}) == {"removed": ["one"]}
    assert not (root / "releases" / "one").exists()
    assert not (root / "logs" / "one.log").exists()
    for bad in ("../logs", "", ".."):
        assert "error" in change.remove({"root": str(root), "ids": [bad]})


def test_what_is_in_the_way_is_an_error_in_json(root):
    command = [sys.executable, "-I", "-", json.dumps({"verb": "remove", "root": str(root), "ids": ["none"]})]
    done = subprocess.run(
        command, input=(FILES / "engine_release.py").read_text(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "No such file" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("said", ["", "5", "[]", "text"])
def test_what_is_no_python_is_said_to_be_none(tmp_path, said):
    program = tmp_path / "python3"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    facts = run_state(tmp_path / "none", python=str(program))
    assert facts["python"]["error"] == "it is no Python: it did not answer with its version"
