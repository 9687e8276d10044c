"""Manifests of model directories."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pivot.checkpoints import manifest as manifests
from pivot.checkpoints import tensors
from pivot.checkpoints.manifest import FilePin
from pivot.checkpoints.tensors import WeightsError

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
    manifest = manifests.build_manifest(model, "lab/toy", "r1")
    assert sorted(manifest.files) == ["config.json", "model.safetensors"]
    assert manifest.files["config.json"] == FilePin(hashlib.sha256(CONFIG).hexdigest(), 26)
    assert manifest.config == {"architectures": ["Toy"]}
    assert manifest.safetensors == {
        "model.safetensors": {"a": {"dtype": "BF16", "shape": [2, 3]}, "b": {"dtype": "BOOL", "shape": [4]}}
    }
    assert manifest.size == 26 + (model / "model.safetensors").stat().st_size


def test_manifest_survives_writing_and_loading(model: Path, tmp_path: Path) -> None:
    manifest = manifests.build_manifest(model, "lab/toy")
    path = tmp_path / "toy.json"
    path.write_text(manifests.render_manifest(manifest))
    assert manifests.load_manifest(path) == manifest
    assert json.loads(path.read_text())["format"] == 1


def test_revision_is_that_of_the_contents(model: Path, tmp_path: Path) -> None:
    files = {"b": FilePin("b" * 64, 2), "a": FilePin("a" * 64, 1)}
    text = f"{'a' * 64} 1 a\n{'b' * 64} 2 b\n"
    assert manifests.content_revision(files) == hashlib.sha256(text.encode()).hexdigest()[:40]
    first = manifests.build_manifest(model, "lab/toy").revision
    model.rename(tmp_path / "elsewhere")
    assert manifests.build_manifest(tmp_path / "elsewhere", "lab/toy").revision == first
    (tmp_path / "elsewhere" / "config.json").write_bytes(CONFIG + b"\n")
    assert manifests.build_manifest(tmp_path / "elsewhere", "lab/toy").revision != first


def test_link_is_refused(model: Path) -> None:
    (model / "tokenizer.json").symlink_to(model / "config.json")
    with pytest.raises(WeightsError, match=r"tokenizer\.json is a symbolic link"):
        manifests.build_manifest(model, "lab/toy")


def test_linked_directory_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "more").symlink_to(tmp_path)
    with pytest.raises(WeightsError, match="more is a symbolic link"):
        manifests.build_manifest(model, "lab/toy")


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
        manifests.build_manifest(model, "lab/toy")


def test_values_of_the_drafters_maps_are_kept(model: Path) -> None:
    entries = {
        "d2t": {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]},
        "fc.weight": {"dtype": "U8", "shape": [1], "data_offsets": [24, 25]},
    }
    (model / "model.safetensors").write_bytes(safetensors(entries, struct.pack("<3q", 1, 1, 4) + b"x"))
    marks = {"model.t2d": {"dtype": "BOOL", "shape": [8], "data_offsets": [0, 8]}}
    (model / "other.safetensors").write_bytes(safetensors(marks, bytes([0, 1, 1, 0, 0, 0, 1, 1])))
    found = manifests.build_manifest(model, "lab/toy").safetensors
    # 0 → 1, 1 → 2, 2 → 6; t2d marks 1, 2, 6, 7
    assert found["model.safetensors"]["d2t"]["values"] == {
        "least": 1, "most": 6, "distinct": 3, "ascending": True, "moved": 3, "like_ids": False, "marked": 3,
    }  # fmt: skip
    assert found["other.safetensors"]["model.t2d"]["values"] == {"marked": 4}
    assert "values" not in found["model.safetensors"]["fc.weight"]


def test_maps_that_are_larger_than_any_vocabulary_are_left_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"d2t": {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}}
    (model / "model.safetensors").write_bytes(safetensors(entries, bytes(24)))
    monkeypatch.setattr(tensors, "LARGEST_MAP", 16)
    assert manifests.build_manifest(model, "lab/toy").safetensors["model.safetensors"]["d2t"].keys() == {
        "dtype",
        "shape",
    }


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
        manifests.build_manifest(model, "lab/toy")


def test_a_config_larger_than_any(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "LARGEST_CONFIG", len(CONFIG))
    manifests.build_manifest(model, "lab/toy")
    (model / "config.json").write_bytes(CONFIG + b" ")
    with pytest.raises(WeightsError, match="more than 26 bytes"):
        manifests.build_manifest(model, "lab/toy")


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json"):
        manifests.build_manifest(tmp_path, "lab/toy")
    with pytest.raises(WeightsError, match="is not a directory"):
        manifests.build_manifest(tmp_path / "absent", "lab/toy")


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../x", "a//b", ".hidden", "-rf", "a\\b", "a\nb", "", 7])
def test_dangerous_file_names_are_refused(name: object) -> None:
    with pytest.raises(WeightsError):
        manifests.check_name(name, "here")


@pytest.mark.parametrize("name", ["config.json", "sub/model-00001-of-00002.safetensors", "a b.txt"])
def test_ordinary_file_names_pass(name: str) -> None:
    assert manifests.check_name(name, "here") == name


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
    assert manifests.parse_manifest(GOOD_MANIFEST, "toy.json").files == {"config.json": FilePin("0" * 64, 3)}
    with pytest.raises(WeightsError, match=message) as caught:
        manifests.parse_manifest({**GOOD_MANIFEST, **change}, "toy.json")
    assert str(caught.value).startswith("toy.json: ")


def test_unreadable_manifest(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        manifests.load_manifest(tmp_path / "absent.json")
    (tmp_path / "torn.json").write_text('{"format":')
    with pytest.raises(WeightsError, match="is not JSON"):
        manifests.load_manifest(tmp_path / "torn.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(WeightsError, match="a manifest is a JSON object"):
        manifests.load_manifest(tmp_path / "list.json")


def test_command_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "manifests" / "toy.json"
    assert manifests.main([str(model), "--repository", "lab/toy", "--output", str(out)]) == 0
    assert manifests.load_manifest(out).repository == "lab/toy"
    assert manifests.main([str(tmp_path / "absent"), "--repository", "lab/toy"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("pivot manifest: ")
    assert "Traceback" not in complaint


def test_the_directory_names_the_repository(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "owner").mkdir()
    model.rename(tmp_path / "owner/toy-1.0")
    assert manifests.main([str(tmp_path / "owner/toy-1.0")]) == 0
    assert json.loads(capsys.readouterr().out)["repository"] == "owner/toy-1.0"
    monkeypatch.chdir(tmp_path / "owner")
    assert manifests.main(["toy-1.0"]) == 0
    assert json.loads(capsys.readouterr().out)["repository"] == "owner/toy-1.0"


def test_a_download_that_never_ended_is_no_model(model: Path) -> None:
    (model / "model-2.safetensors.incomplete").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"model-2\.safetensors\.incomplete was never fetched to its end"):
        manifests.build_manifest(model, "lab/toy")


def test_what_the_hubs_client_left_unfinished_is_found_where_it_keeps_it(model: Path) -> None:
    left = model / ".cache/huggingface/download/sub/abc=.0123.incomplete"
    left.parent.mkdir(parents=True)
    (left.with_name("abc=.lock")).write_text("")
    manifests.build_manifest(model, "lab/toy")
    left.write_bytes(b"half")
    with pytest.raises(WeightsError, match=r"0123\.incomplete was never fetched to its end"):
        manifests.build_manifest(model, "lab/toy")


def test_a_pointer_of_git_lfs_is_no_file_of_a_model(model: Path) -> None:
    (model / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2\n")
    with pytest.raises(WeightsError, match=r"tokenizer\.model only points to its content: git lfs pull fetches it"):
        manifests.build_manifest(model, "lab/toy")
    (model / "tokenizer.model").write_text("version 1\n")
    manifests.build_manifest(model, "lab/toy")


def test_every_shard_of_the_index_has_to_be_there(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    manifests.build_manifest(model, "lab/toy")
    index["weight_map"]["c"] = "model-2.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"names 1 files that are not there, model-2\.safetensors among them"):
        manifests.build_manifest(model, "lab/toy")
    for wrong in ("[]", '{"weight_map": {"a": 1}}', "{"):
        (model / "model.safetensors.index.json").write_text(wrong)
        with pytest.raises(WeightsError, match=r"index\.json (is no index|is not JSON)"):
            manifests.build_manifest(model, "lab/toy")
