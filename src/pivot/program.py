"""A script or a package as the text of one program, for the interpreter of a host.

It reaches the host in one round trip and leaves nothing there. What it imports of `pivot` travels with it, of this very
version, so such modules need the standard library alone and Python 3.9.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

_RUN = """\
import importlib.abc, importlib.util, runpy, sys

MAIN, SOURCES = {main!r}, {sources}


class Sources(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def find_spec(self, name, path=None, target=None):
        if name in SOURCES:
            return importlib.util.spec_from_loader(name, self, is_package=self.is_package(name))

    def is_package(self, name):
        return any(other.startswith(name + ".") for other in SOURCES)

    def get_source(self, name):
        return SOURCES[name]


sys.meta_path.insert(0, Sources())
runpy.run_module(MAIN, run_name="__main__", alter_sys=True)
"""


def program(path: Path) -> str:
    """The text that runs it: ``python -I - ARGUMENTS < text``. An OSError names what is missing.

    path: a script, or the directory of a package with a ``__main__`` and no packages below.
    """
    return _RUN.format(main=path.stem, sources=json.dumps(sources(path)))


def sources(path: Path) -> dict[str, str]:
    """The modules of a script or package and those of `pivot` that they import, by their full names."""
    own = _package(path) if path.is_dir() else {path.stem: path.read_text(encoding="utf-8")}
    found = dict(own)
    todo = list(own.values())
    while todo:
        for name in _imported(todo.pop()):
            if name not in found:
                found[name] = _source(name)
                todo.append(found[name])
    return found


def _package(path: Path) -> dict[str, str]:
    """The modules of a package by their full names."""
    found = {
        path.name if file.stem == "__init__" else f"{path.name}.{file.stem}": file.read_text(encoding="utf-8")
        for file in sorted(path.glob("*.py"))
    }
    for needed in (path.name, f"{path.name}.__main__"):
        if needed not in found:
            raise FileNotFoundError(f"{path} is no package that can be run: it lacks {needed}")
    return found


def _imported(text: str) -> Iterator[str]:
    """Modules of `pivot` that a source imports, each after the packages that it is in."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pivot":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "pivot"]
        for name in names:
            parts = name.split(".")
            yield from filter(_is_module, (".".join(parts[:count]) for count in range(1, len(parts) + 1)))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what a module holds, and no module
        return False


def _source(name: str) -> str:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{name} has no source file: install the project with `make setup`")
    return Path(found.origin).read_text(encoding="utf-8")
