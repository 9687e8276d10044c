"""Holds the probe's records of a real server against that server, its HTTP answers, and transformers.

    <engine's python> probe/tests/live_check.py --url http://127.0.0.1:30000 --records DIR --models lab/models [--chain]

The server runs the lab's tiny pair in float32 with the probe and ``--enable-return-hidden-states``. The interpreter
is the engine's (torch, transformers, safetensors). Prints what it measured; status 1 with one sentence when something
does not hold.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

NEW_TOKENS = 64
ROWS = 16
DIMENSIONS = 16
# between the engine and transformers: the same sums in float32, formed in another order
CLOSE = 2e-4


class Wrong(Exception):  # noqa: N818 - a sentence for a person
    """Something that has to hold and does not."""


def hold(condition: bool, sentence: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise Wrong(sentence)


# --- asking


class Asked(NamedTuple):
    """A prompt, its token ids, and the two answers."""

    rid: str
    prompt: list[int]
    output: list[int]
    about: dict[str, Any]
    replayed: dict[str, Any]

    @property
    def sequence(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output


def generate(url: str, **request: Any) -> dict[str, Any]:
    """The answer of /generate to one greedy request."""
    body = json.dumps(request).encode()
    call = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(call, timeout=300) as reply:  # noqa: S310 - the server under test, as given
        answer: dict[str, Any] = json.load(reply)
    return answer


def ask(url: str, prompt: dict[str, Any], ids: list[int], run: str) -> Asked:
    """A prompt, then its whole sequence again as a replay that also returns the hidden states over HTTP."""
    rid = f"{run}-{prompt['id']}"
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    first = generate(url, input_ids=ids, rid=f"pivot-prompt-{rid}", sampling_params=sampling)
    hold(
        first["output_ids"] == prompt["output_ids"], f"prompt {prompt['id']}: the output is not that of plain decoding"
    )
    second = generate(
        url,
        input_ids=ids + first["output_ids"],
        rid=f"pivot-replay-{rid}",
        extra_key=f"pivot-replay-{rid}",
        return_hidden_states=True,
        sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
    )
    return Asked(rid, ids, first["output_ids"], first["meta_info"], second["meta_info"])


# --- reading


def read(directory: Path, since: float) -> list[dict[str, Any]]:
    """Every record that was observed since a time, with its file's name under ``file``."""
    records = []
    for path in sorted(directory.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        numbers = [line["n"] for line in lines]
        hold(numbers == sorted(set(numbers)), f"{path.name}: the numbers of its records do not rise")
        records.extend({**line, "file": path.name} for line in lines if line["t"] >= since)
    return records


def of(records: Sequence[dict[str, Any]], point: str, rid: str) -> list[dict[str, Any]]:
    """The records of a point that are about this request alone."""
    return [record for record in records if record["point"] == point and record.get("requests") == [rid]]


def rows_of(text: str) -> bytes:
    """A print's bytes."""
    return base64.b64decode(text, validate=True)


def printed(states: torch.Tensor) -> bytes:
    """The print of a state [rows, width], formed as probe/README.md says and not as the probe does it."""
    width = states.shape[-1]
    bits = random.Random(1).getrandbits(16 * width)  # noqa: S311 - the signs that the records name
    signs = [[1.0 if bits >> (column * width + row) & 1 else -1.0 for column in range(16)] for row in range(width)]
    matrix = torch.tensor(signs, dtype=torch.float64) / width**0.5
    return (states[:ROWS].to(torch.float64) @ matrix).to(torch.float32).numpy().tobytes()


class Replay(NamedTuple):
    """What was kept of one replay, in the order of positions. states: [layers + 1, positions, width]."""

    states: torch.Tensor
    targets: list[dict[str, Any]]


def replay(asked: Asked, records: Sequence[dict[str, Any]], directory: Path) -> Replay:
    """The tensors of a replay: every position once, in order, with the tokens that were asked."""
    targets = of(records, "target", f"pivot-replay-{asked.rid}")
    hold(bool(targets), f"{asked.rid}: no forward of the replay was recorded")
    states, tokens, positions = [], [], []
    for record in targets:
        hold(bool(record["tensors"]), f"{asked.rid}: no tensors ({record.get('tensors_left_out')})")
        path = directory / record["tensors"]
        hold(path.stat().st_mode & 0o007 == 0, f"{path.name} is open to everybody")
        with safe_open(path, "pt") as file:
            about = file.metadata()
            states.append(file.get_tensor("states"))
            tokens.extend(file.get_tensor("input_ids").tolist())
            positions.extend(file.get_tensor("positions").tolist())
            hold(int(file.get_tensor("lengths").sum()) == states[-1].shape[1], f"{path.name}: lengths and rows differ")
        hold(
            about["schema"] == "2" and about["n"] == str(record["n"]), f"{path.name}: its metadata are not its record's"
        )
        hold(json.loads(about["requests"]) == record["requests"], f"{path.name}: other requests than its record")
    hold(positions == list(range(len(asked.sequence))), f"{asked.rid}: the tensors hold positions {positions}")
    hold(tokens == asked.sequence, f"{asked.rid}: the tensors hold other tokens than were asked")
    return Replay(torch.cat(states, 1), targets)


# --- checks


def check_prints(kept: Replay) -> int:
    """The prints of a replay's records are those of its tensors, bit for bit; how many were compared."""
    compared, start = 0, 0
    for record in kept.targets:
        states = kept.states[:, start : start + record["rows"]]
        start += record["rows"]
        layers = record["layers"]
        pairs = [(record["embedding"], 0)]
        pairs += [(record["inputs"][str(layer)], layer) for layer in range(layers)]
        pairs += [(record["outputs"][str(layer)], layer + 1) for layer in range(layers)]
        pairs += zip(record["captured"]["prints"], record["capture"], strict=True)
        for text, index in pairs:
            hold(rows_of(text) == printed(states[index]), f"record {record['n']}: a print of state {index} differs")
            compared += 1
    return compared


def check_http(asked: Asked, kept: Replay) -> float:
    """What the server returns as hidden states is what was captured; the greatest difference."""
    capture = kept.targets[0]["capture"]
    returned = torch.tensor(asked.replayed["hidden_states"][0])
    expected = torch.cat([kept.states[layer] for layer in capture], -1)[: returned.shape[0]]
    hold(returned.shape == expected.shape, f"{asked.rid}: HTTP gave {returned.shape}, the records {expected.shape}")
    return float((returned - expected).abs().max())


def check_transformers(model: Any, asked: Asked, kept: Replay) -> float:
    """transformers computes the same states from the same weights; the greatest difference over all layers."""
    last: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _module, args: last.append(args[0]))
    with torch.no_grad():
        result = model(torch.tensor([asked.sequence]), output_hidden_states=True, use_cache=False)
    handle.remove()
    inputs = result.hidden_states[: kept.states.shape[0] - 1]  # hidden_states[i] is the input of layer i
    own = torch.stack([state[0] for state in (*inputs, last[0])])
    hold(own.shape == kept.states.shape, f"{asked.rid}: transformers has {own.shape}, the records {kept.states.shape}")
    return float((own - kept.states).abs().max())


