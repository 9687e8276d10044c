"""What is wanted of a host, and the plan that follows from its report."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pivot.checkpoints import weights
from pivot.checkpoints.manifest import FilePin, Manifest
from pivot.checkpoints.tensors import WeightsError
from pivot.checkpoints.weights import Action, Wanted
from pivot.findings import Severity

from .test_manifest import GOOD_MANIFEST
from .weights_host import FILES as HOST_FILES
from .weights_host import filters

US = "ann@laptop:/src"


def entry(tmp_path: Path, **change: Any) -> dict[str, Any]:
    (tmp_path / "toy.json").write_text(json.dumps(GOOD_MANIFEST))
    given = {"repository": "lab/toy", "revision": "r1", "source": str(tmp_path), "manifest": str(tmp_path / "toy.json")}
    return {**given, **change}


def test_wanted_models_are_loaded(tmp_path: Path) -> None:
    assert [item.key for item in weights.want([entry(tmp_path)])] == ["lab/toy@r1"]
    (item,) = weights.want([entry(tmp_path, source=None, hub=True, paths=["/mnt/toy", "//mnt//toys/"])])
    assert (item.source, item.hub, item.paths) == ("", True, ("/mnt/toy", "/mnt/toys"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"revision": "r2"}, r"entry 1: revision is 'r2', but .* says 'r1'"),
        ({"repository": "lab/other"}, "repository is 'lab/other'"),
        ({"source": "relative"}, "source is 'relative', it has to be an absolute path"),
        ({"paths": ["/mnt", "mnt/x"]}, "paths is 'mnt/x', it has to be an absolute path"),
        ({"paths": ["/mnt/../etc"]}, r"without '\.\.'"),
        ({"manifest": ""}, "entry 1: manifest missing"),
    ],
)
def test_pin_and_manifest_have_to_agree(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        weights.want([entry(tmp_path, **change)])


def test_a_model_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="names a model twice"):
        weights.want([entry(tmp_path), entry(tmp_path)])


# ---- plans

FILES = {"config.json": FilePin("1" * 64, 4), "model.safetensors": FilePin("2" * 64, 100)}
GOOD = {name: [pin.size, pin.sha256] for name, pin in FILES.items()}
EMPTY: dict[str, Any] = {
    "state": "absent",
    "kind": "",
    "files": {},
    "odd": {},
    "headers": {},
    "incomplete": [],
    "closed": [],
}


@pytest.fixture
def wanted(tmp_path: Path) -> Wanted:
    (tmp_path / "config.json").write_bytes(bytes(4))
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    return Wanted(Manifest("lab/toy", "r1", FILES, {}, {}), str(tmp_path))


def tree(files: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**EMPTY, "state": "present", "files": files, **more}


def report(*, free: int = 1 << 40, **parts: Any) -> dict[str, Any]:
    model = {
        "key": "lab/toy@r1",
        "release": {"extra": [], "modes": [], **(parts.get("release") or EMPTY)},
        "incoming": parts.get("incoming") or EMPTY,
        "paths": parts.get("paths", {}),
        "leftovers": parts.get("leftovers", []),
    }
    return {
        "root": "/models",
        "free_bytes": free,
        "tools": parts.get("tools", ["rsync", "systemd-run"]),
        "holder": parts.get("holder"),
        "job": parts.get("job", {}),
        "models": [model],
    }


def plan(wanted: Wanted, *, verified: bool = False, **parts: Any) -> weights.Plan:
    return weights.plan([wanted], report(**parts), US, verified)


def codes(made: weights.Plan) -> list[str]:
    return [finding.code for finding in made.findings]


def test_nothing_to_do(wanted: Wanted) -> None:
    made = plan(wanted, release=tree(GOOD))
    assert made.steps == ()
    assert made.findings == ()


def test_linked_files_that_a_server_may_not_read(wanted: Wanted) -> None:
    made = plan(wanted, release=tree(GOOD, closed=["model.safetensors"]))
    (finding,) = made.findings
    assert (finding.code, finding.severity) == ("WEIGHTS-CLOSED", Severity.WARNING)
    assert finding.message.startswith("model.safetensors of /models/lab/toy/r1 can be read by root")


def test_everything_is_missing(wanted: Wanted) -> None:
    made = plan(wanted)
    (step,) = made.steps
    assert (step.action, step.send, step.size, step.intact) == (Action.PUBLISH, tuple(sorted(FILES)), 104, ())
    assert step.summary() == "/models/lab/toy/r1: missing, 2 files (0.0 MB) from the controller"
    assert made.findings == ()
    assert made.of(Action.PUBLISH) == [step]
    assert made.of(Action.SETTLE) == []


def test_what_is_not_known_is_verified_first(wanted: Wanted) -> None:
    made = plan(wanted, release=tree({**GOOD, "model.safetensors": [100, None]}))
    (step,) = made.of(Action.VERIFY)
    assert (step.trees, step.size) == (("/models/lab/toy/r1",), 100)
    assert step.summary() == "/models/lab/toy/r1: not known to be verified, 0.0 MB to be hashed"
    assert step.for_host()["trees"] == ["/models/lab/toy/r1"]


def test_publications_wait_for_verification(wanted: Wanted) -> None:
    other = dataclasses.replace(wanted, manifest=dataclasses.replace(wanted.manifest, revision="r2"))
    said = report(release=tree({**GOOD, "model.safetensors": [100, None]}))
    said["models"].append({**report()["models"][0], "key": "lab/toy@r2"})
    made = weights.plan([wanted, other], said, US)
    assert [step.action for step in made.steps] == [Action.VERIFY, Action.PUBLISH]
    assert made.of(Action.PUBLISH) == []


def test_files_that_change_while_they_are_verified(wanted: Wanted) -> None:
    release = tree({**GOOD, "model.safetensors": [100, None]})
    made = plan(wanted, release=release, verified=True)
    assert codes(made) == ["WEIGHTS-CHANGING"]
    assert "model.safetensors in /models/lab/toy/r1 changed while it was verified" in made.findings[0].message
    assert codes(plan(wanted, release=release)) == []


def test_only_the_damage_is_sent(wanted: Wanted) -> None:
    made = plan(wanted, release=tree({**GOOD, "model.safetensors": [100, "3" * 64]}))
    (step,) = made.steps
    assert (step.send, step.intact, step.why) == (("model.safetensors",), ("config.json",), "damaged")
    (finding,) = made.findings
    assert (finding.code, finding.severity) == ("WEIGHTS-HASH", Severity.WARNING)
    assert "model.safetensors has sha256 333333333333… instead of 222222222222…; the release" in finding.message


SHARDS = {f"model-{number}.safetensors": FilePin(str(number) * 64, 100) for number in (1, 2)}


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        ({"files": {}}, "WEIGHTS-SHARD", "the shard model-1.safetensors is missing"),
        (
            {"files": {}, "incomplete": ["model-1.safetensors"]},
            "WEIGHTS-INCOMPLETE",
            "only model-1.safetensors.incomplete is",
        ),
        ({"files": {"model-1.safetensors": [9, None]}}, "WEIGHTS-SIZE", "model-1.safetensors has 9 bytes instead of"),
        (
            {
                "files": {"model-1.safetensors": [9, None]},
                "headers": {"model-1.safetensors": "its header promises 100 bytes, it has 9"},
            },
            "WEIGHTS-HEADER",
            "model-1.safetensors is truncated or torn: its header promises 100 bytes, it has 9",
        ),
        ({"files": {"model-1.safetensors": [100, "9" * 64]}}, "WEIGHTS-HASH", "model-1.safetensors has sha256 9999"),
        ({"files": {}, "odd": {"model-1.safetensors": "a directory"}}, "WEIGHTS-KIND", "model-1.safetensors is a dir"),
    ],
)
def test_each_kind_of_damage_has_a_name(damage: dict[str, Any], code: str, message: str, tmp_path: Path) -> None:
    headers = {name: {} for name in SHARDS}
    wanted = Wanted(Manifest("lab/toy", "r1", {**SHARDS, "config.json": FILES["config.json"]}, {}, headers), hub=True)
    fine = {"model-2.safetensors": [100, "2" * 64], "config.json": [4, "1" * 64]}
    made = plan(wanted, release=tree({**fine, **damage.pop("files")}, **damage))
    assert codes(made) == [code]
    assert message in made.findings[0].message
    assert made.findings[0].severity is Severity.WARNING
    assert made.steps[0].fetch == ("model-1.safetensors",)
    assert codes(plan(wanted, release=tree({**fine, "model-1.safetensors": [100, "1" * 64]}))) == []


def test_a_missing_file_that_is_no_shard(wanted: Wanted) -> None:
    made = plan(wanted, release=tree({"model.safetensors": [100, "2" * 64]}))
    assert codes(made) == ["WEIGHTS-MISSING"]
    assert "/models/lab/toy/r1: config.json is missing; the release is replaced" in made.findings[0].message


def test_many_damaged_files_are_counted() -> None:
    pins = {f"{number}.bin": FilePin("1" * 64, 4) for number in range(9)}
    made = plan(Wanted(Manifest("lab/toy", "r1", pins, {}, {}), hub=True), release=tree({}))
    assert "0.bin is missing, 1.bin is missing" in made.findings[0].message
    assert "4.bin is missing and 4 more; the release is replaced" in made.findings[0].message


def test_interrupted_transfer_is_continued(wanted: Wanted) -> None:
    incoming = tree({"model.safetensors": [60, None], "config.json": [4, "1" * 64]})
    (step,) = plan(wanted, incoming=incoming).steps
    assert (step.send, step.size, step.why) == (("model.safetensors",), 40, "interrupted before")
    assert step.intact == ()


def test_what_arrived_whole_is_verified_and_what_is_wrong_is_sent_again(wanted: Wanted) -> None:
    incoming = tree({**GOOD, "model.safetensors": [100, None]})
    (step,) = plan(wanted, incoming=incoming).of(Action.VERIFY)
    assert step.trees == ("/models/lab/toy/.incoming-r1",)
    (step,) = plan(wanted, incoming=tree({**GOOD, "model.safetensors": [100, "3" * 64]}), verified=True).steps
    assert (step.send, step.wrong) == (("model.safetensors",), ("model.safetensors",))


def test_interrupted_before_publication_sends_nothing(wanted: Wanted) -> None:
    made = plan(wanted, incoming=tree(GOOD), leftovers=[".replaced-r1-7"], tools=["systemd-run"])
    (step,) = made.steps
    assert (step.action, step.send, step.size) == (Action.PUBLISH, (), 0)
    assert made.findings == ()


@pytest.mark.parametrize(("modes", "leftovers"), [(["config.json"], []), ([], [".incoming-r1"])])
def test_good_release_is_settled(wanted: Wanted, modes: list[str], leftovers: list[str]) -> None:
    made = plan(wanted, release=tree(GOOD, modes=modes), leftovers=leftovers)
    (step,) = made.steps
    assert (step.action, step.why) == (Action.SETTLE, "modes or leftovers to be put in order")
    assert step.summary() == "/models/lab/toy/r1: modes or leftovers to be put in order"
    assert made.findings == ()


@pytest.mark.parametrize(
    ("files", "extra", "severity"),
    [
        (GOOD, "notes.txt", Severity.WARNING),
        (GOOD, "other.safetensors", Severity.ERROR),
        ({}, "notes.txt", Severity.ERROR),
    ],
)
def test_extra_file(wanted: Wanted, files: dict[str, Any], extra: str, severity: Severity) -> None:
    made = plan(wanted, release=tree(files, extra=[extra]))
    (finding,) = [item for item in made.findings if item.code == "WEIGHTS-EXTRA"]
    assert finding.severity is severity
    assert finding.fix == f"move /models/lab/toy/r1/{extra} elsewhere"


def test_something_else_stands_in_the_way(wanted: Wanted) -> None:
    made = plan(wanted, release={**EMPTY, "state": "foreign", "kind": "a symbolic link"})
    assert made.steps == ()
    (finding,) = made.findings
    assert finding.code == "WEIGHTS-PATH"
    assert "/models/lab/toy/r1 is a symbolic link" in finding.message


# ---- sources


def test_a_path_that_holds_the_model_comes_first(wanted: Wanted) -> None:
    wanted = dataclasses.replace(wanted, paths=("/mnt/a", "/mnt/b"), hub=True)
    paths = {"/mnt/a": EMPTY, "/mnt/b": tree({name: [pin.size, None] for name, pin in FILES.items()})}
    (step,) = plan(wanted, paths=paths).of(Action.VERIFY)
    assert step.trees == ("/mnt/b",)
    made = plan(wanted, paths={**paths, "/mnt/b": tree(GOOD)}, verified=True, free=0)
    (step,) = made.steps
    assert step.links == {name: f"/mnt/b/{name}" for name in FILES}
    assert (step.send, step.fetch, step.size) == ((), (), 0)
    assert step.summary() == "/models/lab/toy/r1: missing, linked to /mnt/b"
    assert codes(made) == ["WEIGHTS-HOLDER"]
    assert "/mnt/a is not there: it is not used" in made.findings[0].message


def test_a_path_without_the_model_is_said_and_the_next_source_is_used(wanted: Wanted) -> None:
    wanted = dataclasses.replace(wanted, paths=("/mnt/a",))
    made = plan(wanted, paths={"/mnt/a": tree({"config.json": [4, "1" * 64]})})
    assert made.steps[0].send == tuple(sorted(FILES))
    assert codes(made) == ["WEIGHTS-MISSING"]
    assert "/mnt/a: model.safetensors is missing; it is not used" in made.findings[0].message
    made = plan(wanted, paths={"/mnt/a": {**EMPTY, "state": "foreign", "kind": "a file"}})
    assert "/mnt/a is a file: it is not used" in made.findings[0].message


def test_the_hub_comes_last(wanted: Wanted) -> None:
    (step,) = plan(dataclasses.replace(wanted, hub=True)).steps
    assert (step.send, step.fetch) == (tuple(sorted(FILES)), ())
    gone = dataclasses.replace(wanted, hub=True, source="/nowhere")
    made = plan(gone)
    assert (made.steps[0].send, made.steps[0].fetch) == ((), tuple(sorted(FILES)))
    assert made.findings == ()
    assert made.steps[0].summary() == "/models/lab/toy/r1: missing, 2 files (0.0 MB) from the hub"
    half = plan(gone, incoming=tree({"model.safetensors": [60, None]}))
    assert (half.steps[0].fetch, half.steps[0].size) == (tuple(sorted(FILES)), 44)


def test_without_any_source_only_what_is_missing_is_a_problem(wanted: Wanted) -> None:
    bare = dataclasses.replace(wanted, source="")
    made = plan(bare)
    assert codes(made) == ["WEIGHTS-SOURCE"]
    assert "one of paths, source, hub" in made.findings[0].fix
    assert codes(plan(bare, release=tree(GOOD))) == []
    assert codes(plan(bare, incoming=tree(GOOD))) == []


def test_source_is_checked_before_anything_is_sent(wanted: Wanted, tmp_path: Path) -> None:
    assert codes(plan(wanted)) == []
    (tmp_path / "config.json").rename(tmp_path / "config.json.incomplete")
    (tmp_path / "model.safetensors").write_bytes(bytes(99))
    first, second = plan(wanted).findings
    assert (first.code, second.code) == ("WEIGHTS-SOURCE", "WEIGHTS-SOURCE")
    assert "config.json on the controller was never fetched to its end" in first.message
    assert "has 99 bytes where the manifest says 100" in second.message
    (tmp_path / "config.json.incomplete").unlink()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    first, second = plan(wanted).findings
    assert "cannot be read (No such file or directory)" in first.message
    assert "is not a regular file" in second.message


# ---- the host


@pytest.mark.parametrize(("free", "wrong"), [((64 << 20) + 104, []), ((64 << 20) + 103, ["WEIGHTS-SPACE"])])
def test_free_space(wanted: Wanted, free: int, wrong: list[str]) -> None:
    assert codes(plan(wanted, free=free)) == wrong


def test_full_disk_does_not_matter_when_nothing_is_sent(wanted: Wanted) -> None:
    assert plan(wanted, free=0, release=tree(GOOD)).findings == ()
    assert plan(wanted, free=0, release=tree({**GOOD, "config.json": [4, None]})).findings == ()


def test_host_without_rsync_or_systemd(wanted: Wanted) -> None:
    assert codes(plan(wanted, tools=["systemd-run"])) == ["WEIGHTS-RSYNC"]
    assert codes(plan(wanted, tools=["rsync"])) == ["WEIGHTS-SYSTEMD"]
    assert codes(plan(wanted, tools=[], release=tree(GOOD))) == []
    assert codes(plan(dataclasses.replace(wanted, source="", hub=True), tools=["systemd-run"])) == []


def test_another_run_is_named(wanted: Wanted) -> None:
    holder = {"by": "bob@desk:/src", "doing": "receiving lab/toy@r1", "pid": 4711}
    made = plan(wanted, holder=holder)
    assert codes(made) == ["WEIGHTS-BUSY"]
    assert "bob@desk:/src is at work there (receiving lab/toy@r1, process 4711 of the host)" in made.findings[0].message
    assert codes(plan(wanted, holder={**holder, "by": US})) == []
    assert codes(plan(wanted, holder=holder, job={"alive": True})) == []  # it is followed
    assert codes(plan(wanted)) == []


def test_argument_of_the_host(wanted: Wanted) -> None:
    text = weights.host_arguments("look", "/models", [wanted.for_host()], verify="full")
    assert json.loads(text) == {
        "action": "look",
        "root": "/models",
        "verify": "full",
        "models": [
            {
                "repository": "lab/toy",
                "revision": "r1",
                "files": {"config.json": [4, "1" * 64], "model.safetensors": [100, "2" * 64]},
                "paths": [],
            }
        ],
    }
    with pytest.raises(WeightsError, match="too many files for one call"):
        weights.host_arguments("look", "/models", [wanted.for_host()] * 1000)


@pytest.mark.parametrize("root", ["", "models", "/", "//", "/srv/../etc", "~/models"])
def test_root_has_to_be_below_the_top(root: str) -> None:
    with pytest.raises(WeightsError, match="model_weights_root is"):
        weights.root_of(root)


@pytest.mark.parametrize("root", ["/srv/models", "/srv/models/", "//srv//models", "/srv/./models//"])
def test_root_has_one_spelling(root: str) -> None:
    assert weights.root_of(root) == "/srv/models"
    assert filters()["pivot_weights_root"](root) == "/srv/models"


def test_the_role_uses_that_spelling_alone() -> None:
    tasks = {path.name: path.read_text() for path in (HOST_FILES.parent / "tasks").glob("*.yml")}
    assert [name for name, text in tasks.items() if re.search(r"\bmodel_weights_root", text)] == []
