"""Health of a server: generated completions with sane content, not an open port."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot.findings import Finding, Severity

# what the answers of a few addresses have to hold to be of use
HOLDS: Mapping[str, tuple[str, type]] = {"/generate": ("meta_info", dict), "/tokenize": ("tokens", list)}
SHAPE = '{"max_new_tokens": number, "prompts": [{"id": …, "text": …, "output_ids": recorded or null}, …]} is wanted'


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One completion. seconds: wall clock; accept_length: mean tokens per verification, None without a drafter."""

    prompt_id: str
    output_ids: list[int]
    text: str
    seconds: float
    accept_length: float | None


def loops(tokens: Sequence[int], *, window: int = 32, longest: int = 8) -> bool:
    """Whether the last `window` tokens are one pattern of at most `longest` tokens, repeated."""
    tail = list(tokens[-window:])
    if len(tail) < window:
        return False
    return any(all(tail[i] == tail[i - period] for i in range(period, window)) for period in range(1, longest + 1))


class PromptsError(ValueError):
    """A file of prompts that cannot be used; the text names the file and what is wrong in it."""


def read_prompts(path: str | None, default: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a JSON file of recorded prompts holds, {max_new_tokens, prompts: [{id, text, output_ids}]}; without a path
    the default. A PromptsError says why it cannot be used."""
    if not path:
        return default
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        longest, entries = found["max_new_tokens"], found["prompts"]
        named = all(isinstance(entry["id"], str) and isinstance(entry["text"], str) for entry in entries)
    except OSError as error:
        raise PromptsError(f"the prompts {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PromptsError(f"the prompts {path} cannot be used: {SHAPE}") from error
    if not named or not isinstance(longest, int) or not entries:
        raise PromptsError(f"the prompts {path} cannot be used: {SHAPE}")
    return {"max_new_tokens": longest, "prompts": [{"output_ids": None, **entry} for entry in entries]}


def select(prompts: Mapping[str, Any], ids: Sequence[str], count: int) -> list[dict[str, Any]]:
    """The prompts to ask: those named, or the first `count`. A PromptsError names an id that there is not."""
    entries: list[dict[str, Any]] = prompts["prompts"]
    if not ids:
        return entries[:count]
    by_id = {entry["id"]: entry for entry in entries}
    missing = [name for name in ids if name not in by_id]
    if missing:
        raise PromptsError(f"there is no prompt {missing[0]}; there are {', '.join(by_id)}")
    return [by_id[name] for name in ids]


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Mean over the answers that report one, None when none does."""
    lengths = [answer.accept_length for answer in answers if answer.accept_length is not None]
    return sum(lengths) / len(lengths) if lengths else None


def judge(
    subject: str, answers: Sequence[Answer], prompts: Sequence[Mapping[str, Any]], *, drafter: bool, least: float
) -> list[Finding]:
    """Compare answers with the recorded ones (`output_ids`, null where none can be known).

    drafter: whether speculation is configured; least: the accept length below which a warning is due.
    """
    findings: list[Finding] = []

    def add(code: str, severity: Severity, message: str, fix: str) -> None:
        findings.append(Finding(code, severity, subject, message, fix))

    for answer, prompt in zip(answers, prompts, strict=True):
        expected = prompt.get("output_ids")
        if not answer.output_ids:
            add(
                "HEALTH-EMPTY",
                Severity.ERROR,
                f"prompt {answer.prompt_id} got an empty answer",
                "read the server's log",
            )
        elif loops(answer.output_ids):
            add(
                "HEALTH-LOOP",
                Severity.ERROR,
                f"the answer to prompt {answer.prompt_id} repeats itself: {answer.text[-60:]!r}",
                "check weights, quantisation and attention backend; a loop also inflates the accept length",
            )
        elif (at := _parted(answer.output_ids, expected or [])) is not None:
            add(
                "HEALTH-OUTPUT",
                Severity.ERROR,
                f"the answer to prompt {answer.prompt_id} differs from plain decoding's from token {at} on",
                "the target's weights, dtype or backend are not those that were recorded",
            )
    length = accept_length(answers)
    if drafter and length is None:
        add(
            "HEALTH-NO-SPEC",
            Severity.ERROR,
            "a drafter is configured but no answer reports speculation",
            "check speculative-algorithm",
        )
    elif length is not None and length < least:
        add(
            "HEALTH-ACCEPT",
            Severity.WARNING,
            f"the accept length of the health prompts is {length:.2f}, expected at least {least:.2f}",
            "ansible-playbook deploy.yml --tags debug-on shows which layers reach the drafter",
        )
    return findings


def _parted(given: Sequence[int], recorded: Sequence[int]) -> int | None:
    """The first token that is another one; None as far as both go. An engine may give more than it was asked for."""
    pairs = enumerate(zip(given, recorded, strict=False))
    return next((index for index, (token, right) in pairs if token != right), None)


class Client:
    """The few calls of a running server that the checks need. Errors are urllib's, also where something else than
    SGLang answers, or an answer breaks off."""

    def __init__(self, url: str, api_key: str | None, timeout: float = 300.0) -> None:
        self._url, self._key, self._timeout = url, api_key, timeout

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET, or POST when there is a body; the JSON object that comes back."""
        try:
            answer = json.loads(self._read(path, body))
        except ValueError as error:
            raise urllib.error.URLError(f"what comes from {path} is no JSON") from error
        if not isinstance(answer, dict):
            raise urllib.error.URLError(f"what comes from {path} is no JSON object")
        name, kind = HOLDS.get(path, ("", object))
        if not isinstance(answer.get(name), kind):
            raise urllib.error.URLError(f"what comes from {path} has no {name}")
        return answer

    def _read(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})  # noqa: S310 - http(s) only, from the inventory
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        # the server is on the operator's network: a proxy from the environment would not reach it
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self._timeout) as response:
                return bytes(response.read())
        except http.client.HTTPException as error:
            raise urllib.error.URLError(f"what comes from {path} breaks off or is no HTTP ({error!r:.80})") from error

    def listens(self) -> None:
        """GET /health, all that SGLang answers where it is a further machine of a server."""
        self._read("/health", None)

    def generate(self, prompt: Mapping[str, Any], max_new_tokens: int) -> Answer:
        """One greedy completion; to its full length where the output was recorded, else to the model's own end."""
        begin = time.monotonic()
        recorded = prompt.get("output_ids") is not None
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": recorded}
        result = self.call("/generate", {"text": prompt["text"], "sampling_params": sampling})
        length = result["meta_info"].get("spec_accept_length")
        return Answer(
            prompt_id=prompt["id"],
            output_ids=result.get("output_ids", []),
            text=result.get("text", ""),
            seconds=time.monotonic() - begin,
            accept_length=None if length is None else float(length),
        )


def unreachable(subject: str, url: str, error: Exception) -> Finding:
    """A server that does not answer, or refuses the key."""
    if isinstance(error, urllib.error.HTTPError) and error.code == 401:
        return Finding(
            "HEALTH-KEY",
            Severity.ERROR,
            subject,
            f"{url} refuses the API key",
            "check sglang_server_api_key in the vault",
        )
    reason = getattr(error, "reason", error)
    return Finding(
        "HEALTH-UNREACHABLE",
        Severity.ERROR,
        subject,
        f"{url} does not answer: {reason}",
        f"look at the journal of the unit on {subject}: ansible-playbook deploy.yml --tags collect",
    )


def chat(subject: str, client: Client) -> list[Finding]:
    """One chat completion over the endpoint that users call; its text must not be empty."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "import "}],
        "temperature": 0,
        "max_tokens": 16,
    }
    choices = client.call("/v1/chat/completions", body).get("choices") or []
    message = (choices[0].get("message") if choices else None) or {}
    if message.get("content") or message.get("reasoning_content"):
        return []
    return [
        Finding(
            "HEALTH-CHAT",
            Severity.ERROR,
            subject,
            "/v1/chat/completions answers without content",
            "check the tokenizer's chat template and the reasoning parser",
        )
    ]
