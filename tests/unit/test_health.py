import pytest

from pivot import health
from pivot.health import Answer

PROMPT = {"id": "p01", "text": "x", "output_ids": [5, 6, 7, 8]}


def answer(ids, accept=2.5):
    return Answer("p01", ids, "text", 1.0, accept)


def judge(ids, accept=2.5, prompt=PROMPT, drafter=True):
    findings = health.judge("h", [answer(ids, accept)], [prompt], drafter=drafter, least=2.0)
    return [finding.code for finding in findings]


def test_the_recorded_answer_with_a_good_accept_length_is_healthy():
    assert judge([5, 6, 7, 8]) == []


@pytest.mark.parametrize(
    ("ids", "accept", "code"),
    [
        ([], 2.5, "HEALTH-EMPTY"),
        ([5, 6, 9, 8], 2.5, "HEALTH-OUTPUT"),
        ([5, 6, 7, 8], 1.1, "HEALTH-ACCEPT"),
        ([5, 6, 7, 8], None, "HEALTH-NO-SPEC"),
        ([1, 2, 3] * 12, 2.5, "HEALTH-LOOP"),
    ],
)
def test_each_guard_fires(ids, accept, code):
    assert judge(ids, accept) == [code]


def test_where_no_answer_can_be_known_only_sanity_is_asked():
    assert judge([1, 2, 3, 4], prompt={**PROMPT, "output_ids": None}) == []


def test_without_a_drafter_no_speculation_is_expected():
    assert judge([5, 6, 7, 8], None, drafter=False) == []


@pytest.mark.parametrize(("tokens", "looping"), [
    ([7] * 40, True), ([1, 2] * 20, True), (list(range(40)), False), ([7] * 10, False),
    ([*range(30), 9, 8, 7, 6], False),
])  # fmt: skip
def test_loops(tokens, looping):
    assert health.loops(tokens) is looping


def test_prompts_by_id_or_the_first_ones():
    prompts = {"prompts": [{"id": "a"}, {"id": "b"}, {"id": "c"}]}
    assert [p["id"] for p in health.select(prompts, [], 2)] == ["a", "b"]
    assert [p["id"] for p in health.select(prompts, ["c"], 2)] == ["c"]
    with pytest.raises(KeyError):
        health.select(prompts, ["z"], 2)
