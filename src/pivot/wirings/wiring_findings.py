"""What is wrong with a wiring, with the evidence and the change to make; findings ``WIRE-*``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pivot.drafters.layers import default_layers, ids_for
from pivot.findings import Finding, Severity
from pivot.wirings.matching import MOVED, OLD, ROUND, SAME, SCALE, ZERO
from pivot.wirings.records import SCHEMA, Recording

if TYPE_CHECKING:
    from pivot.wirings.slices import Slice
    from pivot.wirings.wiring import Acceptance, Wiring

REFERENCE = "docs/faults.md"
ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
# how the counts of accepted drafts are called: from 0.5.15, before
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
# tokens that a request's end cuts off its last verification, at most, where the number of drafts is not known
MOST_CUT = 16.0
OWN_STATE = "its own state"
INTERFERES = "look for a plugin, a patch or a bug of this version that touches hidden states before fc"


def _finding(code: str, severity: Severity, subject: str, message: str, fix: str) -> Finding:
    return Finding(code, severity, subject, message, fix, REFERENCE)


# --- the files


def of_reading(recordings: Sequence[Recording]) -> Iterator[Finding]:
    """What the files themselves say: nothing there, damage, hooks that failed, a recording that ended."""
    if not any(recording.header for recording in recordings):
        message = f"{len(recordings)} record files were read and none has a header: the probe was not loaded"
        fix = "switch debugging on, look for pivot_probe in the server's log, and send a request"
        yield _finding("WIRE-NO-RECORDS", ERROR, "probe records", message, fix)
        return
    for recording in recordings:
        yield from _of_file(recording)
    if not any(recording.targets for recording in recordings):
        message = f"the probe was loaded but saw no forward of the target ({_missing_hooks(recordings)})"
        fix = "send a request; where the engine uses CUDA graphs, switch them off while debugging"
        yield _finding("WIRE-NO-FORWARD", ERROR, "probe records", message, fix)
        return
    given = any(recording.given for recording in recordings)
    for point, seen in (
        ("packed", any(recording.packed for recording in recordings)),
        ("fc", given or any(recording.fed for recording in recordings)),
    ):
        if not seen:
            message = f"forwards of the target were recorded, but nothing at {point} ({_missing_hooks(recordings)})"
            fix = (
                "check that the drafter is an EAGLE-3 drafter and that speculative decoding is on"
                if point == "fc"
                else "the answer rests on the two other points"
            )
            yield _finding("WIRE-POINT-MISSING", ERROR if point == "fc" else WARNING, f"point {point}", message, fix)


def of_starts(superseded: Sequence[Recording]) -> Iterator[Finding]:
    """Records of several starts of a service, between which the layers that it keeps were changed."""
    if superseded:
        names = ", ".join(recording.name for recording in superseded[:3])
        kept = sorted({capture for recording in superseded for capture in recording.captures})
        message = (
            f"{len(superseded)} files ({names}) are of other starts, which were told to keep the inputs of layers "
            f"{', '.join(str(list(capture)) for capture in kept)}; they were left out"
        )
        fix = "keep each start's records in a directory of its own; pivot wiring compares two of them"
        yield _finding("WIRE-STARTS", WARNING, "probe records", message, fix)


def _of_file(recording: Recording) -> Iterator[Finding]:
    """The findings of one file."""
    name, schema = recording.name, (recording.header or {}).get("schema")
    if recording.header and schema != SCHEMA:
        message = f"its records follow schema {schema}, this Pivot reads schema {SCHEMA}"
        if schema == 1:
            message += ": they are old and know no positions, requests, draft steps or verifications"
            yield _finding("WIRE-SCHEMA", WARNING, name, message, "record again with this Pivot's probe")
        else:
            yield _finding("WIRE-SCHEMA", ERROR, name, message, "analyse them with the Pivot that recorded them")
    if recording.damaged:
        lines = ", ".join(str(number) for number in recording.damaged[:5])
        message = f"{len(recording.damaged)} lines are no records (line {lines}); they were left out"
        yield _finding("WIRE-DAMAGED", WARNING, name, message, "collect the records again")
    if recording.cut_off:
        message = "its last line is cut off, as when a process is killed while writing; it was left out"
        yield _finding("WIRE-CUT-OFF", INFO, name, message, "")
    if recording.dropped:
        message = f"{recording.dropped} records were lost because writing them took too long; serving was not affected"
        yield _finding(
            "WIRE-DROPPED", WARNING, name, message, "record fewer rows (debug_probes_rows), or fewer requests"
        )
    if recording.ended:
        message = f"recording ended before the service did: {recording.ended}"
        fix = "raise debug_probes_max_bytes or debug_probes_expiry if later requests matter"
        yield _finding("WIRE-ENDED", INFO, name, message, fix)
    for hook, (count, error) in sorted(recording.failures.items()):
        message = f"the hook {hook} failed at least {count} times ({error}); serving was not affected"
        fix = "report it with the engine's version; what this hook observes is incomplete"
        yield _finding("WIRE-HOOK-FAILED", WARNING, name, message, fix)


def _missing_hooks(recordings: Sequence[Recording]) -> str:
    """Which hooks this engine has no place for, as the headers tell."""
    states = {}
    for recording in recordings:
        hooks = (recording.header or {}).get("hooks")
        for hook, state in hooks.items() if isinstance(hooks, Mapping) else ():
            if state != "registered":
                states[str(hook)] = str(state)
    if not states:
        return "every hook found its place"
    return "; ".join(f"{hook} {state}" for hook, state in sorted(states.items()))


# --- the wiring


def of_wiring(wiring: Wiring) -> Iterator[Finding]:
    """What the comparison proves to be wrong: what reaches `fc` instead, then where on the way that happens."""
    if wiring.given and not wiring.slices:
        yield _bypassed(wiring)
    if wiring.blind:
        message = (
            f"{wiring.acceptance.verifications} verifications were recorded and none of the forwards that made them: "
            "CUDA graphs are on, so that only prefills were seen"
        )
        fix = (
            "see that --disable-cuda-graph reaches the server (an ExecStart that runs a shell or a script may not hand "
            "it on), and ask again"
        )
        yield _finding("WIRE-BLIND", ERROR, "verifications", message, fix)
    yield from _asked(wiring)
    for piece in wiring.slices:
        finding = _slice(piece)
        if finding is not None:
            yield finding
    yield from _layers(wiring)
    yield from _on_the_way(wiring)
    for step, what, times in wiring.drafts:
        if what != OWN_STATE:
            message = f"draft step {step} consumed {what} {times} times, where the drafter's own state belongs"
            yield _finding("WIRE-DRAFT", ERROR, f"draft step {step}", message, f"the draft loop is wrong: {INTERFERES}")


def _bypassed(wiring: Wiring) -> Finding:
    """The drafter's fc is not run at all."""
    message = f"the drafter's fc was never run: {wiring.given} times it was given one state of its own width instead"
    if wiring.capture:
        message += f", and the engine keeps {len(wiring.capture)} layer inputs, {list(wiring.capture)}"
        fix = "an EAGLE-3 drafter needs the states of all its layers: look at what hands over only one"
    else:
        message += ", as the target keeps no layer inputs for it"
        fix = (
            "serve it with --speculative-algorithm EAGLE3 (EAGLE hands over the last state alone); if that is set, "
            "eagle_config.use_aux_hidden_state is false, or this SGLang keeps no states of this target's class"
        )
    if wiring.expected is None:
        message += " (right for a drafter that is no EAGLE-3 drafter)"
    severity = WARNING if wiring.expected is None else ERROR
    return _finding("WIRE-BYPASSED", severity, "fc", message, fix)


