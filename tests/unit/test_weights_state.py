"""The host's side of model_weights, run as the role runs it, on directories of this machine."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "roles/model_weights/files/weights_state.py"
CONTENT = {"config.json": b"{}", "sub/model.safetensors": b"weights" * 1000}
FILES = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in CONTENT.items()}
GOOD = sorted(CONTENT)


class Host:
    """A root directory and the script."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "lab/toy"
        self.release = self.base / "r1"
        self.incoming = self.base / ".incoming-r1"
        self.record = self.base / ".verified-r1.json"

    def run(self, action: str, *, verify: str = "recorded", **model: Any) -> dict[str, Any]:
        wanted = {
            "repository": "lab/toy",
            "revision": "r1",
            "files": FILES,
            "intact": [],
            "send": [],
            "signatures": {},
            **model,
        }
        arguments = json.dumps({"action": action, "root": str(self.root), "verify": verify, "models": [wanted]})
        done = subprocess.run(
            [sys.executable, "-I", "-", arguments], input=SCRIPT.read_text(), capture_output=True, text=True, check=True
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def inspect(self, verify: str = "recorded") -> dict[str, Any]:
        answer = self.run("inspect", verify=verify)
        model: dict[str, Any] = answer["models"][0]
        return model

    def receive(self, names: list[str] = GOOD) -> None:
        """What rsync does between prepare and publish."""
        for name in names:
            path = self.incoming / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(CONTENT[name])

    def deploy(self) -> dict[str, Any]:
        assert self.run("prepare") == {"prepared": 1}
        self.receive()
        return self.run("publish")

    def tree(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.base).as_posix(): path.read_bytes()
            for path in sorted(self.base.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "models")


def overwrite_unseen(path: Path) -> None:
    """Change one byte and put the times back: only a full hash can see it, or the change time."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.write(b"W")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_fresh_host(host: Host) -> None:
    answer = host.run("inspect")
    assert answer["free_bytes"] > 0
    assert answer["models"][0]["release"]["state"] == "absent"
    assert answer["models"][0]["incoming"] == {"files": {}, "good": []}
    assert not host.root.exists()


def test_publication_and_a_second_look(host: Host) -> None:
    assert host.deploy() == {"published": [str(host.release)], "failed": {}}
    assert not host.incoming.exists()
    assert {name for name in host.tree() if name.startswith("r1/")} == {f"r1/{name}" for name in GOOD}
    assert (host.release / "config.json").stat().st_mode & 0o777 == 0o644
    assert (host.release / "sub").stat().st_mode & 0o777 == 0o755
    before = host.tree()
    release = host.inspect()["release"]
    assert (release["state"], release["good"], release["problems"]) == ("present", GOOD, {})
    assert release["recorded"]
    assert host.inspect(verify="full")["release"]["recorded"]
    assert host.tree() == before


def test_file_that_arrives_damaged_is_removed_and_named(host: Host) -> None:
    host.run("prepare")
    host.receive()
    (host.incoming / "config.json").write_bytes(b"[]")
    answer = host.run("publish")
    assert answer["published"] == []
    assert list(answer["failed"][str(host.release)]) == ["config.json"]
    assert not host.release.exists()
    assert host.inspect()["incoming"] == {"files": {}, "good": ["sub/model.safetensors"]}
    host.receive(["config.json"])
    assert host.run("publish")["published"] == [str(host.release)]


@pytest.mark.parametrize("verify", ["recorded", "full"])
def test_damage_is_seen(host: Host, verify: str) -> None:
    host.deploy()
    overwrite_unseen(host.release / "sub/model.safetensors")
    release = host.inspect(verify)["release"]
    assert list(release["problems"]) == ["sub/model.safetensors"]
    assert "sha256" in release["problems"]["sub/model.safetensors"]
    assert release["good"] == ["config.json"]


def test_kinds_of_damage(host: Host) -> None:
    host.deploy()
    (host.release / "config.json").unlink()
    (host.release / "config.json").symlink_to("/etc/hostname")
    (host.release / "sub/model.safetensors").write_bytes(b"short")
    (host.release / "mine.txt").write_text("a file of the user")
    release = host.inspect()["release"]
    assert release["problems"] == {
        "config.json": "is a symbolic link",
        "sub/model.safetensors": "has 5 bytes instead of 7000",
    }
    assert release["extra"] == ["mine.txt"]
    (host.release / "config.json").unlink()
    assert host.inspect()["release"]["problems"]["config.json"] == "is missing"


def test_repair_sends_only_the_damage(host: Host) -> None:
    host.deploy()
    overwrite_unseen(host.release / "sub/model.safetensors")
    host.run("prepare", intact=["config.json"])
    assert (host.incoming / "config.json").stat().st_ino == (host.release / "config.json").stat().st_ino
    host.receive(["sub/model.safetensors"])
    assert host.run("publish")["published"] == [str(host.release)]
    assert host.inspect()["release"]["recorded"]
    assert sorted(path.name for path in host.base.iterdir()) == [".verified-r1.json", "r1"]


def test_interrupted_transfer(host: Host) -> None:
    host.run("prepare")
    host.receive(["config.json"])
    (host.incoming / "sub").mkdir()
    (host.incoming / "sub/model.safetensors").write_bytes(b"wei")
    (host.incoming / "sub/.model.safetensors.Xy12").write_bytes(b"rsync's own")
    assert host.inspect()["incoming"] == {"files": {"sub/model.safetensors": 3}, "good": ["config.json"]}
    host.run("prepare")
    assert not (host.incoming / "sub/.model.safetensors.Xy12").exists()
    host.receive(["sub/model.safetensors"])
    assert host.run("publish")["published"] == [str(host.release)]


def test_whole_but_wrong_file_of_an_interrupted_run_goes(host: Host) -> None:
    host.run("prepare")
    host.receive()
    (host.incoming / "config.json").write_bytes(b"[]")
    assert host.inspect()["incoming"]["good"] == ["sub/model.safetensors"]
    host.run("prepare", send=["config.json"])
    assert sorted(path.name for path in host.incoming.rglob("*")) == ["model.safetensors", "sub"]


def test_interrupted_between_the_two_renames(host: Host) -> None:
    host.deploy()
    overwrite_unseen(host.release / "config.json")
    host.run("prepare", intact=["sub/model.safetensors"])
    host.receive(["config.json"])
    host.release.rename(host.base / ".replaced-r1-7")
    model = host.inspect()
    assert model["release"]["state"] == "absent"
    assert model["incoming"]["good"] == GOOD
    assert model["leftovers"] == [".incoming-r1", ".replaced-r1-7"]
    host.run("prepare")
    assert host.run("publish")["published"] == [str(host.release)]
    assert sorted(path.name for path in host.base.iterdir()) == [".verified-r1.json", "r1"]


def test_interrupted_before_the_record(host: Host) -> None:
    host.deploy()
    host.record.unlink()
    (host.base / ".replaced-r1-7").mkdir()
    (host.release / "config.json").chmod(0o600)
    model = host.inspect()
    assert not model["release"]["recorded"]
    assert model["release"]["modes"] == ["config.json"]
    assert host.run("settle", signatures=model["release"]["signatures"]) == {"settled": 1}
    again = host.inspect()
    assert again["release"]["recorded"]
    assert again["release"]["modes"] == []
    assert again["leftovers"] == []


def test_settling_trusts_only_what_was_seen(host: Host) -> None:
    host.deploy()
    seen = host.inspect()["release"]["signatures"]
    overwrite_unseen(host.release / "config.json")
    assert "changed after it was verified" in host.run("settle", signatures=seen)["error"]


def test_torn_record_is_no_record(host: Host) -> None:
    host.deploy()
    host.record.write_text('{"format": 1, "wan')
    release = host.inspect()["release"]
    assert release["good"] == GOOD
    assert not release["recorded"]


def test_something_else_in_the_place_of_the_release(host: Host, tmp_path: Path) -> None:
    host.base.mkdir(parents=True)
    host.release.symlink_to(tmp_path)
    release = host.inspect()["release"]
    assert (release["state"], release["kind"]) == ("foreign", "a symbolic link")


def test_errors_are_sentences(host: Host) -> None:
    host.root.write_text("a file where the root has to be")
    assert host.run("prepare")["error"].startswith(("Not a directory", "File exists"))
    assert "is not a relative name" in Host(host.root.parent).run("inspect", files={"../x": [1, "0" * 64]})["error"]


@pytest.mark.parametrize("stubborn", [False, True])
def test_what_still_receives_for_a_killed_run_is_ended(host: Host, stubborn: bool) -> None:
    host.run("prepare")
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
        assert host.run("prepare") == {"prepared": 1}
        assert receiver.wait(timeout=5) == (-9 if stubborn else -15)
        assert other.poll() is None
        other.kill()
