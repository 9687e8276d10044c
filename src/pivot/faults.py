"""Every finding that Pivot can print, read from its own source: ``pivot faults > docs/faults.md``.

The codes stand where the findings are made, so the source is parsed, never run: calls of `Finding`, of the small
functions that wrap it, and the tuples of code, severity, message and fix that checks yield. What a message takes from
the case at hand shows as an ellipsis.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from pivot.machines import xids

HERE = Path(__file__).parent
CODE = re.compile(r"[A-Z][A-Z0-9]*(-[A-Z0-9]+)*")
ELLIPSIS = "…"
DEPTH = 5  # of names that stand for other names
# the families in the order in which a deployment meets them: what they are about, and whom their findings name
FAMILIES: dict[str, tuple[str, str]] = {
    "HOST-NONE": ("Groups and hosts of an inventory", "the inventory, or hosts"),
    "VAULT": ("The vault", "a file"),
    "VAR": ("Variables", "a host"),
    "FILE": ("Files of the controller", "a host, or the file"),
    "PIN": ("The registry of pins", "a pin"),
    "WAIVER": ("Waivers", "a host"),
    "DEVICE": ("Devices of a container", "a host"),
    "NET": ("Network interfaces of a container", "a host"),
    "LAUNCH": ("Flags of the launch", "a host"),
    "ENV": ("Environment of the server", "a host"),
    "NCCL": ("NCCL's variables", "a host"),
    "BUDGET": ("Memory of a card", "a host"),
    "DRAFTER": ("The drafter contract", "a host"),
    "INSPECT": ("An existing server", "a host"),
    "PVE": ("Proxmox and its containers", "a host"),
    "HOST": ("Node and container", "a host"),
    "ENGINE": ("The engine on a host", "a host, or a wheel"),
    "WEIGHTS": ("Weights on a host", "a host"),
    "SERVER": ("The server on a host", "a host"),
    "ROLLBACK": ("Going back", "a host"),
    "HEALTH": ("Answers of the server", "a host"),
    "PROBE": ("The debug probe", "a host"),
    "WIRE": ("What the probe saw", "a record of the probe, or a host"),
    "WHATIF": ("What the drafter could do", "a host"),
    "TRAINING": ("A sample of the drafter's training", "the sample"),
    "BUNDLE": ("Bundles of logs", "a host"),
    "DIAG": ("Suspects of a diagnosis", "a host, and what to do is the next command"),
}
OF_THE_INVENTORY = ("HOST-NONE", "HOST-UNGROUPED", "HOST-COLLISION")
# made with a code or a severity that is worked out: said here, and tests hold the two together
WORKED_OUT = {
    "VAR-UNDEFINED": ("error", "not set: …; needed by …", "set it, as the finding says for this name"),
    "VAR-EXPRESSION": ("error", "… cannot be worked out: …", "correct the expression there, or what it reads"),
    "DRAFTER-ENGINE-FAULT": ("error or warning", "this version has a known fault: …", "see the list at the end"),
}
FIELDS = ("code", "severity", "subject", "message", "fix")


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """One place of the source that makes a finding. severities: all that it can have."""

    code: str
    severities: tuple[str, ...]
    message: str
    fix: str
    module: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Wrapper:
    """A function that makes a finding of its first argument. prefix: put before the code; severity: if it is fixed."""

    prefix: str
    severity: str | None


def sites() -> list[Site]:
    """All places, in the order of modules and lines."""
    found: list[Site] = []
    for path in sorted([*HERE.rglob("*.py"), *(HERE.parents[1] / "plugins/action").glob("*.py")]):
        if path.name == Path(__file__).name:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += _Module(path.stem, tree, {**_imported_wrappers(tree), **_wrappers(tree)}).sites()
    return found


@functools.cache
def codes() -> frozenset[str]:
    """Every code that a finding can have."""
    return frozenset({site.code for site in sites()} | WORKED_OUT.keys())


def _imported_wrappers(tree: ast.Module) -> dict[str, _Wrapper]:
    """Those of the classes and functions that a module takes from others of this package, and what these take."""
    found: dict[str, _Wrapper] = {}
    for node in tree.body:
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        path = HERE / f"{module.removeprefix('pivot.').replace('.', '/')}.py"
        if isinstance(node, ast.ImportFrom) and module.startswith("pivot.") and path.is_file():
            offered = _offered(path)
            for name in {alias.name for alias in node.names} & offered.keys():
                found |= offered[name]
    return found


@functools.cache
def _offered(path: Path) -> dict[str, dict[str, _Wrapper]]:
    """What comes with each class and function of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    given = _imported_wrappers(tree)
    return {
        item.name: {**given, **_wrappers(item)}
        for item in tree.body
        if isinstance(item, ast.ClassDef | ast.FunctionDef)
    }


