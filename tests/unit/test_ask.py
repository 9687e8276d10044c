"""Asking the fixed prompts and replaying them, on a client that answers by the book."""

import io
import urllib.error
from email.message import Message

import pytest

from pivot.experiments import ask


class Server:
    """Answers /tokenize with one token a letter and /generate with 7, 8, 9; keeps what it was asked."""

    def __init__(self, about=None, *, special=1, refuse=None):
        self.about, self.special, self.refuse, self.asked = about or {}, special, refuse, []

    def call(self, path, body=None):
        self.asked.append((path, body))
        if path == "/tokenize":
            letters = [ord(letter) for letter in body["prompt"]]
            return {"tokens": [1] * self.special + letters if body["add_special_tokens"] else letters}
        if self.refuse and body["rid"].startswith(ask.REPLAY):
            raise self.refuse
        return {"text": "x", "output_ids": [7, 8, 9], "meta_info": {"prompt_tokens": 2, **self.about}}


DRAFTED = {"spec_accept_length": 1.5, "spec_verify_ct": 2, "spec_correct_drafts_histogram": [1, 1]}
PROMPT = {"id": "p1", "text": "ab", "output_ids": None}


def refusal(code):
    return urllib.error.HTTPError("u", code, "no", Message(), io.BytesIO(b"the input is too long"))


def test_a_prompt_is_asked_under_its_name_and_replayed_as_a_whole():
    server = Server(DRAFTED)
    asked, found = ask.ask_all(server, [PROMPT], 3, replays=True)
    assert found == []
    assert asked[0].prompt_ids == (97, 98)  # two tokens were counted, so none was added
    assert asked[0].as_dict() | {"seconds": 0} == {
        "id": "p1",
        "rid": "pivot-replay-p1",
        "prompt_tokens": 2,
        "output_ids": [7, 8, 9],
        "seconds": 0,
        "accept_length": 1.5,
        "verifications": 2,
        "histogram": [1, 1],
        "replayed": True,
    }
    first, *_, last = [body for path, body in server.asked if path == "/generate"]
    assert first["rid"] == "pivot-prompt-p1"
    assert first["sampling_params"] == {"temperature": 0, "max_new_tokens": 3, "ignore_eos": False}
    assert "extra_key" not in first  # as users ask
    assert last["rid"] == "pivot-replay-p1"
    assert last["input_ids"] == [97, 98, 7, 8, 9]
    assert last["sampling_params"]["max_new_tokens"] == 1


def test_every_replay_has_a_cache_key_of_its_own():
    server = Server(DRAFTED)
    ask.ask_all(server, [PROMPT, {**PROMPT, "id": "p2"}], 3, replays=True)
    keys = [body["extra_key"] for _, body in server.asked if "extra_key" in body]
    assert len(set(keys)) == 2


def test_a_recorded_answer_is_asked_for_to_its_full_length():
    server = Server()
    ask.ask(server, {**PROMPT, "output_ids": [7]}, 3)
    assert server.asked[0][1]["sampling_params"]["ignore_eos"] is True


def test_the_older_name_of_the_histogram_is_read():
    older = {"spec_accept_length": 1.5, "spec_verify_ct": 2, "spec_accept_histogram": [0, 2]}
    assert ask.ask(Server(older), PROMPT, 3).histogram == (0, 2)


def test_without_a_drafter_nothing_is_made_up():
    asked, _ = ask.ask_all(Server(), [PROMPT], 3, replays=False)
    record = ask.as_dict(asked, 3)
    assert (record["accept_length"], record["per_position"]) == (None, [])
    assert record["prompts"][0]["replayed"] is False


def test_a_prompt_whose_tokens_cannot_be_had_is_left_out():
    asked, found = ask.ask_all(Server({"prompt_tokens": 9}), [PROMPT], 3, replays=True)
    assert asked == []
    assert [finding.code for finding in found] == ["PROBE-ASK-TOKENS"]
    assert "makes 3 tokens of a prompt that /generate counts as 9" in found[0].message


def test_a_refused_replay_is_a_finding_about_its_prompt():
    asked, found = ask.ask_all(Server(DRAFTED, refuse=refusal(400)), [PROMPT], 3, replays=True)
    assert [finding.code for finding in found] == ["PROBE-REPLAY"]
    assert "the input is too long" in found[0].message
    assert asked[0].replayed is False


def test_a_refused_key_is_for_the_caller():
    with pytest.raises(urllib.error.HTTPError):
        ask.ask_all(Server(DRAFTED, refuse=refusal(401)), [PROMPT], 3, replays=True)


def one(name, length, outputs=(7, 8), histogram=(1, 0, 1)):
    return ask.Asked(name, (1,), outputs, "", 1.0, length, sum(histogram), histogram)


def test_the_accept_length_is_of_all_verifications_and_positions_from_all_histograms():
    asked = [one("a", 2.0, (7,) * 4, (1, 0, 1)), one("b", 1.0, (7,) * 2, (1, 1, 0))]
    assert ask.accept_length(asked) == 6 / 4
    assert ask.per_position(asked) == [0.5, 0.25]  # 2 of 4 accepted one or more, 1 of 4 two
    assert ask.per_position([one("c", 1.0, histogram=(3,))], 3) == [0.0, 0.0, 0.0]  # the engine ends it early


def record(*lengths, outputs=(7, 8)):
    return ask.as_dict([one(f"p{n}", length, outputs) for n, length in enumerate(lengths)], 2)


def test_debugging_that_changes_nothing_is_silent():
    assert ask.compare(record(2.0, 2.5, 3.0), record(2.0, 2.5, 3.0), "h") == []
    # up and down, as rounding moves it
    assert ask.compare(record(2.0, 2.5, 3.0), record(2.3, 2.2, 3.1), "h") == []


def test_debugging_that_moves_the_accept_length_is_said():
    found = ask.compare(record(2.0, 2.5, 3.0), record(2.5, 3.1, 3.6), "h")
    assert [finding.code for finding in found] == ["PROBE-CHANGES"]
    assert "+0.57" in found[0].message


def test_debugging_that_changes_answers_is_said():
    found = ask.compare(record(2.0, 2.0), record(2.0, 2.0, outputs=(7, 9)), "h")
    assert [finding.code for finding in found] == ["PROBE-OUTPUT"]
    assert "2 of 2 answers differ" in found[0].message


def test_the_built_in_prompts_are_of_several_kinds():
    prompts = ask.PROMPTS["prompts"]
    assert len({prompt["id"] for prompt in prompts}) == len(prompts) == 8


class Info:
    """A server that has the older of the two addresses only."""

    def call(self, path, body=None):
        if path == "/server_info":
            raise refusal(404)
        return {"version": "0.5.9", "speculative_num_steps": 3, "api_key": "sk-1", "speculative_x": None, "port": 1}


def test_of_the_server_only_what_concerns_drafting_is_kept():
    assert ask.server(Info()) == {"speculative_num_steps": 3, "version": "0.5.9"}
