"""Manifests, and the plan that follows from a host's report."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pivot import weights
from pivot.findings import Severity
from pivot.transfer import TransferError
from pivot.weights import Action, FilePin, Manifest, Wanted, WeightsError

CONFIG = b'{"architectures": ["Toy"]}'


def safetensors(tensors: dict[str, Any], data: bytes, *, cut: int = 0) -> bytes:
    header = json.dumps(tensors).encode()
    raw = struct.pack("<Q", len(header)) + header + data
    return raw[: len(raw) - cut]


TENSORS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "BOOL", "shape": [4], "data_offsets": [12, 16]},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_bytes(CONFIG)
    (directory / "model.safetensors").write_bytes(safetensors(TENSORS, bytes(16)))
    (directory / ".gitattributes").write_text("hidden files are no part of a model")
    (directory / "__pycache__").mkdir()
    (directory / "__pycache__" / "x.pyc").write_bytes(b"x")
    return directory


# ---- manifests


def test_manifest_of_a_directory(model: Path) -> None:
    manifest = weights.build_manifest(model, "lab/toy", "r1")
    assert sorted(manifest.files) == ["config.json", "model.safetensors"]
    assert manifest.files["config.json"] == FilePin(hashlib.sha256(CONFIG).hexdigest(), 26)
    assert manifest.config == {"architectures": ["Toy"]}
    assert manifest.safetensors == {
        "model.safetensors": {"a": {"dtype": "BF16", "shape": [2, 3]}, "b": {"dtype": "BOOL", "shape": [4]}}
    }
    assert manifest.size == 26 + (model / "model.safetensors").stat().st_size


def test_manifest_survives_writing_and_loading(model: Path, tmp_path: Path) -> None:
    manifest = weights.build_manifest(model, "lab/toy")
    path = tmp_path / "toy.json"
    path.write_text(weights.render_manifest(manifest))
    assert weights.load_manifest(path) == manifest
    assert json.loads(path.read_text())["format"] == 1


def test_revision_is_that_of_the_contents(model: Path, tmp_path: Path) -> None:
    files = {"b": FilePin("b" * 64, 2), "a": FilePin("a" * 64, 1)}
    text = f"{'a' * 64} 1 a\n{'b' * 64} 2 b\n"
    assert weights.content_revision(files) == hashlib.sha256(text.encode()).hexdigest()[:40]
    first = weights.build_manifest(model, "lab/toy").revision
    model.rename(tmp_path / "elsewhere")
    assert weights.build_manifest(tmp_path / "elsewhere", "lab/toy").revision == first
    (tmp_path / "elsewhere" / "config.json").write_bytes(CONFIG + b"\n")
    assert weights.build_manifest(tmp_path / "elsewhere", "lab/toy").revision != first


def test_link_is_refused(model: Path) -> None:
    (model / "tokenizer.json").symlink_to(model / "config.json")
    with pytest.raises(WeightsError, match=r"tokenizer\.json is a symbolic link"):
        weights.build_manifest(model, "lab/toy")


def test_linked_directory_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "more").symlink_to(tmp_path)
    with pytest.raises(WeightsError, match="more is a symbolic link"):
        weights.build_manifest(model, "lab/toy")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file, or it is truncated"),
        (struct.pack("<Q", 1 << 60) + b"{}", "not a safetensors file, or it is truncated"),
        (struct.pack("<Q", 2) + b"[]", "unreadable safetensors header"),
        (struct.pack("<Q", 3) + b"{x}", "unreadable safetensors header"),
        (safetensors({"a": {"dtype": "BF16"}}, b""), "unreadable safetensors header"),
        (safetensors(TENSORS, bytes(16), cut=1), "where its header needs"),
        (safetensors({"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 4]}}, bytes(4)), "does not take"),
        (safetensors({"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)), "unknown dtype 'X9'"),
        (
            safetensors({"a": {"dtype": "U8", "shape": [4], "data_offsets": [1, 5]}}, bytes(5)),
            "begins at 1, where 0 is",
        ),
        (
            safetensors({n: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for n in "ab"}, bytes(4)),
            "tensor b begins",
        ),
        (safetensors({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [4, 0]}}, bytes(4)), "no tensor has"),
        (safetensors({"a": {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]}}, bytes(4)), "no tensor has"),
        (safetensors({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, bytes(1)), "no tensor has"),
        (safetensors({"a": {"dtype": "U8", "shape": [0, 10**400], "data_offsets": [0, 0]}}, b""), "no tensor has"),
        (safetensors({"\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, b""), "cannot be printed"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "unreadable safetensors header"),
    ],
)
def test_bad_safetensors_file(model: Path, content: bytes, message: str) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        weights.build_manifest(model, "lab/toy")


def test_values_of_the_drafters_maps_are_kept(model: Path) -> None:
    entries = {
        "d2t": {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]},
        "fc.weight": {"dtype": "U8", "shape": [1], "data_offsets": [24, 25]},
    }
    (model / "model.safetensors").write_bytes(safetensors(entries, struct.pack("<3q", 1, 1, 4) + b"x"))
    marks = {"model.t2d": {"dtype": "BOOL", "shape": [8], "data_offsets": [0, 8]}}
    (model / "other.safetensors").write_bytes(safetensors(marks, bytes([0, 1, 1, 0, 0, 0, 1, 1])))
    found = weights.build_manifest(model, "lab/toy").safetensors
    # 0 → 1, 1 → 2, 2 → 6; t2d marks 1, 2, 6, 7
    assert found["model.safetensors"]["d2t"]["values"] == {
        "least": 1, "most": 6, "distinct": 3, "ascending": True, "moved": 3, "like_ids": False, "marked": 3,
    }  # fmt: skip
    assert found["other.safetensors"]["model.t2d"]["values"] == {"marked": 4}
    assert "values" not in found["model.safetensors"]["fc.weight"]


def test_maps_that_are_larger_than_any_vocabulary_are_left_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"d2t": {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}}
    (model / "model.safetensors").write_bytes(safetensors(entries, bytes(24)))
    monkeypatch.setattr(weights, "LARGEST_MAP", 16)
    assert weights.build_manifest(model, "lab/toy").safetensors["model.safetensors"]["d2t"].keys() == {"dtype", "shape"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "is no JSON object"),
        (b"[" * 100_000, "nested without an end"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b'{"a": "\\ud800"}', "holds half a character"),
    ],
)
def test_bad_config(model: Path, content: bytes, message: str) -> None:
    (model / "config.json").write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        weights.build_manifest(model, "lab/toy")


def test_a_config_larger_than_any(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LARGEST_CONFIG", len(CONFIG))
    weights.build_manifest(model, "lab/toy")
    (model / "config.json").write_bytes(CONFIG + b" ")
    with pytest.raises(WeightsError, match="more than 26 bytes"):
        weights.build_manifest(model, "lab/toy")


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json"):
        weights.build_manifest(tmp_path, "lab/toy")
    with pytest.raises(WeightsError, match="is not a directory"):
        weights.build_manifest(tmp_path / "absent", "lab/toy")


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../x", "a//b", ".hidden", "-rf", "a\\b", "a\nb", "", 7])
def test_dangerous_file_names_are_refused(name: object) -> None:
    with pytest.raises(WeightsError):
        weights.check_name(name, "here")


@pytest.mark.parametrize("name", ["config.json", "sub/model-00001-of-00002.safetensors", "a b.txt"])
def test_ordinary_file_names_pass(name: str) -> None:
    assert weights.check_name(name, "here") == name


GOOD_MANIFEST: dict[str, Any] = {
    "format": 1,
    "repository": "lab/toy",
    "revision": "r1",
    "files": {"config.json": {"sha256": "0" * 64, "size": 3}},
    "config": {},
    "safetensors": {},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "manifest format 2 is not 1"),
        ({"files": {}}, "lists no files"),
        ({"files": {"../x": {"sha256": "0" * 64, "size": 3}}}, "has to be relative"),
        ({"files": {"x": {"sha256": "short", "size": 3}}}, "no sha256 of 64 hex digits"),
        ({"files": {"x": {"sha256": "0" * 64, "size": -1}}}, "no size in bytes"),
        ({"files": {"x": {"sha256": "0" * 64, "size": True}}}, "no size in bytes"),
        ({"files": {"x": "y"}}, "no sha256"),
        ({"repository": "../lab"}, "the repository '../lab'"),
        ({"repository": "a/b/c"}, "the repository 'a/b/c'"),
        ({"revision": "a/b"}, "the revision 'a/b'"),
        ({"config": None}, "needs 'config' and 'safetensors'"),
    ],
)
def test_bad_manifest(change: dict[str, Any], message: str) -> None:
    assert weights.parse_manifest(GOOD_MANIFEST, "toy.json").files == {"config.json": FilePin("0" * 64, 3)}
    with pytest.raises(WeightsError, match=message) as caught:
        weights.parse_manifest({**GOOD_MANIFEST, **change}, "toy.json")
    assert str(caught.value).startswith("toy.json: ")


def test_unreadable_manifest(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        weights.load_manifest(tmp_path / "absent.json")
    (tmp_path / "torn.json").write_text('{"format":')
    with pytest.raises(WeightsError, match="is not JSON"):
        weights.load_manifest(tmp_path / "torn.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(WeightsError, match="a manifest is a JSON object"):
        weights.load_manifest(tmp_path / "list.json")


def test_command_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "manifests" / "toy.json"
    assert weights.main([str(model), "--repository", "lab/toy", "--output", str(out)]) == 0
    assert weights.load_manifest(out).repository == "lab/toy"
    assert weights.main([str(tmp_path / "absent"), "--repository", "lab/toy"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("pivot manifest: ")
    assert "Traceback" not in complaint


def test_the_directory_names_the_repository(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "owner").mkdir()
    model.rename(tmp_path / "owner/toy-1.0")
    assert weights.main([str(tmp_path / "owner/toy-1.0")]) == 0
    assert json.loads(capsys.readouterr().out)["repository"] == "owner/toy-1.0"
    monkeypatch.chdir(tmp_path / "owner")
    assert weights.main(["toy-1.0"]) == 0
    assert json.loads(capsys.readouterr().out)["repository"] == "owner/toy-1.0"


# ---- what is wanted


def entry(tmp_path: Path, **change: str) -> dict[str, str]:
    (tmp_path / "toy.json").write_text(json.dumps(GOOD_MANIFEST))
    return {
        "repository": "lab/toy",
        "revision": "r1",
        "source": str(tmp_path),
        "manifest": str(tmp_path / "toy.json"),
        **change,
    }


def test_wanted_models_are_loaded(tmp_path: Path) -> None:
    assert [item.key for item in weights.want([entry(tmp_path)])] == ["lab/toy@r1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"revision": "r2"}, r"entry 1: revision is 'r2', but .* says 'r1'"),
        ({"repository": "lab/other"}, "repository is 'lab/other'"),
        ({"source": "relative"}, "source is 'relative', it has to be an absolute path"),
        ({"manifest": ""}, "entry 1: manifest missing"),
    ],
)
def test_pin_and_manifest_have_to_agree(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        weights.want([entry(tmp_path, **change)])


def test_a_model_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="names a model twice"):
        weights.want([entry(tmp_path), entry(tmp_path)])


# ---- plans

FILES = {"config.json": FilePin("1" * 64, 4), "model.safetensors": FilePin("2" * 64, 100)}


@pytest.fixture
def wanted(tmp_path: Path) -> Wanted:
    (tmp_path / "config.json").write_bytes(bytes(4))
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    return Wanted(Manifest("lab/toy", "r1", FILES, {}, {}), str(tmp_path))


def report(*, free: int = 1 << 40, rsync: bool = True, **parts: Any) -> dict[str, Any]:
    release = {
        "state": "absent",
        "kind": "",
        "problems": {},
        "good": [],
        "extra": [],
        "recorded": False,
        "signatures": {},
        "modes": [],
    }
    model = {
        "repository": "lab/toy",
        "revision": "r1",
        "release": {**release, **parts.get("release", {})},
        "incoming": {"files": {}, "good": [], **parts.get("incoming", {})},
        "leftovers": parts.get("leftovers", []),
    }
    return {"root": "/models", "free_bytes": free, "rsync": rsync, "models": [model]}


COMPLETE: dict[str, Any] = {
    "state": "present",
    "good": ["config.json", "model.safetensors"],
    "recorded": True,
    "signatures": {"config.json": [4, 1, 1, 1], "model.safetensors": [100, 1, 2, 1]},
}


def test_nothing_to_do(wanted: Wanted) -> None:
    made = weights.plan([wanted], report(release=COMPLETE))
    assert made.steps == ()
    assert made.findings == ()


def test_everything_is_missing(wanted: Wanted) -> None:
    made = weights.plan([wanted], report())
    (step,) = made.steps
    assert step.action is Action.PUBLISH
    assert step.send == ("config.json", "model.safetensors")
    assert step.size == 104
    assert step.intact == ()
    assert step.incoming == "/models/lab/toy/.incoming-r1"
    assert step.summary() == "/models/lab/toy/r1: missing, 2 files (0.0 MiB) to send"
    assert made.findings == ()
    assert made.of(Action.PUBLISH) == [step]
    assert made.of(Action.SETTLE) == []


def test_damaged_release_is_named_and_only_the_damage_is_sent(wanted: Wanted) -> None:
    damage = {
        "state": "present",
        "good": ["config.json"],
        "problems": {"model.safetensors": "has sha256 0000…"},
    }
    made = weights.plan([wanted], report(release=damage))
    (step,) = made.steps
    assert (step.send, step.intact, step.why) == (("model.safetensors",), ("config.json",), "damaged")
    (finding,) = made.findings
    assert (finding.code, finding.severity) == ("WEIGHTS-DAMAGED", Severity.WARNING)
    assert "model.safetensors has sha256 0000…" in finding.message


def test_interrupted_transfer_is_continued(wanted: Wanted) -> None:
    made = weights.plan([wanted], report(incoming={"files": {"model.safetensors": 60}, "good": ["config.json"]}))
    (step,) = made.steps
    assert (step.send, step.size, step.why) == (("model.safetensors",), 40, "interrupted before")
    assert step.intact == ()


def test_interrupted_before_publication_sends_nothing(wanted: Wanted) -> None:
    made = weights.plan([wanted], report(incoming={"good": sorted(FILES)}, leftovers=[".replaced-r1-7"], rsync=False))
    (step,) = made.steps
    assert (step.action, step.send, step.size) == (Action.PUBLISH, (), 0)
    assert made.findings == ()


@pytest.mark.parametrize(
    ("change", "leftovers", "why"),
    [
        ({"recorded": False}, [], "verification to be recorded"),
        ({"modes": ["config.json"]}, [], "modes or leftovers to be put in order"),
        ({}, [".incoming-r1"], "modes or leftovers to be put in order"),
    ],
)
def test_good_release_is_settled(wanted: Wanted, change: dict[str, Any], leftovers: list[str], why: str) -> None:
    made = weights.plan([wanted], report(release={**COMPLETE, **change}, leftovers=leftovers))
    (step,) = made.steps
    assert (step.action, step.why) == (Action.SETTLE, why)
    assert step.for_host()["signatures"] == COMPLETE["signatures"]
    assert made.findings == ()


@pytest.mark.parametrize(
    ("release", "extra", "severity"),
    [
        (COMPLETE, "notes.txt", Severity.WARNING),
        (COMPLETE, "other.safetensors", Severity.ERROR),
        ({"state": "present", "problems": {"config.json": "is missing"}}, "notes.txt", Severity.ERROR),
    ],
)
def test_extra_file(wanted: Wanted, release: dict[str, Any], extra: str, severity: Severity) -> None:
    made = weights.plan([wanted], report(release={**release, "extra": [extra]}))
    (finding,) = [item for item in made.findings if item.code == "WEIGHTS-EXTRA"]
    assert finding.severity is severity
    assert finding.fix == f"move /models/lab/toy/r1/{extra} elsewhere"


def test_something_else_stands_in_the_way(wanted: Wanted) -> None:
    made = weights.plan([wanted], report(release={"state": "foreign", "kind": "a symbolic link"}))
    assert made.steps == ()
    (finding,) = made.findings
    assert finding.code == "WEIGHTS-PATH"
    assert "/models/lab/toy/r1 is a symbolic link" in finding.message


@pytest.mark.parametrize(("free", "codes"), [((64 << 20) + 104, []), ((64 << 20) + 103, ["WEIGHTS-SPACE"])])
def test_free_space(wanted: Wanted, free: int, codes: list[str]) -> None:
    assert [item.code for item in weights.plan([wanted], report(free=free)).findings] == codes


def test_full_disk_does_not_matter_when_nothing_is_sent(wanted: Wanted) -> None:
    assert weights.plan([wanted], report(free=0, release=COMPLETE)).findings == ()


def test_host_without_rsync(wanted: Wanted) -> None:
    (finding,) = weights.plan([wanted], report(rsync=False)).findings
    assert finding.code == "WEIGHTS-RSYNC"
    assert weights.plan([wanted], report(rsync=False, release=COMPLETE)).findings == ()


def test_source_is_checked_before_anything_is_sent(wanted: Wanted, tmp_path: Path) -> None:
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(bytes(99))
    first, second = weights.plan([wanted], report()).findings
    assert (first.code, second.code) == ("WEIGHTS-SOURCE", "WEIGHTS-SOURCE")
    assert "cannot be read (No such file or directory)" in first.message
    assert "has 99 bytes where the manifest says 100" in second.message


def test_argument_of_the_host(wanted: Wanted) -> None:
    text = weights.host_arguments("inspect", "/models", [wanted.for_host()], verify="full")
    assert json.loads(text) == {
        "action": "inspect",
        "root": "/models",
        "verify": "full",
        "models": [
            {
                "repository": "lab/toy",
                "revision": "r1",
                "files": {"config.json": [4, "1" * 64], "model.safetensors": [100, "2" * 64]},
            }
        ],
    }
    with pytest.raises(WeightsError, match="too many files for one call"):
        weights.host_arguments("inspect", "/models", [wanted.for_host()] * 1000)


@pytest.mark.parametrize("root", ["", "models", "/", "/srv/../etc", "~/models"])
def test_root_has_to_be_plain(wanted: Wanted, root: str) -> None:
    with pytest.raises(WeightsError, match="model_weights_root is"):
        weights.host_arguments("inspect", root, [wanted.for_host()])


# ---- sending


def test_rsync_command() -> None:
    call = weights.rsync_command(
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
    )
    assert call[0] == "rsync"
    assert not any(word.startswith("--delete") for word in call)
    assert call[call.index("--rsh") + 1] == (
        "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -p 2222 -i '/keys/a key' -o UserKnownHostsFile=/keys/known"
    )
    assert call[-2:] == ["/src/", "root@10.0.0.5:/models/lab/toy/.incoming-r1/"]


def test_rsync_without_ssh_and_over_ipv6() -> None:
    local = weights.rsync_command("/src", "/dst", {"inventory_hostname": "here", "ansible_connection": "local"})
    assert "--rsh" not in local
    assert local[-2:] == ["/src/", "/dst/"]
    distant = weights.rsync_command("/src", "/dst", {"inventory_hostname": "x", "ansible_host": "fd00::5"})
    assert distant[-1] == "[fd00::5]:/dst/"
    assert weights.rsync_command("/src", "/dst", {"inventory_hostname": "x"})[-1] == "x:/dst/"


def test_quotes_that_rsync_cannot_pass_on() -> None:
    with pytest.raises(TransferError, match="holds an apostrophe"):
        weights.rsync_command("/src", "/dst", {"inventory_hostname": "x", "ansible_ssh_private_key_file": "/keys/it's"})