def _on_the_way(wiring: Wiring) -> Iterator[Finding]:
    """States that are changed between two points; a warning where that is only rounding."""
    pieces = wiring.slices
    rounded = bool(pieces) and all(piece.match is not None and piece.match.kind in (SAME, ROUND) for piece in pieces)
    severity = WARNING if rounded and ROUND in {piece.match.kind for piece in pieces if piece.match} else ERROR
    if wiring.captured.compared and not wiring.captured.same:
        message = (
            f"what the target kept is not the inputs of layers {list(wiring.capture or ())}, which it was told to "
            f"keep: {wiring.captured} forwards"
        )
        fix = f"the target's own capture is wrong: {INTERFERES}"
        yield _finding("WIRE-CAPTURED", severity, "capture", message, fix)
    if wiring.packed.compared and not wiring.packed.same:
        message = f"what the logits processor packs is not what the target captured: {wiring.packed} forwards"
        fix = "the engine loses or reorders states between the two; compare its version with a known good one"
        yield _finding("WIRE-PACKED", severity, "hand-over", message, fix)
    if wiring.fed.compared and not wiring.fed.same:
        message = f"what fc is fed is not what was packed for it: {wiring.fed} calls"
        fix = "the engine changes the states on their way to the drafter; compare its version with a known good one"
        yield _finding("WIRE-FED", severity, "hand-over", message, fix)


