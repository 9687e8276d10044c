"""Holds the probe's records of a real server against that server, its HTTP answers, and transformers.

    <engine's python> probe/tests/live_check.py --url http://127.0.0.1:30000 --records DIR --models lab/models

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

import evaluated
import torch
from safetensors import safe_open

NEW_TOKENS = 64
ROWS = 16
DIMENSIONS = 16
# between the engine and transformers: the same sums in float32, formed in another order. States reach 200, and the
# next layer's is 10 and more away. Random weights carry rounding further than trained ones.
CLOSE = 2e-4
CLOSE_RANDOM = 1e-3


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
    kind = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"{url}/generate", body, kind)  # noqa: S310 - the server under test, as given
    with urllib.request.urlopen(call, timeout=300) as reply:  # noqa: S310 - the server under test, as given
        answer: dict[str, Any] = json.load(reply)
    return answer


def ask(url: str, ids: list[int], expected: list[int], rid: str) -> Asked:
    """A prompt, then its whole sequence again as a replay that also returns the hidden states over HTTP.

    expected: what plain decoding answers.
    """
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    first = generate(url, input_ids=ids, rid=f"pivot-prompt-{rid}", sampling_params=sampling)
    hold(first["output_ids"] == expected, f"{rid}: the output is not that of plain decoding")
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


def bytes_of(text: str) -> bytes:
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
            hold(bytes_of(text) == printed(states[index]), f"record {record['n']}: a print of state {index} differs")
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


def check_acceptance(asked: Asked, records: Sequence[dict[str, Any]], kind: str) -> tuple[int, int]:
    """Verifications agree with what the server counts and with the output; verifications and accepted drafts."""
    rid = f"pivot-prompt-{asked.rid}"
    verified = of(records, "verify", rid)
    accepted = [record["accepted"][0] for record in verified]
    hold(len(verified) == asked.about["spec_verify_ct"], f"{rid}: {len(verified)} verifications were recorded")
    chain = kind != "tree"
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


def check_evaluator(
    asked: Asked, kept: Replay, records: Sequence[dict[str, Any]], drafter: Path, target: Path
) -> float:
    """The what-if's evaluator computes the states that the served drafter goes on with; the greatest difference."""
    after = evaluated.handed_on(drafter, target, kept.targets[0]["capture"], kept.states, asked.sequence)
    rounds = evaluated.consumed(records, f"pivot-prompt-{asked.rid}", len(asked.prompt))
    greatest, compared = 0.0, 0
    for row, text in rounds:
        if row < len(after):
            own, served = (
                torch.frombuffer(bytearray(x), dtype=torch.float32) for x in (printed(after[row, None]), bytes_of(text))
            )
            greatest, compared = max(greatest, float((own - served).abs().max())), compared + 1
    hold(compared > 10, f"{asked.rid}: only {compared} draft steps could be compared")
    return greatest


def check_hand_over(asked: Asked, kept: Replay, records: Sequence[dict[str, Any]], kind: str) -> None:
    """What is packed, and what the drafter is fed, are the captured states of the same rows.

    Without EAGLE-3 nothing is captured: the drafter is given what was packed, past `fc`.
    """
    last = "given" if kind == "eagle" else "fc"
    for record in kept.targets:
        expected = record["captured"]["prints"]
        for point in ("packed", last):
            found = [entry for entry in of(records, point, record["requests"][0]) if entry["target"] == record["n"]]
            hold(len(found) == 1, f"{asked.rid}: {len(found)} records of {point} for a forward")
            hold(found[0]["positions"] == record["positions"], f"{asked.rid}: {point} has other positions")
            expected = expected or found[0]["prints"]
            hold(found[0]["prints"] == expected, f"{asked.rid}: {point} is not what was captured")
    points = {record["point"] for record in records}
    hold(points & {"fc", "given"} == {last}, f"the drafter's passes were recorded as {points & {'fc', 'given'}}")
    fed = of(records, "fc", f"pivot-replay-{asked.rid}")
    hold(all(len(bytes_of(entry["output"])) % (4 * DIMENSIONS) == 0 for entry in fed), "the output of fc is no print")


HOOKS = {
    *("before_target_forward", "after_target_forward", "after_packing", "on_embedding", "on_attention_of_stream"),
    *("on_layer_done", "on_final_norm", "before_runner_forward", "on_fc", "after_drafting", "after_verifying"),
}


def check_failures(directory: Path) -> int:
    """Every hook raised, was counted, and nothing else was recorded; how many failures there were at least."""
    records = read(directory, 0)
    failed: dict[str, list[int]] = {}
    for record in records:
        if record["point"] == "failure":
            failed.setdefault(record["hook"], []).append(record["count"])
            hold("planted by a test" in record["error"], f"record {record['n']} is another failure: {record['error']}")
    hold(set(failed) == HOOKS, f"these hooks did not fail as planted: {sorted(HOOKS ^ set(failed))}")
    for hook, counts in failed.items():
        hold(counts == [2**power for power in range(len(counts))], f"{hook} was recorded at {counts}")
    others = {record["point"] for record in records} - {"failure", "header"}
    hold(not others, f"{others} were recorded all the same")
    return sum(counts[-1] for counts in failed.values())


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


