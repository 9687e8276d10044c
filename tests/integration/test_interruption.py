"""A killed ansible-playbook, in every phase: a plain re-run converges. Comes after test_deploy.py and test_input.py.

The run's process group is killed (SIGKILL) at a moment after a named task began: a seed draws it from the window of
its case, and a task that ends earlier is the moment too. Ansible puts its workers into sessions of their own, so the
task in hand goes on without anybody who waits for it, which is the harder half. The other half ends the workers and
their ssh too, as the loss of the controller's machine would.

`make test` runs three cases of each of the seven phases and re-runs the phase's own playbook. Where a re-run takes long
(the engine's installation, starts of the server) the three follow each other, each beginning with what the one before
left, and the plain re-run comes after the third. `make soak` (PIVOT_SOAK) runs all 43, each by itself, with more
runs around it. What is proven afterwards: the plain re-run succeeds, one container of that name and id, no half-written
release, weights, launch configuration or drop-in in use or left over, no process of the killed run, no copy of the API
key, and a further run changes nothing.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

import pytest
import yaml

from pivot.checkpoints import manifest as manifests

from .conftest import FIGURES, ROOT, containers_api, existing, second_container

SOAK = bool(os.environ.get("PIVOT_SOAK"))
PLACE = ROOT / ".lab/interruption"
PATIENCE = 600  # seconds until a run that does not come to its task counts as hanging
ORPHANS: list[int] = []  # workers that were left alone
MOMENTS: list[bool] = []  # of every killed run: whether its task was still at work
PADDING_MIB = 192


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where a run is cut. task: role and name as Ansible prints them; window: seconds after its start; gone: whether
    the workers end too, as when the controller's machine is lost."""

    task: str
    window: tuple[float, float]
    gone: bool
    seed: int

    def __str__(self) -> str:
        return f"{self.task.split(' : ')[-1]}-{'gone' if self.gone else 'group'}-{self.seed}"


def cuts(*rows: tuple[str, float, float, int]) -> list[Cut]:
    """Cases of a phase: task, window, number of seeds. They go around the tasks, so that the three of `make test` are
    in different ones where a phase has three, and alternate in what is killed, beginning with the group alone."""
    most = max(count for *_, count in rows)
    every = [(task, (begin, end)) for turn in range(most) for task, begin, end, count in rows if turn < count]
    return [Cut(task, window, bool(number % 2), number) for number, (task, window) in enumerate(every)]


def due(cases: list[Cut]) -> list[Cut]:
    return cases if SOAK else cases[:3]


def alone(cases: list[Cut]) -> list[list[Cut]]:
    """Cases whose re-run takes minutes: each alone in `make soak`; three after each other, then one re-run, else."""
    return [[cut] for cut in cases] if SOAK else [due(cases)]


def named(each: list[Cut]) -> str:
    return "-then-".join(map(str, each)) or "none"


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        own = children.get(todo.pop(), [])
        found += own
        todo += own
    return found