def _wrappers(tree: ast.AST) -> dict[str, _Wrapper]:
    """Functions whose code is a parameter, by name."""
    found: dict[str, _Wrapper] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {argument.arg for argument in function.args.args}
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and _name(call.func) == "Finding" and len(call.args) > 1):
                continue
            code, prefix = call.args[0], ""
            if isinstance(code, ast.JoinedStr) and len(code.values) == 2:
                prefix = _literal(code.values[0]) or ""
                last = code.values[1]
                code = last.value if isinstance(last, ast.FormattedValue) else code
            if isinstance(code, ast.Name) and code.id in names and code.id == "code":
                found[function.name] = _Wrapper(prefix, next(iter(_severities(call.args[1])), None))
    return found


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _severities(node: ast.expr) -> list[str]:
    """The severities that an expression names, also both of a choice."""
    if isinstance(node, ast.IfExp):
        return [*_severities(node.body), *_severities(node.orelse)]
    name = _name(node)
    return [name.lower()] if name in ("ERROR", "WARNING", "INFO") else []


class _Module:
    """One file."""

    def __init__(self, name: str, tree: ast.Module, wrappers: Mapping[str, _Wrapper]) -> None:
        self.name, self.tree, self.wrappers = name, tree, wrappers

    def sites(self) -> list[Site]:
        whole = _Scope(self.tree, self.tree)
        found = [site for node, scope in _scoped(self.tree, whole) for site in self._site(node, scope)]
        return list(dict.fromkeys(found))

    def _site(self, node: ast.AST, scope: _Scope) -> Iterator[Site]:
        if isinstance(node, ast.Call):
            yield from self._call(node, scope)
        elif isinstance(node, ast.Tuple):
            yield from self._tuple(node, scope)

    def _call(self, call: ast.Call, scope: _Scope) -> Iterator[Site]:
        name = _name(call.func)
        wrapper = _Wrapper("", None) if name == "Finding" else self.wrappers.get(name)
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        given = [*call.args, *(named[field] for field in FIELDS[len(call.args) :] if field in named)]
        if wrapper is None or not given or any(isinstance(item, ast.Starred) for item in given):
            return
        choices, rest = _choices(given[0], scope), given[1:]
        severities = [wrapper.severity] if wrapper.severity else []
        for index, argument in enumerate(rest):
            if found := self._severity(argument, scope):
                severities, rest = found, rest[:index] + rest[index + 1 :]
                break
        for choice in choices:
            code = _literal(choice)
            if code and CODE.fullmatch(code) and len(rest) >= 2 and severities:
                texts = rest[-2:] if name != "Finding" else rest[1:3]
                yield self._made(wrapper.prefix + code, severities, texts, scope)

    def _tuple(self, node: ast.Tuple, scope: _Scope) -> Iterator[Site]:
        """Code, severity, message and fix; without a severity it is an error; a pattern may stand before the code."""
        for index, element in enumerate(node.elts[:2]):
            code = _literal(element)
            if not code or "-" not in code or not CODE.fullmatch(code):
                continue
            rest = node.elts[index + 1 :]
            severities = self._severity(rest[0], scope) if len(rest) == 3 else ["error"]
            if len(rest) in (2, 3) and severities:
                yield self._made(code, severities, rest[-2:], scope)
            return

    def _made(self, code: str, severities: list[str], texts: list[ast.expr], scope: _Scope) -> Site:
        message, fix = (_words(text, scope) for text in texts)
        return Site(code, tuple(dict.fromkeys(severities)), message, fix, self.name)

    @staticmethod
    def _severity(node: ast.expr, scope: _Scope) -> list[str]:
        if isinstance(node, ast.Name) and node.id == "severity":
            # also one of a loop over points and their severities
            loops = [loop.iter for loop in ast.walk(scope.function) if isinstance(loop, ast.For)]
            looped = [part for loop in loops for part in ast.walk(loop) if isinstance(part, ast.Attribute)]
            return [item for value in [*_values(node, scope), *looped] for item in _severities(value)]
        return _severities(node)


