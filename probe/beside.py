"""The probe as it lies beside an engine: the package and a dist-info, in a directory for PYTHONPATH."""

from __future__ import annotations

import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent


def install(directory: Path) -> Path:
    """Write the probe into this directory; returns it."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for path in (HERE / "src" / "pivot_probe").glob("*.py"):
        _write(directory / "pivot_probe" / path.name, path.read_text(encoding="utf-8"))
    register(directory, project["name"].replace("-", "_"), project["version"], project["entry-points"])
    return directory


def register(directory: Path, name: str, version: str, groups: dict[str, dict[str, str]]) -> None:
    """Write a dist-info with these entry points, which is how SGLang finds a plugin."""
    info = directory / f"{name}-{version}.dist-info"
    _write(info / "METADATA", f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    sections = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in group_entries.items())
        for group, group_entries in groups.items()
    )
    _write(info / "entry_points.txt", "\n".join(sections))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
