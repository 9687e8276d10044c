"""Killed anywhere, and on a full volume: nothing wrong is ever to be seen as the release, and a further run converges.

A job kills its own session at the n-th operation on files (opening, renaming, linking, removing, changing modes), n
drawn by a seed over all that it makes; a sender is killed with all its children at a moment drawn by one. Three seeds
each, with PIVOT_SOAK twenty. molecule/model_weights kills a real unit, tests/integration/test_interruption.py whole
plays.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pivot.checkpoints import weights, weights_send
from pivot.checkpoints.weights import Action, Step

from .hub_stand_in import Hub, serve
from .weights_host import US, Host, content, flip, toy

SEEDS = range(20 if os.environ.get("PIVOT_SOAK") else 3)
CONTENTS = {"config.json": b"{}", "a.safetensors": content(1, 3 << 20), "sub/b.safetensors": content(2, 5 << 20)}
WORKING = {"inventory_hostname": "here", "ansible_connection": "local"}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path, contents=CONTENTS)


def whole(host: Host) -> None:
    assert host.served() == CONTENTS
    assert host.names() == [".verified-r1.json", "r1"]
    assert host.converge() == []


def arrived(host: Host) -> None:
    """All has arrived, nothing is verified."""
    (step,) = host.plan().of(Action.PUBLISH)
    host.run("prepare", step.for_host())
    host.receive(step.send)


def damaged(host: Host) -> None:
    """A release with one wrong file."""
    host.converge()
    flip(host.release / "a.safetensors")


def unknown(host: Host) -> None:
    """A release that nobody has verified, with leftovers."""
    host.converge()
    host.record.unlink()
    (host.base / ".replaced-r1-7/sub").mkdir(parents=True)
    os.link(host.release / "sub/b.safetensors", host.base / ".replaced-r1-7/sub/b.safetensors")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_killed_at_any_operation(host: Host, seed: int, tmp_path: Path) -> None:
    begin = (arrived, damaged, unknown)[seed % 3]
    (tmp_path / "counted").mkdir()
    measured = Host(tmp_path / "counted", contents=CONTENTS)
    begin(measured)
    measured.kill_at(10**9)
    measured.converge()
    operations = measured.operations()
    assert operations > 10
    begin(host)
    before = host.served()
    host.kill_at(random.Random(f"job {seed}").randrange(operations))  # noqa: S311 - repeatable on purpose
    with contextlib.suppress(AssertionError):  # a job that was killed has nothing to say
        host.converge()
    assert host.served() in ({}, before, CONTENTS)
    host.kill_at(None)
    host.converge()
    whole(host)


def sender(host: Host, step: Step, place: Path, *options: str) -> None:
    """Send what a step wants, as the role does, to a directory of this machine."""
    incoming = str(step.wanted.incoming(str(host.root)))
    argv = weights_send.rsync_command(step.wanted.source, incoming, WORKING, [], place / "names")
    weights_send.begin(
        place,
        [
            {
                "key": step.wanted.key,
                "root": str(host.root),
                "size": step.size,
                "names": list(step.send),
                "argv": [argv[0], *options, *argv[1:]],
            }
        ],
    )


def test_a_sender_killed_at_any_moment(host: Host, tmp_path: Path) -> None:
    place, kept = tmp_path / "sender", []
    for seed in SEEDS:
        (step,) = host.plan().of(Action.PUBLISH)
        host.run("prepare", step.for_host())
        sender(host, step, place, "--bwlimit=8M")  # a second for all of it
        if seed == SEEDS[-1]:
            begun(host)
        time.sleep(random.Random(seed).uniform(0.05, 1.0))  # noqa: S311 - repeatable on purpose
        end_all(place)
        assert host.served() == {}
        found = host.look()["models"][0]["incoming"]["files"]
        kept.append(sum(size for size, _ in found.values()))
        # the next run verifies what is whole, and sends the rest
        for verify in host.plan().of(Action.VERIFY):
            job = host.start(verify)
            host.end()
            for again in host.plan(job).of(Action.PUBLISH):
                assert again.size == sum(map(len, CONTENTS.values())) - kept[-1]
        host.converge()
        whole(host)
        subprocess.run(["rm", "-r", host.root], check=True)
    assert max(kept) > 0


def begun(host: Host) -> None:
    """Wait until something has arrived."""
    limit = time.monotonic() + 30
    while not any(path.stat().st_size for path in host.root.rglob(".incoming-*/*") if path.is_file()):
        assert time.monotonic() < limit
        time.sleep(0.01)


def end_all(place: Path) -> None:
    """Kill a sender's session; rsync is in it. One that has ended already leaves nothing to kill."""
    found = subprocess.run(["pgrep", "--full", str(place)], capture_output=True, text=True, check=False)
    for pid in map(int, found.stdout.split()):
        with contextlib.suppress(ProcessLookupError):  # it has ended with its session
            os.killpg(os.getsid(pid), signal.SIGKILL)
    while weights_send.alive(place):
        time.sleep(0.01)


