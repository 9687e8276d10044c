"""How many guards there are, and how many tests name each: printed at the end of the run, and held to at least one.

A guard is a finding's code. Only what can be counted is: a code that a test, or a table of cases, names as a text. That
it fires there, and stays silent elsewhere, is what the tests themselves show.
"""

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"[A-Z]{2,}(?:-[A-Z]+)+")
SEVERITIES = {"ERROR", "WARNING", "INFO"}


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def guards(source: Path = ROOT / "src/pivot") -> set[str]:
    """Codes of findings: texts of that form, and what is handed on right before a severity (the drafter's checks)."""
    found = set()
    for path in source.glob("*.py"):
        tree = ast.parse(path.read_text())
        found.update(text for text in texts(tree) if CODE.fullmatch(text))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[0], ast.Constant):
                severity = node.args[1]
                if isinstance(severity, ast.Name) and severity.id in SEVERITIES:
                    found.add(str(node.args[0].value))
    return found


def naming(codes: set[str]) -> Counter[str]:
    """By code, how many test functions name it, in themselves or their parameters, and how many tables of cases."""
    found: Counter[str] = Counter()
    for path in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("molecule/**/test_*.py")]:
        tree = ast.parse(path.read_text())
        tables = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        tests = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
        for node in [*tables, *tests]:
            own = list(texts(node))
            firsts = {re.split(r"[\s:]", text, maxsplit=1)[0] for text in own}
            inside = {code for text in own for code in CODE.findall(text)}
            found.update((firsts | inside) & codes)
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Guards by how many tests name them."""
    codes = guards()
    counts = naming(codes)
    by_count: dict[int, list[str]] = {}
    for code in sorted(codes):
        by_count.setdefault(counts[code], []).append(code)
    terminalreporter.section(f"{len(codes)} guards, {sum(counts.values())} tests and tables of cases that name them")
    for count, names in sorted(by_count.items()):
        for line in textwrap.wrap(
            f"{count:>3} each: {' '.join(names)}", 118, subsequent_indent=" " * 10, break_on_hyphens=False
        ):
            terminalreporter.line(line)
