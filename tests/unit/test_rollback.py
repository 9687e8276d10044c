"""Going back: which set, what forbids it, and what the host keeps and restores, in a directory of the test's own."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pivot.engines import rollback

FILES = Path(__file__).parents[2] / "roles/sglang_server/files"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FILES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sets, server_state = load("healthy_sets"), load("server_state")


# ---- which set


def kept(name, **changes):
    about = {"url": "http://h:30000", "model": "/models/t", "drafter": "/models/d", "layers": None}
    found = {"id": name, "at": "2026-11-30T00:00:00Z", "about": about, "started": {"launch.yaml": name}}
    return found | {"release": f"/opt/sglang/releases/{name}", "view": f"/etc/v/{name}", "missing": []} | changes


def state(names="AB", running="B", left=(), going=None, **changes):
    process = {"started": {"launch.yaml": running}} if running else None
    history = {"sets": [kept(name) for name in names], "left": list(left), "going": going}
    return {"healthy": history, "running": process, "drop_ins": []} | changes


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (state("AB", "B"), "A"),
        (state("ABC", "C"), "B"),
        (state("AB", "X"), "B"),  # what runs was never healthy
        (state("AB", None), "B"),  # nothing runs
        (state("A", "A"), None),
        (state("", "X"), None),
        (state("BA", "A", left="B"), None),  # B was left by a rollback: a second one does not go forward
        (state("CBA", "A", left="B"), "C"),
        (state("BAC", "C", left="B"), "A"),  # deployed after a rollback
        (state("AB", "B", left="B", going="A"), "A"),  # interrupted before the restart
        (state("ZAB", "A", left="B", going="A"), "A"),  # and after it: not one further
    ],
)
def test_the_set_before_is_gone_to(facts, expected):
    chosen = rollback.target(facts)
    assert (chosen and chosen["id"]) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (state("AB", "B"), False),
        (state("AB", "A"), True),  # served again by a deployment
        (state("AB", "X"), True),
        (state("", "X"), True),
        (state("AB", "B", left="B"), True),
        (state("AB", "B", going="A"), True),
    ],
)
def test_a_healthy_server_is_kept_once(facts, expected):
    assert rollback.due(facts) is expected


def test_a_plan_says_from_where_to_where():
    made = rollback.plan(state("AB", "B"), "h")
    assert (made["findings"], made["to"]["id"], made["from"], made["restart"]) == ([], "A", "B", True)
    assert made["text"] == (
        "from B with /models/t, drafter /models/d (healthy at 2026-11-30T00:00:00Z)"
        " back to A with /models/t, drafter /models/d (healthy at 2026-11-30T00:00:00Z)"
    )
    unknown = rollback.plan(state("AB", "X"), "h")
    assert unknown["text"].startswith("from what is there now, which was never found healthy back to B")


def test_a_rollback_that_was_interrupted_after_its_restart_needs_no_other():
    made = rollback.plan(state("ZAB", "A", left="B", going="A"), "h")
    assert (made["to"]["id"], made["from"], made["restart"]) == ("A", None, False)


def codes(facts):
    return [finding.code for finding in rollback.findings("h", facts)]


def test_what_forbids_a_rollback_is_found():
    assert codes(state("AB", "B")) == []
    assert codes(state("A", "A")) == ["ROLLBACK-NONE"]
    gone = state("AB", "B")
    gone["healthy"]["sets"][0]["missing"] = ["/opt/sglang/releases/A"]
    assert codes(gone) == ["ROLLBACK-GONE"]
    assert "cannot come back: /opt/sglang/releases/A is gone" in rollback.findings("h", gone)[0].message
    assert codes(state("AB", "B", drop_ins=["50-pivot-probe.conf"])) == ["ROLLBACK-PROBE"]
    assert codes(state("AB", "B", drop_ins=["mine.conf"])) == []
    assert rollback.plan(gone, "h").keys() == {"findings"}


# ---- what the host keeps


class Place:
    """A host in a directory: two releases, a launch configuration, a drafter's view, a link to the current release."""

    def __init__(self, root):
        self.root = root
        for name in "AB":
            (root / "releases" / name).mkdir(parents=True)
            (root / "releases" / name / "release.json").write_text(name)
        self.launch, self.unit = root / "launch.yaml", root / "sglang.service"
        self.kept = root / "healthy.json"
        self.link = root / "current"

    def serve(self, name, key="secret-key-1", view=None):
        """As a deployment leaves it: files, view, link and what a start read."""
        self.launch.write_text(f'model-path: "/{name}"\napi-key: "{key}"\nport: 30000\n')
        self.launch.chmod(0o640)
        self.unit.write_text(f"ExecStart={self.root}/releases/{name}/bin/python\n")
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(f"releases/{name}")
        self.start()
        if view:
            view.mkdir(parents=True)
            (view / "model.safetensors").symlink_to(self.root / "weights")
            (view / "config.json").write_text(name)

    def start(self):
        started = {str(path): server_state.digest(path) for path in (self.launch, self.unit)}
        (self.root / "started.json").write_text(json.dumps(started))

    def record(self, name, view=None, at="now"):
        return sets.record({
            "kept": str(self.kept), "started": str(self.root / "started.json"), "at": at,
            "files": [str(self.launch), str(self.unit)], "view": str(view) if view else None,
            "release": str(self.root / "releases" / name), "about": {"model": str(self.root)},
        })  # fmt: skip

    def restore(self, identity, left=None):
        return sets.restore({"kept": str(self.kept), "id": identity, "from": left, "link": str(self.link)})

    def history(self):
        return json.loads(self.kept.read_text())


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_a_set_comes_back_as_it_was(place):
    view = place.root / "drafter/A"
    place.serve("A", view=view)
    first = place.record("A", view)["recorded"]
    before = place.launch.read_text(), place.unit.read_text()
    place.serve("B")
    second = place.record("B")["recorded"]
    sets.Path(view / "model.safetensors").unlink()
    (view / "config.json").unlink()
    view.rmdir()
    assert place.restore(first, second) == {"restored": first}
    assert (place.launch.read_text(), place.unit.read_text()) == before
    assert place.launch.stat().st_mode & 0o777 == 0o640
    assert place.link.readlink() == Path("releases/A")
    assert (view / "model.safetensors").readlink() == place.root / "weights"
    assert (view / "config.json").read_text() == "A"
    assert (place.history()["going"], place.history()["left"]) == (first, [second])
    place.start()
    assert place.record("A", view)["recorded"] == first
    history = place.history()
    assert [each["id"] for each in history["sets"]] == [second, first]
    assert (history["going"], history["left"]) == (None, [second])