def _asked(wiring: Wiring) -> Iterator[Finding]:
    """An engine that keeps other layers than its configuration asks for."""
    if wiring.asked is None or wiring.capture is None or not wiring.capture:
        return
    kept = tuple(sorted(wiring.capture))
    if kept == wiring.asked:
        return
    message = f"the drafter's config asks for the inputs of layers {list(wiring.asked)}, the engine keeps {list(kept)}"
    if kept == _default(wiring):
        message += ", its default: the ids did not reach it"
    fix = (
        "the configuration is not the cause: look for a plugin, a patch or an override (--json-model-override-args, "
        "another drafter path), and restart if the config was changed after the start"
    )
    yield _finding("WIRE-ASKED", ERROR, "capture", message, fix)


def _default(wiring: Wiring) -> tuple[int, ...] | None:
    return None if wiring.depth is None else tuple(sorted(default_layers(wiring.depth)))


def _slice(piece: Slice) -> Finding | None:
    """What one slice is instead of a layer's input."""
    match, subject, what = piece.match, f"fc slice {piece.index}", f"it is {piece.what}"
    if piece.layer is not None:
        return None
    if match is None:
        fix = "compare the modes: what differs between prefill and verification is lost or stale on one of the ways"
        found = _finding("WIRE-UNSTABLE", ERROR, subject, what, fix)
    elif match.kind == ROUND:
        fix = "harmless where the whole model runs in that type; otherwise find what converts it on the way to fc"
        found = _finding("WIRE-ROUNDED", WARNING, subject, what, fix)
    elif match.kind == SCALE:
        fix = f"a factor comes in on the way: {INTERFERES}"
        found = _finding("WIRE-SCALED", ERROR, subject, what, fix)
    elif match.kind == MOVED:
        fix = f"states and tokens are out of step by {match.detail}: {INTERFERES}"
        found = _finding("WIRE-POSITION", ERROR, subject, what, fix)
    elif match.kind == OLD:
        fix = f"a buffer is read that this forward did not write: {INTERFERES}, and at CUDA graphs"
        found = _finding("WIRE-STALE", ERROR, subject, what, fix)
    elif match.kind == ZERO:
        fix = f"the drafter gets nothing for this layer: {INTERFERES}"
        found = _finding("WIRE-ZERO", ERROR, subject, what, fix)
    else:
        fix = f"{INTERFERES}, for a drafter that normalises its input, for pipeline stages"
        found = _finding("WIRE-UNKNOWN", ERROR, subject, what, fix)
    return found


def _layers(wiring: Wiring) -> Iterator[Finding]:
    """The layers that the slices are made of against those the drafter was trained on."""
    sources = [piece.source for piece in wiring.slices]
    named = [layer for layer in sources if layer is not None]
    twice = sorted({layer for layer in named if named.count(layer) > 1})
    if twice:
        message = f"fc receives the input of layer {twice[0]} more than once: its slices are made of layers {named}"
        yield _finding("WIRE-TWICE", ERROR, "fc input", message, f"a slice is overwritten: {INTERFERES}")
        return
    if len(named) < len(sources):
        return
    told = wiring.expected if wiring.expected is not None else wiring.asked
    if told is None and wiring.capture is not None:
        told = tuple(sorted(wiring.capture))
    if told is None or not named or tuple(named) == told:
        return
    if sorted(named) == sorted(told):
        who = "the drafter was trained on" if wiring.expected is not None else "the engine is told to keep"
        message = f"fc receives the right layers in the order {named}, {who} {list(told)}"
        fix = "the order of the slices is the engine's: look for what exchanges them before fc"
        yield _finding("WIRE-ORDER", ERROR, "fc input", message, fix)
    elif wiring.expected is not None and (wiring.asked is None or wiring.asked != wiring.expected):
        yield _ids(wiring, named)


