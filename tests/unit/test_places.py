import os

import pytest

from pivot.places import directory_at, file_at


def test_files_and_directories(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert file_at(tmp_path / "file") == tmp_path / "file"
    assert file_at(str(tmp_path / "link")) == tmp_path / "link"
    assert directory_at(tmp_path) == tmp_path
    assert file_at(tmp_path) is None
    assert directory_at(tmp_path / "file") is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file_at("~/file") == tmp_path / "file"


@pytest.mark.parametrize(
    "name", ["", "nowhere", "x" * 300, "a\0b", "~nobody-of-that-name/x", "circle", "pipe", "\udcff"]
)
def test_names_that_are_nothing(name, tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    path = name if name[:1] in ("", "~") else f"{tmp_path}/{name}"
    assert file_at(path) is None
    assert directory_at(path) is None
