import sys

from pivot.findings import Finding, Severity

from .conftest import RECORD, guards, naming
from .guard_record import Record, places


def test_every_guard_is_named_by_a_test():
    codes = guards()
    assert codes
    counts = naming(codes)
    assert sorted(code for code in codes if not counts[code]) == []


def test_guards_are_found_in_code_and_not_in_texts(tmp_path):
    (tmp_path / "one.py").write_text(
        '"""Says MADE-UP nowhere."""\nfind("SOME-THING", "UTF-8", "a SOME-OTHER text")\nadd("ALONE", WARNING, "text")\n'
    )
    assert guards(tmp_path) == {"SOME-THING", "ALONE"}


def test_a_guard_that_nobody_names_would_be_seen():
    unnamed = "SOME" + "-UNNAMED-GUARD"
    counts = naming({unnamed, "PIN-NULL"})
    assert counts[unnamed] == 0
    assert counts["PIN-NULL"] > 0


SOURCE = '''
TABLE = {"a": "MADE-TABLE"}

def check(value):
    """MADE-UP in a text is none."""
    if value:
        add("UP")
    return look(value), always

def look(value):
    return TABLE.get(value)

def always():
    Finding("MADE-ALWAYS")

def decide(value):
    if value:
        always()

def add(code):
    Finding(f"MADE-{code}")
'''


def by_name(found):
    lines = SOURCE.splitlines()
    return {lines[line - 1].removeprefix("def ").split("(")[0]: codes for (_, line), codes in found.items()}


def test_the_functions_that_decide_about_a_code_are_found(tmp_path):
    (tmp_path / "one.py").write_text(SOURCE)
    found = places(frozenset({"MADE-UP", "MADE-TABLE", "MADE-ALWAYS"}), [tmp_path / "one.py"])
    assert by_name(found.own) == {"check": {"MADE-UP"}, "look": {"MADE-TABLE"}, "always": {"MADE-ALWAYS"}}
    assert by_name(found.callers) == {"check": {"MADE-TABLE"}, "decide": {"MADE-ALWAYS"}}


def test_a_guard_that_never_fires_and_one_that_is_never_silent_would_be_seen():
    record = Record(RECORD.places)
    code = "PIN-NULL"
    place = next(place for place, codes in record.places.own.items() if code in codes)
    function = compile("\n" * (place[1] - 1) + "def f(): pass", place[0], "exec").co_consts[0]
    assert {f"{code} fires in no test", f"{code} is silent in no test that asks it"} <= set(record.unshown())
    record.begin()
    assert record.entered(function, 0) is None
    record.end()
    assert (record.fired[code], record.silent[code]) == (0, 1)
    record.begin()
    record.entered(function, 0)
    record.said(code)
    record.end()
    assert (record.fired[code], record.silent[code]) == (1, 1)
    record.begin()
    record.entered(function, 0)  # with nothing to say, then again with something
    record.entered(function, 0)
    record.said(code)
    record.end()
    assert (record.fired[code], record.silent[code]) == (2, 2)
    assert not [sentence for sentence in record.unshown() if sentence.startswith(f"{code} ")]
    assert record.entered(places.__code__, 0) is sys.monitoring.DISABLE


def test_findings_are_still_findings_while_they_are_watched():
    made = Finding(code="PIN-NULL", severity=Severity.ERROR, subject="s", message="m", fix="f")
    assert made == Finding("PIN-NULL", Severity.ERROR, "s", "m", "f")
    assert Finding.from_dict(made.as_dict()) == made
