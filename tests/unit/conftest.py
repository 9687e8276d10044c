"""How many guards there are, and how many tests let each fire and find it silent: printed at the end of a whole run,
and held to at least one each. A guard is a finding's code; that a test names it as a text is looked at besides.
And the copies of the project that the tests of inventory/example share.
"""

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .example_checkout import Checkout
from .guard_record import Record

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
    for path in source.rglob("*.py"):
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


RECORD = Record()
HERE = Path(__file__).parent


def pytest_configure() -> None:
    RECORD.start()


def pytest_runtest_setup() -> None:
    RECORD.begin()


def pytest_runtest_teardown() -> None:
    RECORD.end()


def whole(config: pytest.Config) -> bool:
    """Whether a run has all tests of this directory: only then is what it does not show shown by none."""
    chosen = [Path(str(argument).split("::", maxsplit=1)[0]).resolve() for argument in config.args]
    return not (config.option.keyword or config.option.markexpr or config.option.deselect) and HERE in chosen


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A whole run in which a guard never fires, or is never silent, is a failed one."""
    if session.exitstatus == pytest.ExitCode.OK and whole(session.config) and RECORD.unshown():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Every guard with the number of tests in which it fires, and in which it is asked and silent."""
    if not whole(config):
        return
    silent = RECORD.silent
    title = f"{len(RECORD.codes)} guards: tests in which each fires, and in which it is asked and silent"
    terminalreporter.section(title)
    cells = [f"{code} {RECORD.fired[code]}+{silent[code]}" for code in sorted(RECORD.codes)]
    for line in textwrap.wrap("  ".join(cell.replace(" ", "~") for cell in cells), 118, break_on_hyphens=False):
        terminalreporter.line(line.replace("~", " "))
    fired, asked = sum(RECORD.fired.values()), sum(silent.values())
    terminalreporter.line(f"{len(RECORD.codes)} guards, {fired} tests let one fire, {asked} find one silent")
    for sentence in RECORD.unshown():
        terminalreporter.line(f"NOT SHOWN: {sentence}", red=True)


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """inventory/example as it is copied, and a vault."""
    checkout = Checkout(tmp_path_factory.mktemp("untouched"))
    checkout.make_vault()
    return checkout


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The same with everything in it that was left open; what a test changes in it, it puts back."""
    checkout = Checkout(tmp_path_factory.mktemp("filled"))
    checkout.make_vault()
    checkout.fill()
    checkout.trust()
    return checkout