def _ids(wiring: Wiring, named: Sequence[int]) -> Finding:
    """Other layers than the drafter was trained on, because other ones are asked for."""
    wanted = list(wiring.expected or ())
    message = f"fc receives the inputs of layers {list(named)}, the drafter was trained on the inputs of {wanted}"
    distances = {layer - right for layer, right in zip(sorted(named), wanted, strict=False)}
    if tuple(sorted(named)) == _default(wiring):
        message += (
            "; these are the engine's default, which it takes where eagle_config.eagle_aux_hidden_state_layer_ids of "
            "the drafter's config.json is not given (a key at the top level is not read)"
        )
    elif len(named) == len(wanted) and len(distances) == 1:
        step = distances.pop()
        message += (
            f"; each is {abs(step)} too {'high' if step > 0 else 'low'}, as where inputs and outputs are mixed up"
        )
    elif 0 in named and 0 not in wanted:
        message += "; one of them is the embedding"
    ids = ids_for(wanted, wiring.rule) if wiring.rule else None
    fix = f"set the layer ids so that the engine captures the inputs of {wanted}, and restart"
    if ids is not None:
        fix = f"set the layer ids to {list(ids)}, so that the engine captures the inputs of {wanted}, and restart"
    return _finding("WIRE-IDS", ERROR, "fc input", message, fix)


def of_ranks(seen: Mapping[int, tuple[str, ...]]) -> Iterator[Finding]:
    """Ranks that do not feed the same. seen: rank → its slices in words; empty where all agree."""
    if seen:
        message = "; ".join(f"rank {rank}: {', '.join(pieces)}" for rank, pieces in seen.items())
        fix = "the ranks were started with different files or flags: compare the drafter and the command line on each"
        yield _finding("WIRE-RANKS", ERROR, "ranks", message, fix)


# --- acceptance


def of_acceptance(recorded: Mapping[str, Acceptance], served: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """What was recorded of requests against what the server reported of them; both by request id."""
    differing = []
    for name, meta in served.items():
        seen, reported = recorded.get(name), _reported(meta)
        if seen is None or seen.length is None or reported is None:
            continue
        length, slack = reported
        if abs(seen.length - length) * seen.verifications > slack + 1e-6 * seen.verifications:
            differing.append(f"{name}: recorded {seen.length:.2f}, reported {length:.2f}")
    if differing:
        message = f"accept lengths differ in {len(differing)} of {len(served)} requests ({'; '.join(differing[:3])})"
        fix = "what is reported is not what was verified: look for SGLANG_SIMULATE_ACC_LEN, and for lost records"
        yield _finding("WIRE-ACCEPTANCE", WARNING, "acceptance", message, fix)


def _reported(meta: Mapping[str, Any]) -> tuple[float, float] | None:
    """The accept length that a server reports, and by how many tokens it may differ from the verifications.

    The histogram counts them; the length is of the tokens that were given out: with the prefill's, without what a
    request's end cuts off.
    """
    histogram = next((meta[name] for name in HISTOGRAMS if isinstance(meta.get(name), list) and meta[name]), None)
    if histogram and all(isinstance(count, int) for count in histogram) and sum(histogram):
        return 1 + sum(k * count for k, count in enumerate(histogram)) / sum(histogram), 0.0
    value = meta.get("spec_accept_length")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value), MOST_CUT
    return None


def codes(findings: Iterable[Finding]) -> list[str]:
    """The codes, in their order."""
    return [finding.code for finding in findings]
