from .conftest import guards, naming


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