def test_a_restore_that_was_interrupted_is_done_again(place):
    place.serve("A")
    first = place.record("A")["recorded"]
    place.serve("B")
    second = place.record("B")["recorded"]
    place.restore(first, second)
    place.unit.write_text("half")
    (place.root / ".current.new").symlink_to("nowhere")
    (place.root / "launch.yaml.new").write_text("half")
    place.restore(first)
    assert "releases/A" in place.unit.read_text()
    assert place.history()["left"] == [second]
    assert [path.name for path in place.root.glob("*.new")] == []


def test_what_is_so_already_is_not_written_again(place):
    """systemd takes a unit that was replaced for another one until it is told to read it again."""
    place.serve("A")
    first = place.record("A")["recorded"]
    place.serve("B")
    place.restore(first, place.record("B")["recorded"])
    before = place.unit.stat(), place.launch.stat()
    place.restore(first)
    assert (place.unit.stat(), place.launch.stat()) == before
    place.unit.chmod(0o600)
    place.restore(first)
    assert place.unit.stat().st_mode == before[0].st_mode
    assert place.unit.stat().st_ino != before[0].st_ino


def test_no_key_is_kept_and_the_one_of_now_stays(place):
    place.serve("A", key="secret-key-1")
    first = place.record("A")["recorded"]
    place.serve("B", key="secret-key-2")
    place.record("B")
    assert "secret-key" not in place.kept.read_text()
    assert place.kept.stat().st_mode & 0o777 == 0o600
    place.restore(first)
    assert place.launch.read_text() == 'model-path: "/A"\napi-key: "secret-key-2"\nport: 30000\n'


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("a: 1\napi-key: \nb: 2\n", "x: 1\n", "a: 1\nb: 2\n"),
        ("a: 1\n", 'api-key: "k"\nadmin-api-key: "m"\n', 'a: 1\napi-key: "k"\nadmin-api-key: "m"\n'),
        ("a: 1\napi-key: \n", None, "a: 1\n"),
    ],
)
def test_keys_come_and_go_with_the_configuration_of_now(tmp_path, text, now, expected):
    if now is not None:
        (tmp_path / "launch.yaml").write_text(now)
    assert sets.with_keys(text, tmp_path / "launch.yaml") == expected


