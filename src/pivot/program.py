"""A package as the text of one program, for another interpreter's standard input.

It reaches a host in one round trip, as a single file would, and leaves nothing there.
"""

from __future__ import annotations

import json
from pathlib import Path

_RUN = """\
import importlib.abc, importlib.util, runpy, sys

PACKAGE, SOURCES = {package!r}, {sources}


class Sources(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def find_spec(self, name, path=None, target=None):
        if name in SOURCES:
            return importlib.util.spec_from_loader(name, self, is_package=self.is_package(name))

    def is_package(self, name):
        return name == PACKAGE

    def get_source(self, name):
        return SOURCES[name]


sys.meta_path.insert(0, Sources())
runpy.run_module(PACKAGE, run_name="__main__")
"""


def program(package: Path) -> str:
    """The text that runs a package's ``__main__``: ``python -I - ARGUMENTS < text``. An OSError names what is missing.

    package: its directory, of modules without packages below.
    """
    name = package.name
    sources = {
        name if path.stem == "__init__" else f"{name}.{path.stem}": path.read_text(encoding="utf-8")
        for path in sorted(package.glob("*.py"))
    }
    for needed in (name, f"{name}.__main__"):
        if needed not in sources:
            raise FileNotFoundError(f"{package} is no package that can be run: it lacks {needed}")
    return _RUN.format(package=name, sources=json.dumps(sources))