def _choices(node: ast.expr, scope: _Scope) -> list[ast.expr]:
    """The codes that an expression can be."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.Name):
        return [choice for value in _values(node, scope)[:1] for choice in _choices(value, scope)]
    return [node]


@dataclasses.dataclass(frozen=True, slots=True)
class _Scope:
    """The function that a node stands in, and its module."""

    function: ast.AST
    module: ast.Module

    def returned(self, name: str) -> tuple[ast.expr, _Scope] | None:
        """What a function of this module returns in the end, None when it has none of that name."""
        for node in self.module.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                values = [item.value for item in ast.walk(node) if isinstance(item, ast.Return) and item.value]
                return (values[-1], _Scope(node, self.module)) if values else None
        return None


def _scoped(node: ast.AST, scope: _Scope) -> Iterator[tuple[ast.AST, _Scope]]:
    """All nodes with the function they stand in."""
    for child in ast.iter_child_nodes(node):
        inner = _Scope(child, scope.module) if isinstance(child, ast.FunctionDef) else scope
        yield child, scope
        yield from _scoped(child, inner)


def _values(name: ast.Name, scope: _Scope) -> list[ast.expr]:
    """What a name was set to in its function before it is used, the last first; else the module's constant."""
    places = scope.module.body if name.id.isupper() else ast.walk(scope.function)
    found: list[tuple[int, ast.expr]] = []
    for node in places:
        if not isinstance(node, ast.Assign) or (node.lineno > name.lineno and not name.id.isupper()):
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        found += [(node.lineno, to) for each, to in pairs if isinstance(each, ast.Name) and each.id == name.id]
    return [value for _, value in sorted(found, key=lambda item: -item[0])]


def _words(node: ast.expr, scope: _Scope, depth: int = 0) -> str:
    """The text of an expression, an ellipsis for what depends on the case."""
    if depth > DEPTH:
        return ELLIPSIS
    if isinstance(node, ast.Constant):
        # a text with places for format()
        return re.sub(r"\{\w*\}", ELLIPSIS, node.value) if isinstance(node.value, str) else ELLIPSIS
    if isinstance(node, ast.JoinedStr):
        text = "".join(_words(part, scope, depth + 1) for part in node.values)
    elif isinstance(node, ast.FormattedValue):
        text = _words(node.value, scope, depth + 1)
    elif isinstance(node, ast.IfExp):
        # the longer of the two says more
        text = max((_words(part, scope, depth + 1) for part in (node.body, node.orelse)), key=len)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = _words(node.left, scope, depth + 1) + _words(node.right, scope, depth + 1)
    elif isinstance(node, ast.Name):
        values = _values(node, scope)
        text = _words(values[0], scope, depth + 1) if values else ELLIPSIS
    elif depth == 0 and isinstance(node, ast.Call) and (given := scope.returned(_name(node.func))):
        text = _words(given[0], given[1], depth + 1)
    else:
        text = ELLIPSIS
    return re.sub(r"(…[\s,;:]*)+…", ELLIPSIS, text)


