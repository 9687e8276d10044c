"""Programs for hosts in one piece: a script, and the modules of this package that it imports, of this very version."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

# what such a module itself imports of this package, in the order of those imports
NEEDS = {"redact": ("secret_names", "secret_shapes")}


def program(script: str, modules: Sequence[str]) -> str:
    """A script for a host's own Python. modules: of this package, standard library only, that it imports.

    FileNotFoundError when one has no source file here.
    """
    parts = ["import sys, types", "sys.modules['pivot'] = types.ModuleType('pivot')"]
    for name in dict.fromkeys(part for module in modules for part in (*NEEDS.get(module, ()), module)):
        found = importlib.util.find_spec(f"pivot.{name}")
        if found is None or found.origin is None:
            raise FileNotFoundError(f"pivot.{name} has no source file: install the project with `make setup`")
        text = Path(found.origin).read_text(encoding="utf-8")
        parts.append(f"sys.modules['pivot.{name}'] = sys.modules['pivot'].{name} = types.ModuleType('pivot.{name}')")
        parts.append(f"exec(compile({text!r}, '{name}.py', 'exec'), sys.modules['pivot.{name}'].__dict__)")
    return "\n".join([*parts, f"exec(compile({script!r}, 'script.py', 'exec'), dict(__name__='__main__'))", ""])
