"""Waivers: what an inventory accepts is still printed, with its reason."""

import pytest

from pivot.findings import LONGEST, Finding, Severity, errors, plain, render, waive

WRONG = Finding("LAUNCH-PEERS", Severity.ERROR, "llm01", "peers are used", "do not")
ODD = Finding("NCCL-DEBUGGING", Severity.WARNING, "llm01", "left on", "remove it")
NOTE = Finding("DRAFTER-ORDER", Severity.INFO, "llm01", "another order", "")
KNOWN = {"LAUNCH-PEERS", "NCCL-DEBUGGING", "DRAFTER-ORDER"}


def waived(waivers):
    return waive("llm01", [WRONG, ODD, NOTE], waivers, lambda: KNOWN)


@pytest.mark.parametrize("waivers", [None, {}, ""])
def test_nothing_is_waived(waivers):
    def never():
        raise AssertionError("the codes are not needed")

    assert waive("llm01", [WRONG, ODD], waivers, never) == [WRONG, ODD]


def test_a_waived_error_is_printed_with_its_reason_and_stops_nothing():
    found = waived({"LAUNCH-PEERS": "tested on\n this board"})
    assert found[0] == Finding(
        "LAUNCH-PEERS",
        Severity.INFO,
        "llm01",
        "peers are used (accepted by pivot_waivers: tested on this board)",
        "do not",
    )
    assert found[1:] == [ODD, NOTE]
    assert errors(found) == []


def test_a_waived_warning_is_an_info_and_an_info_stays_as_it_is():
    found = waived({"NCCL-DEBUGGING": "why", "DRAFTER-ORDER": "why"})
    assert [finding.severity for finding in found] == [Severity.ERROR, Severity.INFO, Severity.INFO]
    assert found[2] == NOTE


@pytest.mark.parametrize("reason", ["", "  ", None, True, ["why"]])
def test_a_waiver_without_a_reason_waives_nothing(reason):
    found = waived({"LAUNCH-PEERS": reason})
    assert found[0] == WRONG
    assert [(item.code, item.message) for item in errors(found[3:])] == [
        ("WAIVER-REASON", "pivot_waivers.LAUNCH-PEERS has no reason")
    ]


@pytest.mark.parametrize(
    ("code", "fix"), [("LAUNCH-PEER", "did you mean LAUNCH-PEERS?"), (5, "docs/faults.md has all codes")]
)
def test_a_waiver_of_an_unknown_code(code, fix):
    found = waived({code: "why"})
    assert found[:3] == [WRONG, ODD, NOTE]
    assert [(item.code, item.severity, item.fix) for item in found[3:]] == [("WAIVER-UNKNOWN", Severity.ERROR, fix)]


@pytest.mark.parametrize("waivers", ["LAUNCH-PEERS", ["LAUNCH-PEERS"], 7, True])
def test_waivers_that_are_no_mapping(waivers):
    found = waived(waivers)
    assert found[:3] == [WRONG, ODD, NOTE]
    assert [item.code for item in found[3:]] == ["WAIVER-FORM"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ids [2, 30, 58] → 3", "ids [2, 30, 58] → 3"),
        ("two\nlines", "two\nlines"),
        ("\x1b[2J\ttab", r"\x1b[2J\ttab"),
        ("\ud800", r"\ud800"),
        ("x" * (LONGEST + 5), "x" * (LONGEST - 30) + " … (35 more letters)"),
    ],
)
def test_what_others_wrote_is_made_plain(text, shown):
    assert plain(text) == shown == plain(shown)
    finding = Finding("A-B", Severity.ERROR, text, text, text, text)
    assert {finding.subject, finding.message, finding.fix, finding.reference} == {shown}
    render([finding]).encode()
    assert Finding.from_dict(finding.as_dict()) == finding