def check_acceptance(asked: Asked, records: Sequence[dict[str, Any]], chain: bool) -> tuple[int, int]:
    """Verifications agree with what the server counts and with the output; verifications and accepted drafts."""
    rid = f"pivot-prompt-{asked.rid}"
    verified = of(records, "verify", rid)
    accepted = [record["accepted"][0] for record in verified]
    hold(len(verified) == asked.about["spec_verify_ct"], f"{rid}: {len(verified)} verifications were recorded")
    counted = asked.about["spec_correct_drafts_histogram"]
    own = [accepted.count(number) for number in range(len(counted))]
    hold(own == counted, f"{rid}: accepted {own} by the records, {counted} by the server")
    made = [token for record in verified for token in record["committed"][0]]
    hold(asked.output[1:] == made[: len(asked.output) - 1], f"{rid}: what was committed is not the output")
    for record in verified:
        right = record["committed"][0][: record["accepted"][0]]
        drafted = record["drafted"][0]
        hold(set(right) <= set(drafted), f"{rid}: record {record['n']} accepts what was not drafted")
        hold(not chain or drafted[: len(right)] == right, f"{rid}: record {record['n']} accepts another chain")
    check_drafts(rid, records, verified, chain)
    return len(verified), sum(accepted)


def check_drafts(rid: str, records: Sequence[dict[str, Any]], verified: list[dict[str, Any]], chain: bool) -> None:
    """Each verification had its round of drafting, step for step."""
    drafts = of(records, "draft", rid)
    steps = verified[0]["steps"]
    rounds = [drafts[start : start + steps] for start in range(0, len(drafts), steps)]
    hold(len(rounds) >= len(verified), f"{rid}: {len(rounds)} rounds of drafting for {len(verified)} verifications")
    for round_, record in zip(rounds, verified, strict=False):
        hold([draft["step"] for draft in round_] == list(range(steps)), f"{rid}: the steps of a round are not in order")
        hold(round_[0]["hidden"] is None and all(draft["hidden"] for draft in round_[1:]), f"{rid}: states are missing")
        if chain:
            chosen = [draft["tokens"][0][0] for draft in round_]
            hold(chosen == record["drafted"][0], f"{rid}: drafted {chosen}, verified {record['drafted'][0]}")


