"""Which guards fire, and which stay silent, in which tests: recorded while the tests run.

A guard is a code of `pivot.faults`. It fires in a test that makes a finding of that code. It is silent in a test that
enters a function in which the code stands (itself, or in a table that the function reads) and makes no such finding
before it enters one again or ends: it was asked and had nothing to say. Where that function makes its finding whenever
it is entered, those that call it decide and are looked at in its place. Subprocesses are not seen.
"""

import ast
import dataclasses
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from pivot import faults, findings

ROOT = Path(__file__).resolve().parents[2]
Place = tuple[str, int]  # file and line of a function


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def holds(text: str, code: str, prefixes: set[str]) -> bool:
    return text == code or any(prefix + text == code for prefix in prefixes)


def begin(function: ast.FunctionDef) -> int:
    """The line that its code object names: its first decorator's, if it has one."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


@dataclasses.dataclass(frozen=True)
class Places:
    """Functions that decide about codes: those in which the code stands, and those that call one of them."""

    own: dict[Place, set[str]]
    callers: dict[Place, set[str]]


def prefixes(tree: ast.AST) -> set[str]:
    """What codes are put together from, as in Finding(f"DRAFTER-{code}", …)."""
    joined = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) and len(node.values) == 2]
    firsts = {str(first.value) for first, _ in joined if isinstance(first, ast.Constant)}
    return {first for first in firsts if re.fullmatch("[A-Z]+-", first)}


def places(codes: frozenset[str], files: list[Path]) -> Places:
    """Where each code is decided."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    every = set().union(*map(prefixes, trees.values()))
    own: dict[Place, set[str]] = {}
    by_name: dict[str, set[str]] = {}
    for path, tree in trees.items():
        tables = tables_of(tree)
        for function in functions(tree):
            names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            words = texts(function).union(*(words for name, words in tables.items() if name in names))
            inside = {code for code in codes if any(holds(word, code, every) for word in words)}
            if inside:
                own[str(path), begin(function)] = inside
                by_name.setdefault(function.name, set()).update(inside)
    callers: dict[Place, set[str]] = {}
    for path, tree in trees.items():
        for function in functions(tree):
            called = {called_name(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
            decided = set().union(*(by_name[name] for name in called & by_name.keys() - {function.name}))
            if decided:
                callers[str(path), begin(function)] = decided
    return Places(own, callers)


def called_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def tables_of(tree: ast.Module) -> dict[str, set[str]]:
    """The texts of a module's constants, by name; one that stands in another belongs to that one too."""
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    inner = [found.get(part.id, set()) for part in ast.walk(node.value) if isinstance(part, ast.Name)]
                    found[target.id] = texts(node.value).union(*inner)
    return found


class Record:
    """Firing and silence, in how many tests."""

    def __init__(self, known: Places | None = None) -> None:
        self.codes = faults.codes()
        source = [path for path in (ROOT / "src/pivot").rglob("*.py") if path.name != "faults.py"]
        self.places = known or places(self.codes, [*source, *(ROOT / "plugins").glob("*/*.py")])
        self.fired: Counter[str] = Counter()
        self._silent: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self.begin()

    @property
    def silent(self) -> Counter[str]:
        """By code, in how many tests it was asked and had nothing to say."""
        own, callers = self._silent
        return Counter({code: own[code] or callers[code] for code in self.codes})

    def begin(self) -> None:
        self._said: set[str] = set()
        # by own places and callers: codes that were asked and have not answered, and those that never did
        self._asked: tuple[set[str], set[str]] = (set(), set())
        self._unanswered: tuple[set[str], set[str]] = (set(), set())

    def end(self) -> None:
        self.fired.update(self._said & self.codes)
        for counter, asked, unanswered in zip(self._silent, self._asked, self._unanswered, strict=True):
            counter.update(asked | unanswered)

    def said(self, code: str) -> None:
        self._said.add(code)
        for asked in self._asked:
            asked.discard(code)

    def entered(self, code: CodeType, _offset: int) -> object:
        place = (code.co_filename, code.co_firstlineno)
        found = self.places.own.get(place), self.places.callers.get(place)
        if found == (None, None):
            return sys.monitoring.DISABLE
        for codes, asked, unanswered in zip(found, self._asked, self._unanswered, strict=True):
            unanswered.update(asked & (codes or set()))
            asked.update(codes or ())
        return None

    def start(self) -> None:
        """Watch every finding that is made, and every function that is entered."""
        made = findings.Finding.__init__

        @functools.wraps(made)
        def watched(self_: Any, code: str, *rest: Any, **named: Any) -> None:
            self.said(code)
            made(self_, code, *rest, **named)

        findings.Finding.__init__ = watched  # type: ignore[method-assign]  # for as long as these tests run
        tool = sys.monitoring.PROFILER_ID
        sys.monitoring.use_tool_id(tool, "guards")
        sys.monitoring.register_callback(tool, sys.monitoring.events.PY_START, self.entered)
        sys.monitoring.set_events(tool, sys.monitoring.events.PY_START)

    def unshown(self) -> list[str]:
        """What no test has shown, a sentence each."""
        silent = self.silent
        return [
            *(f"{code} fires in no test" for code in sorted(self.codes) if not self.fired[code]),
            *(f"{code} is silent in no test that asks it" for code in sorted(self.codes) if not silent[code]),
        ]