# ---- a volume that fills


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Host]:
    """A host whose root is on a volume of half the model's size."""
    if os.geteuid():
        pytest.skip("mounting a small file system needs root")
    host = Host(tmp_path, contents=CONTENTS)
    host.root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", host.root], check=True)
    yield host
    subprocess.run(["umount", "--lazy", host.root], check=True)


def due(host: Host) -> Step:
    """What a run would do that had seen more room when it looked."""
    made = weights.plan([host.wanted], {**host.look(), "free_bytes": 1 << 40}, US)
    (step,) = made.of(Action.PUBLISH)
    host.run("prepare", step.for_host())
    return step


def test_too_little_room_is_said_before(small: Host) -> None:
    assert [finding.code for finding in small.plan().findings] == ["WEIGHTS-SPACE"]


def test_a_volume_that_fills_while_it_is_sent_to(small: Host, tmp_path: Path) -> None:
    sender(small, due(small), tmp_path / "sender")
    while weights_send.alive(tmp_path / "sender"):
        time.sleep(0.05)
    assert weights_send.told(tmp_path / "sender")["error"] == (
        f"the volume of {small.root} is full: what has arrived is kept; free space there, then run again"
    )
    goes_on(small)


def test_a_volume_that_is_full_before_anything_is_sent(small: Host) -> None:
    step = due(small)
    (small.root / "of somebody else").write_bytes(bytes(1 << 12))
    with contextlib.suppress(OSError), (small.root / "of somebody else").open("ab", buffering=0) as stream:
        while stream.write(bytes(1 << 12)):
            pass
    assert small.run("prepare", step.for_host()) == {
        "error": f"the volume of {small.root} is full: what has arrived is kept; free space there, then run again"
    }


def test_a_volume_that_fills_while_the_hub_is_read(small: Host) -> None:
    with serve(Hub({"lab/toy": {"r1": CONTENTS}})) as hub:
        small.wanted = toy(CONTENTS, hub=True)
        small.hub = {"endpoint": hub.endpoint, "python": "python3", "workers": 1}
        small.start(due(small))
        told = small.end()
        assert told["ended"] == "failed"
        assert f"the volume of {small.incoming} is full: what has arrived is kept; free space" in told["error"]
        goes_on(small)


def goes_on(host: Host) -> None:
    """Nothing is to be seen, something has arrived, and with more room the rest does."""
    assert host.served() == {}
    found = host.look()["models"][0]["incoming"]["files"]
    assert sum(size for size, _ in found.values()) > 0
    subprocess.run(["mount", "-o", "remount,size=256m", host.root], check=True)
    host.converge()
    whole(host)


def test_a_volume_that_fills_while_it_is_verified(small: Host) -> None:
    """A record that cannot be written: nothing is published, and nothing is lost."""
    subprocess.run(["mount", "-o", "remount,size=9m", small.root], check=True)
    step = due(small)
    small.receive(step.send)
    filler = small.root / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass
    small.start(step)
    told = small.end()
    assert (told["ended"], told["error"]) == (
        "failed",
        f"the volume of {small.root} is full: what has arrived is kept; free space there, then run again",
    )
    filler.unlink()
    goes_on(small)
