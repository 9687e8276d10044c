"""Programs for hosts in one piece: a script, and the modules of this package that it imports, of this very version."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

# what such a module itself imports of this package, in the order of those imports
NEEDS = {"redact": ("secret_names", "secret_shapes")}


def program(script: str, modules: Sequence[str], own: Mapping[str, str] | None = None) -> str:
    """A script for a host's own Python.

    modules: of this package, standard library only, that it imports; own: texts of further modules by name, each after
    those that it imports itself. FileNotFoundError when a module has no source file here.
    """
    names = dict.fromkeys(part for module in modules for part in (*NEEDS.get(module, ()), module))
    texts = {"pivot": "", **{f"pivot.{name}": _source(f"pivot.{name}") for name in names}, **(own or {})}
    parts = ["import sys, types"]
    for name, text in texts.items():
        parts.append(f"module = sys.modules[{name!r}] = types.ModuleType({name!r})")
        if name.startswith("pivot."):
            parts.append(f"sys.modules['pivot'].{name.partition('.')[2]} = module")
        parts.append(f"exec(compile({text!r}, {name + '.py'!r}, 'exec'), module.__dict__)")
    return "\n".join([*parts, f"exec(compile({script!r}, 'script.py', 'exec'), dict(__name__='__main__'))", ""])


def _source(module: str) -> str:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{module} has no source file: install the project with `make setup`")
    return Path(found.origin).read_text(encoding="utf-8")
