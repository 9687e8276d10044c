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


def test_as_far_as_both_go_they_are_compared():
    assert judge([5, 6, 7, 8, 9]) == []  # one more token than was recorded
    assert judge([5, 6, 7]) == []
    assert judge([5, 6, 7, 9, 8]) == ["HEALTH-OUTPUT"]


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
    with pytest.raises(health.PromptsError, match="there is no prompt z; there are a, b, c"):
        health.select(prompts, ["z"], 2)


def test_prompts_of_a_file_or_the_default(tmp_path):
    default = {"max_new_tokens": 8, "prompts": [{"id": "x", "text": "y", "output_ids": None}]}
    assert health.read_prompts(None, default) == default
    path = tmp_path / "prompts.json"
    path.write_text('{"max_new_tokens": 4, "prompts": [{"id": "a", "text": "b"}]}')
    one = {"id": "a", "text": "b", "output_ids": None}
    assert health.read_prompts(str(path), default) == {"max_new_tokens": 4, "prompts": [one]}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"max_new_tokens": 4, "prompts": []}', '{"max_new_tokens": "4", "prompts": [{"id": "a"}]}',
     '{"max_new_tokens": 4, "prompts": ["a"]}', '{"max_new_tokens": 4, "prompts": [{"id": 1, "text": "b"}]}'],
)  # fmt: skip
def test_a_file_of_other_things_is_said_in_a_sentence(tmp_path, text):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(health.PromptsError, match=r"prompts\.json cannot be used: .*is wanted"):
        health.read_prompts(str(path), {})
    with pytest.raises(health.PromptsError, match=r"none\.json cannot be read: No such file"):
        health.read_prompts(str(tmp_path / "none.json"), {})


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