def test_another_key_alone_is_the_same_set(place):
    place.serve("A", key="secret-key-1")
    first = place.record("A")["recorded"]
    place.serve("A", key="secret-key-2")
    assert place.record("A")["recorded"] == first
    assert len(place.history()["sets"]) == 1


def test_a_file_that_changed_after_the_start_is_not_what_was_healthy(place):
    place.serve("A")
    place.launch.write_text("model-path: /other\n")
    assert place.record("A") == {"recorded": None, "because": f"{place.launch} was changed after the start"}
    assert not place.kept.exists()


def test_sets_of_releases_that_are_gone_and_old_ones_go(place):
    place.serve("A")
    place.record("A")
    (place.root / "releases/A/release.json").unlink()
    (place.root / "releases/A/healthy").unlink()
    (place.root / "releases/A").rmdir()
    for number in range(sets.MOST + 2):
        place.serve(f"B{number}")
        place.record("B")
    assert len(place.history()["sets"]) == sets.MOST
    assert {Path(each["release"]).name for each in place.history()["sets"]} == {"B"}


def test_a_release_says_that_it_was_healthy(place):
    place.serve("A")
    place.record("A", at="2026-11-30T00:00:00Z")
    mark = place.root / "releases/A/healthy"
    assert (mark.read_text(), mark.stat().st_mode & 0o777) == ("2026-11-30T00:00:00Z\n", 0o644)
    place.record("A", at="2026-12-01T00:00:00Z")  # it was gone back to
    assert mark.read_text() == "2026-12-01T00:00:00Z\n"
    (place.root / "other").mkdir()
    sets.mark(place.root / "other", "x")
    assert list((place.root / "other").iterdir()) == []


def test_a_link_of_another_kind_and_no_link_are_left_alone(place):
    place.serve("A")
    first = place.record("A")["recorded"]
    place.link.unlink()
    place.link.mkdir()
    place.restore(first)
    assert place.link.is_dir()
    sets.point(place.root / "elsewhere", Path("/opt/other"))
    assert (place.root / "elsewhere").readlink() == Path("/opt/other")


# ---- what the host says of it


def test_the_state_names_sets_without_their_texts_and_what_is_missing(place):
    view = place.root / "drafter/A"
    place.serve("A", view=view)
    place.record("A", view)
    (place.root / "weights").write_text("")
    (each,) = server_state.healthy(place.kept)["sets"]
    assert (each["view"], each["missing"]) == (str(view), [])
    assert "files" not in each
    (place.root / "weights").unlink()
    (each,) = server_state.healthy(place.kept)["sets"]
    assert each["missing"] == [str(place.root / "weights")]


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_history_that_cannot_be_read_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / "healthy.json").write_text(text)
    assert server_state.healthy(tmp_path / "healthy.json") == {"sets": [], "left": [], "going": None}
    assert sets.read(tmp_path / "healthy.json") == {"sets": [], "left": [], "going": None}


def test_compiled_kernels_of_releases_that_are_gone_are_named(tmp_path):
    for name in ("one", "two"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    (tmp_path / "releases/one").mkdir(parents=True)
    assert server_state.left_caches(tmp_path / "cache", tmp_path / "releases") == ["two"]
    assert server_state.left_caches(tmp_path / "none", tmp_path / "releases") == []


def test_the_program_is_run_as_the_role_runs_it(place):
    place.serve("A")
    first = place.record("A")["recorded"]
    question = {"verb": "restore", "kept": str(place.kept), "id": first, "from": None, "link": str(place.link)}
    command = [sys.executable, "-I", "-", json.dumps(question)]
    text = (FILES / "healthy_sets.py").read_text()
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"restored": first}