def check_end(directory: Path) -> int:
    """Recording ended at its quota, with its reason, while requests went on; bytes that the records take."""
    ends = [record for record in read(directory, 0) if record["point"] == "end"]
    hold(len(ends) == 1, f"{len(ends)} records say that recording ended")
    reason = ends[0]["reason"]
    hold("PIVOT_PROBE_MAX_BYTES" in reason, f"recording ended for another reason: {reason}")
    quota = int(reason.rpartition("=")[2])
    size = sum(path.stat().st_size for path in directory.glob("*.jsonl"))
    hold(size <= quota, f"the records take {size} bytes, more than the {quota} they may")
    return size


class Models:
    """The target as transformers computes it, and what it answers."""

    def __init__(self, directory: Path, target: Path) -> None:
        """directory: lab/models; target: the served one, which is the lab's or a class that transformers has."""
        sys.path.insert(0, str(directory))
        from train_target import load  # noqa: PLC0415 - the lab's, found on the path above
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - slow, after the arguments

        self.directory = target
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.prompts = json.loads((directory / "prompts.json").read_text(encoding="utf-8"))["prompts"]
        self._lab = target.resolve() == (directory / "target").resolve()
        if self._lab:
            self.model, self.close = load(target), CLOSE
        else:
            self.close = CLOSE_RANDOM
            self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def questions(self, count: int) -> list[tuple[str, list[int], list[int]]]:
        """Some prompts: name, token ids, and what plain decoding answers."""
        found = []
        for prompt in self.prompts[:count]:
            ids = self.tokenizer(prompt["text"])["input_ids"]
            found.append((prompt["id"], ids, prompt["output_ids"] if self._lab else self.answer(ids)))
        return found

    def answer(self, ids: list[int]) -> list[int]:
        """Greedy decoding by transformers."""
        output: list[int] = []
        with torch.no_grad():
            result = self.model(torch.tensor([ids]), use_cache=True)
            while len(output) < NEW_TOKENS:
                token = result.logits[:, -1:].argmax(-1)
                output.append(int(token))
                result = self.model(token, past_key_values=result.past_key_values, use_cache=True)
        return output


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask, read, check; the figures. Wrong says what does not hold."""
    began, run = time.time(), str(time.time_ns())
    models = Models(arguments.models, arguments.target or arguments.models / "target")
    figures: dict[str, Any] = {"prompts": arguments.prompts, "prints": 0, "http": 0.0, "transformers": 0.0}
    asked = [
        ask(arguments.url, ids, expected, f"{run}-{name}")
        for name, ids, expected in models.questions(arguments.prompts)
    ]
    time.sleep(2)  # the writer is at most a second behind
    if arguments.raising:
        return {"prompts": len(asked), "failures": check_failures(arguments.records)}
    if arguments.ended:
        return {"prompts": len(asked), "bytes": check_end(arguments.records)}
    records = read(arguments.records, began)
    faults = [record for record in records if record["point"] in ("failure", "dropped", "end")]
    hold(not faults, f"the probe reports {faults[:1]}")
    ranks = {record.get("rank") for record in records if record["point"] == "target"}
    records = [record for record in records if record["file"] == first_rank(records)]
    counts = []
    for one in asked:
        kept = replay(one, records, arguments.records)
        figures["prints"] += check_prints(kept)
        if arguments.kind != "eagle":
            figures["http"] = max(figures["http"], check_http(one, kept))
        figures["transformers"] = max(figures["transformers"], check_transformers(models.model, one, kept))
        if arguments.drafter:
            far = check_evaluator(one, kept, records, arguments.drafter, models.directory)
            figures["evaluator"] = max(figures.get("evaluator", 0.0), far)
        counts.append(check_acceptance(one, records, arguments.kind))
        check_hand_over(one, kept, records, arguments.kind)
    hold(figures["http"] == 0.0, f"HTTP differs from the records by {figures['http']}")
    hold(figures["transformers"] < models.close, f"transformers differs from the records by {figures['transformers']}")
    far = figures.get("evaluator", 0.0)
    hold(far < models.close, f"the evaluator's drafter differs from the served one by {far}")
    check_privacy(arguments.url, arguments.records, began)
    figures["verifications"], figures["accepted"] = (sum(column) for column in zip(*counts, strict=True))
    return {**figures, "records": len(records), "ranks": len(ranks)}


def first_rank(records: Sequence[dict[str, Any]]) -> str:
    """The file of rank 0, which is the one that keeps tensors."""
    return str(next(record["file"] for record in records if record["point"] == "target" and record["rank"] == 0))


def main() -> int:
    """The command line; one JSON object with the figures, or one sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the server, which runs the probe")
    parser.add_argument("--records", required=True, type=Path, help="the server's PIVOT_PROBE_DIR")
    parser.add_argument("--models", required=True, type=Path, help="the directory lab/models")
    parser.add_argument("--target", type=Path, help="the served target, where it is not the lab's")
    parser.add_argument(
        "--drafter", type=Path, help="the served drafter, drafting in a chain: the what-if's is compared"
    )
    parser.add_argument("--prompts", type=int, default=3, help="how many prompts are asked")
    parser.add_argument("--kind", choices=["chain", "tree", "eagle"], default="chain", help="how the server drafts")
    parser.add_argument("--raising", action="store_true", help="every hook of the probe raises")
    parser.add_argument("--ended", action="store_true", help="recording ends at a quota that the requests exceed")
    try:
        print(json.dumps(check(parser.parse_args())))
    except Wrong as wrong:
        print(wrong, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
