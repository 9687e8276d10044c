"""SGLang's source as a wheel holds it: modules, classes, the shape of code and constants, read and never run."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SRT = "sglang/srt"
LARGEST = 32 << 20  # bytes of one source file; the largest of 0.5.23 has 0.4 MiB
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_params", "annotation", "returns"})


class DescriptionError(ValueError):
    """A wheel or description that cannot be used; the text is one sentence for a person."""


def shape(*nodes: ast.AST) -> str:
    """sha256 of the syntax trees: equal for equal code, whatever its comments, docstrings, layout and annotations.

    Written out here instead of `ast.dump`, whose text differs between versions of Python.
    """
    return hashlib.sha256("\n".join(map(_spell, nodes)).encode()).hexdigest()


def _spell(value: object) -> str:
    if isinstance(value, ast.AST):
        fields = []
        for name, item in ast.iter_fields(value):
            if name == "body" and isinstance(item, list) and item and _is_docstring(item[0]):
                item = item[1:]  # noqa: PLW2901 - the same field without its docstring
            if name not in _IGNORED and item is not None and item != []:
                fields.append(f"{name}={_spell(item)}")
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(map(_spell, value))}]"
    return repr(value)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Source:
    """The Python files of a wheel, parsed when asked for. DescriptionError when it is no wheel of SGLang."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self._trees: dict[str, ast.Module | None] = {}
        try:
            self._archive = zipfile.ZipFile(wheel)
        except (OSError, zipfile.BadZipFile) as error:
            raise DescriptionError(f"{wheel} cannot be read as a wheel: {error}") from error
        self.names = frozenset(self._archive.namelist())

    @functools.cached_property
    def version(self) -> str:
        """The version its metadata states."""
        for name in sorted(self.names):
            if re.fullmatch(r"sglang-[^/]+\.dist-info/METADATA", name):
                found = re.search(r"^Version: *(\S+)", self.text(name), re.MULTILINE)
                if found:
                    return found[1]
        raise DescriptionError(f"{self.wheel} is no wheel of sglang: it has no sglang-*.dist-info/METADATA")

    def text(self, name: str) -> str:
        """One file as text, empty when the wheel has none of that name."""
        if name not in self.names:
            return ""
        if self._archive.getinfo(name).file_size > LARGEST:
            raise DescriptionError(f"{name} in {self.wheel} is larger than any source file")
        return self.data(name).decode("utf-8-sig", errors="replace")

    def data(self, name: str) -> bytes:
        """One file's bytes; DescriptionError when it cannot be read or is larger than anything compiled is."""
        if self._archive.getinfo(name).file_size > 8 * LARGEST:
            raise DescriptionError(f"{name} in {self.wheel} is larger than any compiled file")
        try:
            return self._archive.read(name)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise DescriptionError(f"{name} in {self.wheel} cannot be read: {error}") from error

    def tree(self, name: str) -> ast.Module | None:
        """One file as a syntax tree, None when there is none or it is no Python."""
        if name not in self._trees:
            text = self.text(name)
            try:
                self._trees[name] = ast.parse(text) if text else None
            except (SyntaxError, ValueError, RecursionError):
                self._trees[name] = None
        return self._trees[name]

    def under(self, folder: str) -> list[str]:
        """The Python files of a folder and below, sorted."""
        return sorted(name for name in self.names if name.startswith(f"{folder}/") and name.endswith(".py"))


def classes_of(tree: ast.Module | None) -> dict[str, ast.ClassDef]:
    """A module's own classes by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)} if tree else {}


def method_of(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """A class's own method, None when it has none of that name."""
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def walk[T: ast.AST](node: ast.AST | None, kind: type[T]) -> Iterator[T]:
    """All nodes of a kind in a tree."""
    return (item for item in ast.walk(node) if isinstance(item, kind)) if node else iter(())


class Unknown(Exception):  # noqa: N818 - no error: what cannot be read is reported as unknown
    """A value that only running the code would tell."""


class Constants:
    """Names that modules assign plain values to."""

    def __init__(self, trees: Iterable[ast.Module | None]) -> None:
        self._nodes: dict[str, ast.expr] = {}
        for tree in trees:
            for node in tree.body if tree else ():
                if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                    self._nodes[node.targets[0].id] = node.value
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                    self._nodes[node.target.id] = node.value

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """What an expression is: literals, names of such, their sums, list() and set() of them. `Unknown` else."""
        if depth > 8:
            raise Unknown
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Dict) and not node.keys:
            return {}
        if isinstance(node, ast.Name) and node.id in self._nodes:
            return self.value(self._nodes[node.id], depth + 1)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self.value(node.operand, depth + 1)
            if isinstance(number, int | float):
                return -number
        return self._items(node, depth + 1)

    def _items(self, node: ast.expr, depth: int) -> list[Any]:
        """A list, a sum of two, or one made from another."""
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item, depth) for item in node.elts]
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "set", "frozenset", "tuple", "sorted"):
            parts = node.args
        lists = [self.value(part, depth) for part in parts]
        if not lists or not all(isinstance(items, list) for items in lists):
            raise Unknown
        return [item for items in lists for item in items]
