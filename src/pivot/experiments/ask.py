"""Asking a server the fixed prompts so that the debug probe can be read: first as users do, then the whole again.

Every prompt is answered greedily under a request id that names it. Then prompt and answer together go through once
more as one prompt: that forward of the target holds the state of every position. A fresh cache key keeps the engine
from answering it from its prefix cache; what users have cached there stays.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
import urllib.error
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pivot.experiments.spread import margin, mean_error
from pivot.findings import Finding, Severity
from pivot.serving import health

FORMAT = 1
LAST_DIGIT = 0.005  # accept lengths are shown with two digits
PROMPT, REPLAY = "pivot-prompt-", "pivot-replay-"
# how the counts of accepted drafts are called: from 0.5.15, before
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
KEPT = (
    "version",
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "disable_cuda_graph",
    "model_path",
    "page_size",
    "tp_size",
    "enable_dp_attention",
)
# where no file of prompts is given: text of several kinds, as random or repeated text would flatter a drafter
PROMPTS: Mapping[str, Any] = {
    "max_new_tokens": 96,
    "prompts": [
        {"id": name, "text": text, "output_ids": None}
        for name, text in (
            ("code", "def median(values: list[float]) -> float:\n"),
            ("explain", "Explain to a colleague, step by step, how a hash table deals with collisions.\n"),
            ("prose", "The harbour was quiet that morning, and the first ferry had not yet arrived when\n"),
            ("letter", "Dear Sir or Madam,\n\nI am writing to you because the parcel that I ordered in March\n"),
            ("maths", "Question: A train leaves at 9:40 and arrives at 13:05. How long is the journey?\nAnswer:"),
            ("list", "Ten things to check before a long hike in the mountains:\n1."),
            ("shell", "#!/bin/sh\n# Deletes log files that are older than thirty days and reports what it did\n"),
            ("summary", "In one paragraph, what happened in physics between 1900 and 1930, and why it mattered:\n"),
        )
    ],
}


class Client(Protocol):
    """What is needed of `health.Client`."""

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET, or POST when there is a body; the parsed JSON answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One prompt and its answer. verifications, histogram (of accepted drafts): None and empty without a drafter;
    replayed: whether the whole sequence went through once more."""

    id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    seconds: float
    accept_length: float | None
    verifications: int | None
    histogram: tuple[int, ...]
    replayed: bool = False

    @classmethod
    def of(cls, name: str, prompt_ids: Sequence[int], reply: Mapping[str, Any], seconds: float = 0.0) -> Asked:
        """From the reply of /generate: output_ids, text, and meta_info as it is spelt from 0.5.9 to 0.5.23."""
        about = reply["meta_info"]
        length, verifications = about.get("spec_accept_length"), about.get("spec_verify_ct")
        return cls(
            id=name,
            prompt_ids=tuple(prompt_ids),
            output_ids=tuple(reply.get("output_ids", [])),
            text=reply.get("text", ""),
            seconds=seconds,
            accept_length=None if length is None else float(length),
            verifications=None if verifications is None else int(verifications),
            histogram=tuple(next((about[name] for name in HISTOGRAMS if about.get(name)), [])),
        )

    @property
    def rid(self) -> str:
        """The request id under which the replay's states are recorded."""
        return REPLAY + self.id

    def as_answer(self) -> health.Answer:
        """As `pivot.serving.health` judges it."""
        return health.Answer(self.id, list(self.output_ids), self.text, self.seconds, self.accept_length)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for Ansible."""
        return {
            "id": self.id,
            "rid": self.rid,
            "prompt_tokens": len(self.prompt_ids),
            "output_ids": list(self.output_ids),
            "seconds": round(self.seconds, 3),
            "accept_length": self.accept_length,
            "verifications": self.verifications,
            "histogram": list(self.histogram),
            "replayed": self.replayed,
        }


def ask(client: Client, prompt: Mapping[str, Any], max_new_tokens: int) -> Asked:
    """One greedy answer; to its full length where the answer was recorded, else to the model's own end.

    Errors are urllib's; ValueError when the ids of the prompt cannot be had.
    """
    begin = time.monotonic()
    sampling = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": prompt.get("output_ids") is not None,
    }
    result = client.call(
        "/generate", {"text": prompt["text"], "sampling_params": sampling, "rid": PROMPT + prompt["id"]}
    )
    seconds = time.monotonic() - begin
    ids = tokenize(client, prompt["text"], result["meta_info"].get("prompt_tokens"))
    return Asked.of(str(prompt["id"]), ids, result, seconds)


def tokenize(client: Client, text: str, count: int | None) -> tuple[int, ...]:
    """The token ids that the server makes of a prompt, held against the count that it generated from."""
    tried = []
    for special in (True, False):
        answer = client.call("/tokenize", {"model": "default", "prompt": text, "add_special_tokens": special})
        tokens = tuple(int(token) for token in answer["tokens"])
        if count is None or len(tokens) == count:
            return tokens
        tried.append(len(tokens))
    raise ValueError(f"/tokenize makes {tried[0]} tokens of a prompt that /generate counts as {count}")


def replay(client: Client, name: str, ids: Sequence[int]) -> None:
    """Send a whole sequence through the target once, under the request id that the probe keeps states of.

    Its one generated token is dropped. Errors are urllib's.
    """
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "rid": REPLAY + name,
        "extra_key": f"pivot-{secrets.token_hex(8)}",
    }
    client.call("/generate", body)


def ask_all(
    client: Client, prompts: Sequence[Mapping[str, Any]], max_new_tokens: int, *, replays: bool
) -> tuple[list[Asked], list[Finding]]:
    """Ask every prompt, then replay every sequence. What goes wrong with one prompt is a finding about it."""
    asked: list[Asked] = []
    found: list[Finding] = []
    for prompt in prompts:
        try:
            asked.append(ask(client, prompt, max_new_tokens))
        except ValueError as error:
            found.append(_finding("PROBE-ASK-TOKENS", f"prompt {prompt['id']}", f"{error}; it is left out"))
    for index, one in enumerate(asked if replays else []):
        if not one.output_ids:
            continue  # the judge of the answers says so
        try:
            replay(client, one.id, [*one.prompt_ids, *one.output_ids])
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise
            said = error.read().decode(errors="replace")[:200]
            found.append(_finding("PROBE-REPLAY", f"prompt {one.id}", f"its replay was refused: {said}"))
        else:
            asked[index] = dataclasses.replace(one, replayed=True)
    return asked, found


def accept_length(asked: Sequence[Asked]) -> float | None:
    """Tokens per verification over all answers that were drafted for, None when there are none."""
    drafted = [one for one in asked if one.verifications]
    verifications = sum(one.verifications or 0 for one in drafted)
    return sum(len(one.output_ids) for one in drafted) / verifications if verifications else None


def per_position(asked: Sequence[Asked], steps: int = 0) -> list[float]:
    """Share of all verifications that accepted at least 1, 2, … drafts, empty when no histogram was reported.

    steps: of a draft; an engine's histogram ends with the most that was accepted.
    """
    longest = max((len(one.histogram) for one in asked), default=0)
    longest = max(longest, steps + 1) if longest else 0
    counts = [sum(one.histogram[k] for one in asked if k < len(one.histogram)) for k in range(longest)]
    total = sum(counts)
    return [round(sum(counts[k:]) / total, 4) for k in range(1, longest)] if total else []


def server(client: Client) -> dict[str, Any]:
    """What the server says about how it drafts: its version and the settings that KEPT names, by SGLang's names.

    The rest of its answer, which holds keys, is dropped. Empty where it has neither of the two addresses.
    """
    for path in ("/server_info", "/get_server_info"):
        try:
            answer = client.call(path)
        except urllib.error.HTTPError as error:
            if error.code in (404, 405):
                continue
            raise
        return {
            name: value
            for name, value in sorted(answer.items())
            if (name.startswith("speculative_") or name in KEPT) and isinstance(value, str | int | float | bool)
        }
    return {}


def as_dict(
    asked: Sequence[Asked], max_new_tokens: int, server_settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What was asked and answered, as it is kept beside the records."""
    length = accept_length(asked)
    settings = dict(server_settings or {})
    return {
        "format": FORMAT,
        "max_new_tokens": max_new_tokens,
        "server": settings,
        "accept_length": None if length is None else round(length, 4),
        "per_position": per_position(asked, int(settings.get("speculative_num_steps") or 0)),
        "prompts": [one.as_dict() for one in asked],
    }