def interrupt(cut: Cut, *arguments: str) -> None:
    """Run ansible-playbook in a session of its own and kill it where the cut says. Fails when it never came there."""
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "1",  # otherwise a task is named when it ends, not when it begins
    }
    run = subprocess.Popen(
        ["ansible-playbook", *arguments], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=read, args=(run.stdout, lines), daemon=True)
    reader.start()
    seen: list[str] = []
    moment = random.Random(str(cut)).uniform(*cut.window)  # noqa: S311 - repeatable on purpose
    try:
        began = follow(lines, seen, f"TASK [{cut.task}", PATIENCE)
        if began:
            inside = not follow(lines, seen, ("TASK [", "PLAY "), moment)
            MOMENTS.append(inside and run.poll() is None)
        assert began, f"not killed in {cut.task}:\n{''.join(seen)[-3000:]}"
    finally:
        workers = descendants(run.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        if cut.gone:
            end(workers)
        else:
            ORPHANS.extend(workers)
        run.wait()


def end(processes: list[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def no_orphans():
    """A worker with more to tell than a pipe holds waits for its dead parent for ever; nothing else waits for it."""
    yield
    for pid in ORPHANS:
        with contextlib.suppress(OSError):  # it ended meanwhile
            if b"ansible-playbook" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    ORPHANS.clear()


def read(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    """Hand on every line, and None at the end: a worker that outlives the run may hold the pipe open after it."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def follow(lines: "queue.Queue[str | None]", seen: list[str], beginning: str | tuple[str, ...], seconds: float) -> bool:
    """Collect lines until one begins so, for at most so many seconds; whether it came."""
    end = time.monotonic() + seconds
    with contextlib.suppress(queue.Empty):
        while (line := lines.get(timeout=max(0.0, end - time.monotonic()))) is not None:
            seen.append(line)
            if line.startswith(beginning):
                return True
    return False


def converge(controller, *arguments):
    run = controller.play(*(arguments or ["deploy.yml"]))
    assert run.status == "successful", run.output[-5000:]
    return run


def still(controller, *arguments):
    run = converge(controller, *arguments)
    assert run.changed_tasks() == []


LEFTOVERS = r"""
find /opt/sglang/building /opt/sglang/incoming -mindepth 1 -maxdepth 1 2>/dev/null
find /opt/sglang -maxdepth 1 -name '.*' -type l
find /models -name '.incoming-*' -o -name '.replaced-*' -o -name '.verified-*.new'
find /etc/sglang -name '*.new' -o -name '.ansible_tmp*'
find /etc/sglang/drafter -mindepth 1 -maxdepth 1 | tail -n +2
find /var/tmp /tmp /run -maxdepth 1 -name 'pivot-bundle-*'
find /opt/pivot-probe /var/lib/pivot-probe /etc/systemd/system/sglang.service.d -maxdepth 0 2>/dev/null
find /etc/systemd/system -name 'pivot-probe-*'
grep -rl "$(sed -n 's/^api-key: "\(.*\)"/\1/p' /etc/sglang/launch.yaml)" /root/.ansible /tmp /var/tmp 2>/dev/null
pgrep -af '/pip |compileall|^rsync|probe_state|systemctl (re)?start'
[ -f /opt/sglang/current/release.json ] || echo current is no complete release
systemctl is-active --quiet sglang || echo the server is down
echo looked
"""


def settled(lab, host):
    """One container, nothing half done on it, and nothing of a killed run still at work."""
    assert existing(lab) == {"infer1": 101}
    assert host.run("bash -s", check=False, stdin=LEFTOVERS) == "looked\n"
    assert not list((ROOT / "artifacts").glob(".infer1*.partial"))


@pytest.fixture(scope="module")
def place():
    """A directory of this module: settings of runs, an inventory with a second container."""
    shutil.rmtree(PLACE, ignore_errors=True)  # of an interrupted test
    PLACE.mkdir()
    yield PLACE
    shutil.rmtree(PLACE)


def settings(place, name, **variables):
    path = place / f"{name}.yml"
    path.write_text(yaml.safe_dump(variables))
    return f"@{path}"


ENGINE = cuts(
    ("sglang_engine : Send the wheelhouse", 0.2, 1.5, 1),
    ("sglang_engine : Install the locked packages", 1.0, 25.0, 2),
    ("sglang_engine : Publish]", 0.0, 0.4, 1),
    ("sglang_engine : Compile", 1.0, 12.0, 1),
)


@pytest.mark.parametrize("each", alone(ENGINE), ids=named)
def test_engine(each, provisioned, lab, controller, host, request):
    """What is installed is no complete release, or nothing is: beside the other lanes, the re-run is what deploys."""
    host.run("rm -f /opt/sglang/current/release.json")
    for cut in each:
        interrupt(cut, "playbooks/engine.yml")
    request.getfixturevalue("deployed")
    converge(controller, "deploy.yml" if SOAK else "playbooks/engine.yml")
    still(controller, "playbooks/engine.yml")
    settled(lab, host)


PROVISION = cuts(
    ("proxmox_container : Create, update and start", 0.3, 2.5, 3),
    ("proxmox_container : Trust that key", 0.0, 0.4, 1),
    ("proxmox_container : It answers", 0.0, 0.8, 1),
)


@pytest.fixture
def second(lab, place):
    with second_container(lab) as inventory:
        yield inventory


@pytest.mark.parametrize("cut", due(PROVISION), ids=str)
def test_provision(cut, deployed, lab, controller, host, second):
    interrupt(cut, "playbooks/provision.yml", "-i", second, "--limit", "infer2")
    converge(controller, "playbooks/provision.yml", "-i", second, "--limit", "infer2")
    still(controller, "playbooks/provision.yml", "-i", second, "--limit", "infer2")
    assert existing(lab) == {"infer1": 101, "infer2": 102}
    assert containers_api(lab)(102).status.current.get()["status"] == "running"
    known = [line.split()[0] for line in Path(lab["lab_known_hosts"]).read_text().splitlines()]
    assert known.count(lab["lab_addresses"]["infer2"]) == 1


WEIGHTS = cuts(
    ("model_weights : Send the files", 0.3, 1.2, 3),
    ("model_weights : Fetch, verify and publish", 0.0, 0.7, 1),
    ("model_weights : Prepare the incoming", 0.0, 0.4, 1),
)


@pytest.fixture(scope="module")
def padded(place):
    """Settings with a third model that takes a while to send, and its manifest."""
    source = place / "padding"
    source.mkdir()
    (source / "config.json").write_text("{}\n")
    with (source / "padding.bin").open("wb") as stream:
        for _ in range(PADDING_MIB):
            stream.write(os.urandom(1 << 20))
    manifest = place / "padding.json"
    assert manifests.main([str(source), "--repository", "pivot-lab/padding", "--output", str(manifest)]) == 0
    revision = yaml.safe_load(manifest.read_text())["revision"]
    lab = yaml.safe_load((ROOT / "inventory/lab/group_vars/inference/weights.yml").read_text())["model_weights_models"]
    padding = {
        "repository": "pivot-lab/padding",
        "revision": revision,
        "source": str(source),
        "manifest": str(manifest),
    }
    return settings(place, "padded", model_weights_models=[*lab, padding])


@pytest.mark.parametrize("cut", due(WEIGHTS), ids=str)
def test_weights(cut, deployed, lab, controller, host, padded):
    host.run("rm -rf /models/pivot-lab/padding")
    interrupt(cut, "playbooks/weights.yml", "-e", padded)
    converge(controller, "playbooks/weights.yml", "-e", padded)
    still(controller, "playbooks/weights.yml", "-e", padded)
    settled(lab, host)
    host.run("rm -rf /models/pivot-lab/padding")


COLLECT = cuts(
    ("log_bundle : Gather into", 0.5, 1.5, 1),
    ("log_bundle : Bring the files", 0.0, 0.3, 1),
    ("log_bundle : Mask what the host", 0.0, 0.3, 1),
)


@pytest.mark.parametrize("cut", due(COLLECT), ids=str)
def test_collect(cut, deployed, lab, controller, host):
    interrupt(cut, "deploy.yml", "--tags", "collect")
    converge(controller, "deploy.yml", "--tags", "collect", "--limit", "infer1")
    latest = max((ROOT / "artifacts").glob("*T*Z"))
    assert "infer1" in (latest / "summary.txt").read_text()  # the table's play has its host with --limit too
    settled(lab, host)


SERVE = cuts(
    ("sglang_server : Unit, environment", 0.2, 1.2, 1),
    ("sglang_server : Launch configuration]", 0.0, 0.5, 2),
    ("sglang_server : Start and wait", 0.2, 12.0, 2),
)


@pytest.mark.parametrize("each", alone(SERVE), ids=named)
def test_serve(each, deployed, lab, controller, host, place):
    """Another launch configuration and unit are on their way: a re-run brings them in, and one without them takes them
    out again, whatever the server that runs then was started with. `make test` has the second half alone."""
    flags = yaml.safe_load((ROOT / "inventory/lab/group_vars/inference/server.yml").read_text())["sglang_server_launch"]

    def wanted(requests: int) -> str:
        launch = {**flags, "max-running-requests": requests}
        return settings(place, f"requests-{requests}", sglang_server_launch=launch, sglang_server_stop_seconds=29)

    if SOAK:
        for cut in each:
            interrupt(cut, "playbooks/serve.yml", "-e", wanted(3))
        converge(controller, "playbooks/serve.yml", "-e", wanted(3))
        still(controller, "playbooks/serve.yml", "-e", wanted(3))
        settled(lab, host)
        assert served(host) == "max-running-requests: 3"
    for cut, requests in zip(each, (3, 2, 5), strict=False):  # each has to write, whatever the one before it still did
        interrupt(cut, "playbooks/serve.yml", *(() if SOAK else ("-e", wanted(requests))))
    converge(controller, "deploy.yml" if SOAK else "playbooks/serve.yml")
    still(controller, "playbooks/serve.yml")
    settled(lab, host)
    assert served(host) == "max-running-requests: 4"


def served(host):
    """One line of launch.yaml, where the running server was started with this very file."""
    started = json.loads(host.run("cat /run/sglang/started.json"))
    assert started["/etc/sglang/launch.yaml"] == host.run("sha256sum </etc/sglang/launch.yaml").split()[0]
    return host.run("grep max-running-requests /etc/sglang/launch.yaml").strip()


DEBUG_ON = cuts(("debug_probes : Restart the service with the probe", 0.3, 12.0, 9))
DEBUG_ON.insert(1, Cut("debug_probes : Write the drop-in", (0.0, 0.6), True, 3))
DEBUG_OFF = cuts(("debug_probes : Restore the service", 0.3, 12.0, 10))
LAYERS = ("input of layer 3", "input of layer 5", "input of layer 7")


@pytest.mark.parametrize(
    ("on", "off"), list(itertools.zip_longest(alone(DEBUG_ON), alone(DEBUG_OFF), fillvalue=[])), ids=named
)
def test_debug(on, off, deployed, lab, controller, host):
    """The probe's way in and its way out, cut in turn; `make soak` has a plain deployment before each re-run."""
    before = host.trace()
    for number, cuts_ in enumerate(itertools.zip_longest(on, off), start=1):
        interrupt(cuts_[0], "deploy.yml", "--tags", "debug-on")
        if number == len(on):
            if SOAK:
                converge(controller)
            switched = converge(controller, "deploy.yml", "--tags", "debug-on")
            assert "50-pivot-probe.conf" in host.run("systemctl cat sglang")
            assert [words for words in LAYERS if words not in switched.output] == []
            still(controller, "deploy.yml", "--tags", "debug-on")
        if cuts_[1]:
            interrupt(cuts_[1], "deploy.yml", "--tags", "debug-off")
    if SOAK:
        converge(controller)
    converge(controller, "deploy.yml", "--tags", "debug-off")
    still(controller, "deploy.yml", "--tags", "debug-off")
    settled(lab, host)
    assert host.trace() == before


def test_nothing_is_left_to_do(deployed, lab, controller, host):
    still(controller)
    settled(lab, host)
    FIGURES.append(f"killed runs: {len(MOMENTS)}, {sum(MOMENTS)} in the midst of their task, the others as it ended")


@pytest.mark.parametrize("phase", [PROVISION, WEIGHTS, COLLECT, ENGINE, SERVE, DEBUG_ON, DEBUG_OFF])
def test_there_are_three_seeds_a_phase_and_more_in_all(phase):
    assert len(phase) >= 3
    assert {cut.gone for cut in phase[:3]} == {True, False}
    assert sum(map(len, (PROVISION, WEIGHTS, COLLECT, ENGINE, SERVE))) == 23
    assert len(DEBUG_ON) + len(DEBUG_OFF) == 20