# --- the page


def family(code: str) -> str:
    """The key of FAMILIES that a code belongs to; a KeyError is a new family that has no title yet."""
    key = OF_THE_INVENTORY[0] if code in OF_THE_INVENTORY else code.split("-", 1)[0]
    if key not in FAMILIES:
        raise KeyError(f"{code}: give its family a title in pivot.faults.FAMILIES")
    return key


def page() -> str:
    """docs/faults.md."""
    by_code: dict[str, list[Site]] = {}
    for site in sites():
        by_code.setdefault(site.code, []).append(site)
    for code, (severity, message, fix) in WORKED_OUT.items():
        by_code[code] = [Site(code, (severity,), message, fix, "")]
    groups: dict[str, list[str]] = {key: [] for key in FAMILIES}
    for code in sorted(by_code):
        groups[family(code)].append(_row(code, by_code[code]))
    lines = [
        "# Findings, by code",
        "",
        "Generated from the source by `pivot faults > docs/faults.md`; a test fails when it is stale.",
        "An error stops the run, a warning and an info are only printed. `…` is filled from the case at hand.",
        "A finding of preflight is accepted with `pivot_waivers: {CODE: reason}` in the inventory: it is printed as an",
        "info with the reason then, and stops nothing. What concerns several hosts is accepted by all of them: in",
        "group_vars/all.",
    ]
    for key, (title, subject) in FAMILIES.items():
        if groups[key]:
            lines += ["", f"## {title}", "", f"Their subject is {subject}.", ""]
            lines += ["| code | severity | what it says | what to do |", "|---|---|---|---|", *groups[key]]
    return "\n".join([*lines, *_xids(), *_engine_faults(), ""])


def _row(code: str, made: list[Site]) -> str:
    severities = dict.fromkeys(severity for site in made for severity in site.severities)
    columns = [" or ".join(severities)]
    columns += [_several(dict.fromkeys(site.message for site in made)), _several(dict.fromkeys(s.fix for s in made))]
    return f"| `{code}` | {' | '.join(columns)} |"


def _several(texts: Mapping[str, None]) -> str:
    """Different texts of one code, those that say nothing by themselves left out if another does."""
    said = [text for text in texts if text.strip("… ")] or [f"{ELLIPSIS} (the finding itself says it)"]
    return "<br>".join(" ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") for text in said)


def _xids() -> list[str]:
    """Xids of the NVIDIA driver, which are data."""
    lines = [
        "",
        "## Xids",
        "",
        "What the kernel's log of a node says of its cards. `stops` ends a deployment onto that card.",
        "",
    ]
    lines += ["| Xid | kind | what it means | what to do | source |", "|---|---|---|---|---|"]
    for number, row in sorted(xids.table().items()):
        kind = f"{row.kind}, stops" if row.blocks else row.kind
        cells = " | ".join(_several({column: None}) for column in (row.meaning, row.action, row.source))
        lines.append(f"| {number} `{row.name}` | {kind} | {cells} |")
    return lines


def _engine_faults() -> list[str]:
    """Known faults of engine versions, which are data."""
    faults = yaml.safe_load((HERE / "data/engine_faults.yml").read_text(encoding="utf-8"))["faults"]
    lines = ["", "## Known faults of SGLang's versions", "", "Each is a `DRAFTER-ENGINE-FAULT`.", ""]
    lines += ["| fault | versions | severity | what it is | what to do | source |", "|---|---|---|---|---|---|"]
    for fault in faults:
        columns = [str(fault[key]) for key in ("severity", "message", "fix")]
        columns.append(f"{fault['basis']}: {fault['source']}")
        cells = " | ".join(_several({column: None}) for column in columns)
        lines.append(f"| {fault['id']} | `{fault['versions']}` | {cells} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """``pivot faults``: print the page."""
    parser = argparse.ArgumentParser(prog="pivot faults", description="Every finding by code, as Markdown.")
    parser.parse_args(arguments)
    sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
