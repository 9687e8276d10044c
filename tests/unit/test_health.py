import urllib.error
from email.message import Message

import pytest

from pivot.serving import health
from pivot.serving.health import Answer

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


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            urllib.error.HTTPError("u", 401, "Unauthorized", Message(), None),
            "HEALTH-KEY",
            "http://h:1 refuses the API key",
        ),
        (urllib.error.URLError("no route"), "HEALTH-UNREACHABLE", "http://h:1 does not answer: no route"),
        (urllib.error.HTTPError("u", 500, "Broken", Message(), None), "HEALTH-UNREACHABLE", "Broken"),
        (TimeoutError("timed out"), "HEALTH-UNREACHABLE", "timed out"),
    ],
)
def test_a_server_that_cannot_be_asked(error, code, words):
    finding = health.unreachable("h", "http://h:1", error)
    assert finding.code == code
    assert words in finding.message


class Saying:
    """A client whose every answer is the same."""

    def __init__(self, answer):
        self.answer = answer

    def call(self, path, body=None):
        assert path == "/v1/chat/completions"
        return self.answer


@pytest.mark.parametrize(
    ("answer", "codes"),
    [
        ({"choices": [{"message": {"content": "os"}}]}, []),
        ({"choices": [{"message": {"content": None, "reasoning_content": "hm"}}]}, []),
        ({"choices": [{"message": {"content": ""}}]}, ["HEALTH-CHAT"]),
        ({"choices": []}, ["HEALTH-CHAT"]),
    ],
)
def test_a_chat_without_content(answer, codes):
    assert [finding.code for finding in health.chat("h", Saying(answer))] == codes