def compare(before: Mapping[str, Any], during: Mapping[str, Any], subject: str) -> list[Finding]:
    """Whether the probe changed what is served: both as `as_dict` gives them.

    Without CUDA graphs rounding may differ, so the accept length may move a little: a change beyond what chance does
    to the differences between prompts (and beyond the last digit shown) is a finding, as graphs may hide a fault.
    """
    found: list[Finding] = []
    earlier = {one["id"]: one for one in before["prompts"]}
    pairs = [(earlier[one["id"]], one) for one in during["prompts"] if one["id"] in earlier]
    other = [one["id"] for old, one in pairs if old["output_ids"] != one["output_ids"]]
    if other:
        message = f"{len(other)} of {len(pairs)} answers differ with the probe from those without: {', '.join(other)}"
        fix = (
            "outputs of a GPU without CUDA graphs may round differently; otherwise report it with the engine's version"
        )
        found.append(Finding("PROBE-OUTPUT", Severity.WARNING, subject, message, fix))
    lengths = [
        (old["accept_length"], one["accept_length"])
        for old, one in pairs
        if old["accept_length"] is not None and one["accept_length"] is not None
    ]
    moved = [new - old for old, new in lengths]
    if len(moved) > 1:
        mean = mean_error(moved)[0]
        if abs(mean) > max(margin(moved), LAST_DIGIT):
            message = (
                f"the accept length moved by {mean:+.2f} when debugging was switched on "
                f"({before['accept_length']:.2f} before, {during['accept_length']:.2f} during)"
            )
            fix = "what CUDA graphs do differently is where to look: the answer holds for serving without them"
            found.append(Finding("PROBE-CHANGES", Severity.WARNING, subject, message, fix))
    return found


def save(path: str, record: Mapping[str, Any]) -> None:
    """Write what `as_dict` gives; errors are `open`'s."""
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _finding(code: str, subject: str, message: str) -> Finding:
    fix = "the what-if does without this prompt; choose another one with debug_probes_prompts"
    return Finding(code, Severity.WARNING, subject, message, fix)
