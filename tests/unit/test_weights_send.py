"""The sender: rsync in a process that outlives the play. Locally here; molecule and the deployment have ssh."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pivot.checkpoints import progress, weights_send
from pivot.transfer import TransferError

LOCAL = {"inventory_hostname": "here", "ansible_connection": "local"}


def test_rsync_command() -> None:
    call = weights_send.rsync_command(
        "/src",
        "/models/lab/toy/.incoming-r1",
        {
            "inventory_hostname": "infer1",
            "ansible_connection": "ssh",
            "ansible_host": "10.0.0.5",
            "ansible_port": 2222,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": "/keys/a key",
            "ansible_ssh_common_args": "-o UserKnownHostsFile=/keys/known",
            "ansible_ssh_extra_args": "",
        },
        ["python3", "-I", "/run/x/weights_state.py", '{"action":"receive"}'],
        Path("/cache/names"),
    )
    assert call[0] == "rsync"
    assert not any(word.startswith("--delete") for word in call)
    assert {"--append", "--files-from=/cache/names"} <= set(call)
    assert """--rsync-path=python3 -I /run/x/weights_state.py '{"action":"receive"}'""" in call
    assert call[call.index("--rsh") + 1] == (
        "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -p 2222 -i '/keys/a key' -o UserKnownHostsFile=/keys/known"
        " -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
    )
    assert call[-2:] == ["/src/", "root@10.0.0.5:/models/lab/toy/.incoming-r1/"]


def test_rsync_without_ssh_and_over_ipv6() -> None:
    local = weights_send.rsync_command("/src", "/dst", LOCAL, [], Path("/names"))
    assert "--rsh" not in local
    assert local[-2:] == ["/src/", "/dst/"]
    distant = weights_send.rsync_command(
        "/src", "/dst", {"inventory_hostname": "x", "ansible_host": "fd00::5"}, [], Path("/names")
    )
    assert distant[-1] == "[fd00::5]:/dst/"


def test_quotes_that_rsync_cannot_pass_on() -> None:
    key = {"inventory_hostname": "x", "ansible_ssh_private_key_file": "/keys/it's"}
    with pytest.raises(TransferError, match="holds an apostrophe"):
        weights_send.rsync_command("/src", "/dst", key, [], Path("/names"))


# ---- a sender at work


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "dst").mkdir()
    return tmp_path / "sender"


def sends(place: Path, argv: list[str] | None = None, names: tuple[str, ...] = ("a", "b")) -> list[dict[str, Any]]:
    source, destination = place.parent / "src", place.parent / "dst"
    call = weights_send.rsync_command(str(source), str(destination), LOCAL, [], place / "names")
    return [{"key": "lab/toy@r1", "root": "/models", "size": 6, "names": list(names), "argv": argv or call}]


def ended(place: Path) -> dict[str, Any]:
    limit = time.monotonic() + 30
    while weights_send.alive(place):
        assert time.monotonic() < limit
        time.sleep(0.02)
    return weights_send.told(place)


def test_files_arrive_and_are_continued_where_they_end(place: Path) -> None:
    (place.parent / "src/a").write_bytes(b"abc")
    (place.parent / "src/b").write_bytes(b"def")
    (place.parent / "dst/b").write_bytes(b"XX")  # what was there is not looked at: the host hashes everything
    weights_send.begin(place, sends(place))
    told = ended(place)
    assert (told["ended"], told["error"]) == ("ok", "")
    assert (place.parent / "dst/a").read_bytes() == b"abc"
    assert (place.parent / "dst/b").read_bytes() == b"XXf"
    assert place.stat().st_mode & 0o077 == 0


def test_names_that_mean_something_to_rsync_are_names(place: Path) -> None:
    names = ("#notes.txt", "; x.txt", "a b/ü ☃.bin", "plain ", "[x]*?.bin", "sub/#y")
    for name in names:
        (place.parent / "src" / name).parent.mkdir(exist_ok=True)
        (place.parent / "src" / name).write_text(name)
    weights_send.begin(place, sends(place, names=names))
    assert ended(place)["ended"] == "ok"
    arrived = {path for path in (place.parent / "dst").rglob("*") if path.is_file()}
    assert {path.relative_to(place.parent / "dst").as_posix(): path.read_text() for path in arrived} == {
        name: name for name in names
    }


def test_a_file_that_is_gone_is_a_sentence(place: Path) -> None:
    (place.parent / "src/a").write_bytes(b"abc")
    weights_send.begin(place, sends(place))
    told = ended(place)
    assert told["ended"] == "failed"
    assert told["error"].startswith("rsync ended with 23: ")
    assert told["error"].endswith("what has arrived is kept, run again")


def script(place: Path, text: str) -> list[str]:
    path = place.parent / "rsync"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return [str(path)]


def test_a_lost_connection_is_taken_up_again(place: Path) -> None:
    # STAND-IN for rsync: it moves some bytes and loses the connection three times
    count = place.parent / "count"
    argv = script(
        place,
        f'echo x >>{count}; printf "\\r  1,000  10%% 1.0kB/s\\r"; [[ $(wc -l <{count}) -ge 3 ]] || exit 12',
    )
    weights_send.begin(place, sends(place, argv))
    assert ended(place)["ended"] == "ok"
    assert ended(place)["done"] == 3000
    assert count.read_text().count("x") == 3


def test_a_host_that_never_answers_is_given_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_send, "PAUSES", (0, 0))
    place.mkdir()
    argv = script(
        place, "echo x >>$(dirname $0)/count; echo 'ssh: connect to host x: Connection refused' >&2; exit 255"
    )
    (place / "spec.json").write_text(json.dumps(sends(place, argv)))
    assert weights_send.main([str(place)]) == 1
    assert weights_send.told(place)["error"].startswith("rsync ended with 255: ssh: connect to host x: Connection refu")
    assert (place.parent / "count").read_text().count("x") == 3


@pytest.mark.parametrize(
    ("complaint", "sentence"),
    [
        ("write failed: No space left on device (28)", "the volume of /models is full: what has arrived is kept; free"),
        (
            "bob@desk is at work in /models (a job, process 3): wait",
            "bob@desk is at work in /models (a job, process 3)",
        ),
    ],
)
def test_what_another_attempt_would_not_change(place: Path, complaint: str, sentence: str) -> None:
    place.mkdir()
    argv = script(place, f"echo x >>$(dirname $0)/count; echo '{complaint}' >&2; exit 12")
    (place / "spec.json").write_text(json.dumps(sends(place, argv)))
    assert weights_send.main([str(place)]) == 1
    assert weights_send.told(place)["error"].startswith(sentence)
    assert (place.parent / "count").read_text().count("x") == 1


def test_the_sender_outlives_the_group_that_began_it(place: Path) -> None:
    (place.parent / "src/a").write_bytes(b"abc")
    argv = [
        *script(place, 'until [ -e "$(dirname "$0")/go" ]; do sleep 0.05; done; rsync "$@"'),
        *sends(place)[0]["argv"][1:],
    ]
    given = sends(place, argv, names=("a",))
    code = (
        "import time; from pathlib import Path; from pivot.checkpoints import weights_send; "
        f"weights_send.begin(Path({str(place)!r}), {given!r}); "
        "print(flush=True); time.sleep(60)"
    )
    play = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert play.stdout is not None
    play.stdout.readline()
    os.killpg(play.pid, signal.SIGKILL)
    play.wait()
    play.stdout.close()
    assert weights_send.alive(place)
    Path(argv[0]).with_name("go").touch()
    assert ended(place)["ended"] == "ok"
    assert (place.parent / "dst/a").read_bytes() == b"abc"


def test_only_one_sender_for_a_place(place: Path) -> None:
    assert not weights_send.alive(place)
    assert weights_send.told(place) == {}
    place.mkdir()
    with (place / "alive").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert weights_send.alive(place)
        assert weights_send.main([str(place)]) == 1
    assert not weights_send.alive(place)


def test_the_place_is_that_of_one_root_of_one_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    places = {weights_send.place_of(host, root) for host in ("a:", "b:") for root in ("/models", "/srv")}
    assert len(places) == 4
    assert {place.parent for place in places} == {tmp_path / "pivot/weights"}


# ---- progress


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"phase": "beginning", "done": 0, "total": 0, "rate": 0.0}, "x: beginning"),
        ({"phase": "sending m", "done": 5 * 10**8, "total": 10**9, "rate": 0.0}, "x: sending m, 500.0 MB of 1.0 GB"),
        (
            {"phase": "verifying m", "done": 12 * 10**9, "total": 547 * 10**9, "rate": 112e6},
            "x: verifying m, 12.0 GB of 547.0 GB, 112.0 MB/s, 80 min left",
        ),
        (
            {"phase": "verifying m", "done": 0, "total": 547 * 10**9, "rate": 80e6},
            "x: verifying m, 0.0 MB of 547.0 GB, 80.0 MB/s, 1 h 54 min left",
        ),
        (
            {"phase": "verifying m", "done": 10**9, "total": 10**9, "rate": 1e9},
            "x: verifying m, 1.0 GB of 1.0 GB, 1.0 GB/s, 0 s left",
        ),
    ],
)
def test_progress_line(told: dict[str, Any], line: str) -> None:
    assert progress.line("x", told) == line