def check_hand_over(asked: Asked, kept: Replay, records: Sequence[dict[str, Any]]) -> None:
    """What is packed, and what `fc` is fed, are the captured states of the same rows."""
    for record in kept.targets:
        for point in ("packed", "fc"):
            found = [entry for entry in of(records, point, record["requests"][0]) if entry["target"] == record["n"]]
            hold(len(found) == 1, f"{asked.rid}: {len(found)} records of {point} for a forward")
            hold(found[0]["prints"] == record["captured"]["prints"], f"{asked.rid}: {point} is not what was captured")
            hold(found[0]["positions"] == record["positions"], f"{asked.rid}: {point} has other positions")
    fed = of(records, "fc", f"pivot-replay-{asked.rid}")
    hold(all(len(rows_of(entry["output"])) % (4 * DIMENSIONS) == 0 for entry in fed), "the output of fc is no print")


def check_privacy(url: str, directory: Path, began: float) -> None:
    """Somebody else's request leaves no token."""
    rid = f"somebody-{time.time_ns()}"
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    generate(url, text="Once there was a", rid=rid, sampling_params=sampling)
    time.sleep(2)
    foreign = [record for record in read(directory, began) if record.get("requests") == [rid]]
    hold({"target", "draft", "verify"} <= {record["point"] for record in foreign}, "a foreign request was not recorded")
    for record in foreign:
        kept = [record.get(name) for name in ("tokens", "drafted", "committed", "tensors")]
        hold(not any(kept), f"record {record['n']} keeps tokens of a foreign request")


# --- all of it


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the server, which runs the probe")
    parser.add_argument("--records", required=True, type=Path, help="the server's PIVOT_PROBE_DIR")
    parser.add_argument("--models", required=True, type=Path, help="the directory lab/models")
    parser.add_argument("--prompts", type=int, default=3, help="how many prompts are asked")
    parser.add_argument("--tree", action="store_true", help="the server drafts trees (topk above 1)")
    return parser.parse_args()


def main() -> int:
    """Ask, read, check; one JSON object with the figures."""
    arguments = parse()
    sys.path.insert(0, str(arguments.models))
    from train_target import load  # noqa: PLC0415 - the lab's, found on the path above
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import, after the arguments are read

    began, run = time.time(), str(time.time_ns())
    chosen = json.loads((arguments.models / "prompts.json").read_text(encoding="utf-8"))["prompts"][: arguments.prompts]
    target = arguments.models / "target"
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = load(target)
    figures: dict[str, Any] = {"prompts": len(chosen), "prints": 0, "http": 0.0, "transformers": 0.0}
    try:
        all_asked = [ask(arguments.url, prompt, tokenizer(prompt["text"])["input_ids"], run) for prompt in chosen]
        time.sleep(2)  # the writer is at most a second behind
        records = read(arguments.records, began)
        faults = [record for record in records if record["point"] in ("failure", "dropped", "end")]
        hold(not faults, f"the probe reports {faults[:1]}")
        counts = []
        for asked in all_asked:
            kept = replay(asked, records, arguments.records)
            figures["prints"] += check_prints(kept)
            figures["http"] = max(figures["http"], check_http(asked, kept))
            figures["transformers"] = max(figures["transformers"], check_transformers(model, asked, kept))
            counts.append(check_acceptance(asked, records, not arguments.tree))
            check_hand_over(asked, kept, records)
        hold(figures["http"] == 0.0, f"HTTP differs from the records by {figures['http']}")
        hold(figures["transformers"] < CLOSE, f"transformers differs from the records by {figures['transformers']}")
        check_privacy(arguments.url, arguments.records, began)
    except Wrong as wrong:
        print(wrong, file=sys.stderr)
        return 1
    figures["verifications"], figures["accepted"] = (sum(column) for column in zip(*counts, strict=True))
    figures["records"] = len(records)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
