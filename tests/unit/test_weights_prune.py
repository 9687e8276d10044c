"""Old releases: what can go, what stays, and that only what was named is removed."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pivot.checkpoints import weights_prune
from pivot.findings import Severity

from .test_manifest import GOOD_MANIFEST
from .weights_host import FILES, filters

SCRIPT = (FILES / "weights_prune.py").read_text()
OLD, NEW = "lab/toy@r1", "lab/toy@r2"


def report(**users: list[str]) -> dict[str, Any]:
    releases = {
        name: {"bytes": 2 * 10**9, "users": users.get(name.split("@")[1], []), "links": [], "sets": []}
        for name in (OLD, NEW)
    }
    left = {
        name: {"bytes": 5, "users": [], "links": [], "sets": []}
        for name in ("lab/toy@.incoming-r2", "lab/toy@.replaced-r1-77")
    }
    return {"releases": releases, "leftovers": left}


def test_what_nobody_wants_can_go() -> None:
    made = weights_prune.decide([NEW], report(), [], "infer1")
    assert made.removable == {OLD: 2 * 10**9, "lab/toy@.replaced-r1-77": 5}
    assert (made.remove, made.findings) == ((), ())
    assert weights_prune.summary(made, "infer1").splitlines() == [
        "lab/toy@r1: can go, frees 2.0 GB",
        "lab/toy@r2: stays, the inventory wants it",
        "lab/toy@.incoming-r2: stays, the inventory wants it",
        "lab/toy@.replaced-r1-77: can go, frees 0.0 MB",
        "all that can go frees 2.0 GB; to remove it: ansible-playbook playbooks/prune.yml --limit infer1"
        " -e '{model_weights_prune: [lab/toy@r1, lab/toy@.replaced-r1-77]}'",
    ]


def test_what_a_rollback_needs_can_go_and_is_told() -> None:
    kept = report()
    kept["releases"][OLD]["sets"] = ["/var/lib/pivot/sglang/healthy.json"]
    needed = "but a rollback to what /var/lib/pivot/sglang/healthy.json keeps needs it"
    made = weights_prune.decide([NEW], kept, [], "infer1")
    assert f"lab/toy@r1: can go, frees 2.0 GB, {needed}" in made.lines
    made = weights_prune.decide([NEW], kept, [OLD], "infer1")
    assert f"lab/toy@r1: is removed, frees 2.0 GB, {needed}" in made.lines
    assert made.remove == (OLD,)


def test_only_what_is_named_is_removed() -> None:
    made = weights_prune.decide([NEW], report(), [OLD], "infer1")
    assert made.remove == (OLD,)
    assert made.findings == ()
    assert "lab/toy@r1: is removed, frees 2.0 GB" in weights_prune.summary(made, "infer1")


@pytest.mark.parametrize(
    ("name", "users", "message"),
    [
        (NEW, {}, "lab/toy@r2 stays: the inventory wants it"),
        (OLD, {"r1": ["process 7 (python)"]}, "lab/toy@r1 stays: used by process 7 (python)"),
        (
            OLD,
            {"r1": [f"process {n} (x)" for n in range(5)]},
            "used by process 0 (x), process 1 (x), process 2 (x) and 2",
        ),
        ("lab/toy@r9", {}, "there is no lab/toy@r9"),
    ],
)
def test_what_has_to_stay_is_a_finding(name: str, users: dict[str, list[str]], message: str) -> None:
    made = weights_prune.decide([NEW], report(**users), [name], "infer1")
    (finding,) = made.findings
    assert finding.code == "WEIGHTS-PRUNE"
    assert message in finding.message
    # what another host of the run has, or what is gone already, stops nothing
    assert finding.severity is (Severity.WARNING if message.startswith("there is no") else Severity.ERROR)
    assert made.remove == ()


@pytest.mark.parametrize(
    ("links", "reason"),
    [([NEW], f"{NEW} links to it"), ([NEW, "lab/toy@r3"], f"{NEW}, lab/toy@r3 link to it")],
)
def test_what_another_release_links_to_stays(links: list[str], reason: str) -> None:
    linked = report(r1=["process 7 (python)"])
    linked["releases"][OLD]["links"] = links
    made = weights_prune.decide([NEW], linked, [OLD], "infer1")
    assert f"{OLD}: stays, {reason}" in made.lines
    assert made.remove == ()
    assert made.findings[0].message == f"{OLD} stays: {reason}"


def test_nothing_can_go() -> None:
    made = weights_prune.decide([NEW], report(r1=["/etc/sglang/launch.yaml"]), [], "infer1")
    assert made.removable == {"lab/toy@.replaced-r1-77": 5}
    empty = weights_prune.decide([], {"releases": {}, "leftovers": {}}, [], "infer1")
    assert weights_prune.summary(empty, "infer1") == "nothing can go"


def test_paths_of_settings_name_releases() -> None:
    paths = ["/models/lab/toy/r1", "", "/opt/x", "//models//toy/r2/"]
    assert weights_prune.keys(paths, "/models") == ["lab/toy@r1", "toy@r2"]


# ---- on the host


@pytest.fixture
def root(tmp_path: Path) -> Path:
    base = tmp_path / "models/lab/toy"
    for revision in ("r1", "r2"):
        (base / revision).mkdir(parents=True)
        (base / revision / "model.safetensors").write_bytes(bytes(100_000))
        (base / f".verified-{revision}.json").write_text("{}")
    (base / "mine").mkdir()  # nobody verified it: not ours
    (base / ".replaced-r0-7").mkdir()
    os.link(base / "r1/model.safetensors", base / "r1/same")
    return tmp_path / "models"


def run(
    root: Path, keep: list[Path], *names: str, sets: str = "/nothing", paths: Mapping[str, list[str]] = {}
) -> dict[str, Any]:
    lists = {"keep": list(map(str, keep)), "sets": [sets], "remove": names}
    argument = json.dumps({"root": str(root), **lists, "paths": paths})
    line = [sys.executable, "-I", "-", argument]
    done = subprocess.run(line, input=SCRIPT, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_listing_changes_nothing(root: Path) -> None:
    before = sorted(map(str, root.rglob("*")))
    found = run(root, [])
    assert list(found["releases"]) == [OLD, NEW]
    assert list(found["leftovers"]) == ["lab/toy@.replaced-r0-7"]
    assert found["releases"][NEW] == {"bytes": pytest.approx(100_000, abs=8192), "users": [], "links": [], "sets": []}
    assert found["releases"][OLD]["bytes"] == 0  # another name keeps the file
    assert found["removed"] == []
    assert sorted(map(str, root.rglob("*"))) == before


def test_removing_takes_only_what_was_named(root: Path) -> None:
    found = run(root, [], OLD, "lab/toy@.replaced-r0-7")
    assert found["removed"] == [OLD, "lab/toy@.replaced-r0-7"]
    assert sorted(path.name for path in (root / "lab/toy").iterdir()) == [".verified-r2.json", "mine", "r2"]


def test_users_are_found(root: Path, tmp_path: Path) -> None:
    settings = tmp_path / "etc"
    settings.mkdir()
    (settings / "launch.yaml").write_text(f"model-path: {root}/lab/toy/r1\n")
    (settings / "view").symlink_to(root / "lab/toy/r2/model.safetensors")
    found = run(root, [settings, tmp_path / "nothing"])["releases"]
    assert found[OLD]["users"] == [str(settings / "launch.yaml")]
    assert found[NEW]["users"] == [str(settings / "view")]
    with (root / "lab/toy/r1/model.safetensors").open() as stream:
        code = "import sys; print(flush=True); sys.stdin.read()"
        command = [sys.executable, "-c", code]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[stream.fileno()]
        ) as other:
            assert other.stdout is not None
            other.stdout.readline()
            assert any(f"process {other.pid} (" in user for user in run(root, [])["releases"][OLD]["users"])
            assert run(root, [], OLD)["removed"] == []
            assert (root / "lab/toy/r1").exists()


def test_a_release_is_found_in_use_below_a_linked_root_and_by_its_whole_name(root: Path, tmp_path: Path) -> None:
    link, settings = tmp_path / "link", tmp_path / "launch.yaml"
    link.symlink_to(root)
    for path in (root, link):
        settings.write_text(f"model-path: {path}/lab/toy/r1\n")
        assert run(link, [settings])["releases"][OLD]["users"] == [str(settings)]
        settings.write_text(f"model-path: {path}/lab/toy/r10\n")
        assert run(link, [settings])["releases"][OLD]["users"] == []
    for doubled in (f"{root}//lab/toy/r1", f"{root}/lab/.//toy//r1/"):
        settings.write_text(f"model-path: {doubled}\n")
        assert run(root, [settings], OLD)["releases"][OLD]["users"] == [str(settings)]
    settings.write_text(f"model-path: {root}/lab/toy/r1/model.safetensors\n")
    assert run(root, [settings])["releases"][OLD]["users"] == [str(settings)]


def test_names_that_are_no_utf8_are_written_out(root: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    (root / f"lab/toy/.replaced-{odd}-7").mkdir()
    (tmp_path / odd).write_text(f"{root}/lab/toy/r1")
    found = run(root, [tmp_path / odd])
    assert found["releases"][OLD]["users"] == [f"{tmp_path}/caf\\xe9"]
    left = "lab/toy@.replaced-caf\\xe9-7"
    assert left in found["leftovers"]
    assert run(root, [], left)["removed"] == [left]


def test_a_set_that_may_come_back_is_no_user(root: Path, tmp_path: Path) -> None:
    kept = tmp_path / "pivot/sglang/healthy.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"sets": [{"files": [{"text": f"model-path: {root}/lab/toy/r1\n"}]}]}))
    found = run(root, [], sets=str(tmp_path / "pivot"))["releases"]
    assert (found[OLD]["sets"], found[NEW]["sets"]) == ([str(kept)], [])
    assert found[OLD]["users"] == []
    assert run(root, [], OLD, sets=str(tmp_path / "pivot"))["removed"] == [OLD]


def test_links_to_a_holder_go_and_the_holder_stays(root: Path, tmp_path: Path) -> None:
    holder = tmp_path / "mnt/model.safetensors"
    holder.parent.mkdir()
    holder.write_bytes(bytes(100_000))
    (root / "lab/toy/r2/model.safetensors").unlink()
    (root / "lab/toy/r2/model.safetensors").symlink_to(holder)
    assert run(root, [], NEW)["removed"] == [NEW]
    assert holder.exists()


def test_a_release_that_another_links_to_stays(root: Path, tmp_path: Path) -> None:
    base, alias = root / "lab/toy", tmp_path / "alias"
    alias.symlink_to(root)
    (base / "r2/sub").mkdir()
    for at, leads in [("model.safetensors", alias / "lab/toy/r1/model.safetensors"), ("sub/x", Path("../../r1/same"))]:
        (base / "r2" / at).unlink(missing_ok=True)
        (base / "r2" / at).symlink_to(leads)
        found = run(root, [], OLD)
        assert (found["removed"], found["releases"][OLD]["links"]) == ([], [NEW])
        (base / "r2" / at).unlink()
    assert (base / "r1/model.safetensors").exists()
    (base / "r1/own").symlink_to("same")
    assert run(root, [], OLD)["removed"] == [OLD]


def test_a_path_of_a_wanted_model_stays_before_anything_links_to_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    for path in (f"{root}/lab/toy/r1", f"{tmp_path}/alias/lab/toy/r1"):
        found = run(root, [], OLD, paths={"lab/toy@r9": [path]})
        assert (found["removed"], found["releases"][OLD]["links"]) == ([], ["lab/toy@r9"])


def test_what_the_host_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text(json.dumps(GOOD_MANIFEST))
    entry = {"repository": "lab/toy", "revision": "r1", "manifest": str(tmp_path / "toy.json")}
    given = {"root": "/models", "models": [{**entry, "paths": ["/mnt/toy"]}], "keep": ["/etc/x"], "sets": ["/var/x"]}
    asked = json.loads(filters()["pivot_weights_pruning"](given, [OLD]))
    assert asked["paths"] == {"lab/toy@r1": ["/mnt/toy"]}
    assert (asked["keep"], asked["sets"], asked["remove"]) == (["/etc/x"], ["/var/x"], [OLD])
