"""What predicted against served means: a fault of serving, of the choice of layers, or of a part of the drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pivot.drafters.layers import numbers
from pivot.experiments.spread import margin, mean_error
from pivot.experiments.whatif_figures import ACCURACY, Figures, Json, Look, Row
from pivot.findings import Finding, Severity

FEWEST = 2  # prompts of which anything can be concluded
GET_AGAIN = "get the drafter's files again from their source, and compare them with its manifest"
MAKE_D2T = "d2t holds token id minus draft id; take it from the drafter's source, or make it anew from t2d"
WRITE_ROPE = "write rope_theta and rope_scaling of its training into the drafter's config.json"


def serving(look: Look) -> Iterator[Finding]:
    """Whether what is served is what the drafter can do with the layers that it is fed."""
    if look.served is None or look.reference is None:
        return
    difference = look.served.against(look.reference.figures)
    both = compared(look.served, look.reference)
    if both < FEWEST:
        message = (
            f"{'one prompt was' if both else 'no prompt was'} both served and evaluated, so that nothing can be "
            "concluded from predicted against served"
        )
        fix = "ask more prompts (debug_probes_prompts), and see what the evaluator notes about those that it left out"
        yield look.finding("WHATIF-FEW", Severity.WARNING, message, fix)
    low, high = _bounds(look.reference)
    served = look.reference.figures.length + difference.total  # over the prompts that were evaluated too
    if not difference.counts or low - ACCURACY <= served <= high + ACCURACY:
        return
    wiring = (
        f"the layers that reach fc ({numbers(look.reference.layers)})"
        if look.wired
        else f"the layers that should reach fc ({numbers(look.reference.layers)})"
    )
    predicted = look.reference.figures.length
    way = "below" if difference.total < 0 else "above"
    message = f"served is {served:.2f}, far {way} the {predicted:.2f} predicted for {wiring}"
    reasons = list(launch_reasons(look.question.flags, look.question.environment, below=difference.total < 0))
    if reasons:
        message += f": {'; '.join(reason for reason, _ in reasons)}"
        fix = "; ".join(change for _, change in reasons)
    else:
        like = [
            row.name
            for row in look.rows
            if row.is_feed
            and abs(row.figures.length - served) <= ACCURACY
            and not look.served.against(row.figures).counts
        ]
        message += "; the drafter is not what loses it"
        message += f" (as much as with {' or '.join(like)})" if like else ""
        fix = (
            "no flag of the launch explains it: look for a plugin, a patch or a bug of this engine's version, the "
            "attention backend and the quantisation of the drafter"
        )
    code = "WHATIF-SERVED-LESS" if difference.total < 0 else "WHATIF-SERVED-MORE"
    yield look.finding(code, Severity.ERROR, message, fix)


def compared(served: Figures | None, reference: Row | None) -> int:
    """On how many prompts the answer rests: served and evaluated, or evaluated where nothing tells of serving."""
    evaluated = reference.figures.by_prompt.keys() if reference else set()
    return len(evaluated & served.by_prompt.keys() if served else evaluated)


def _bounds(row: Row) -> tuple[float, float]:
    """Between which accept lengths an engine can be. A tree of drafts may accept more than the chain that is evaluated,
    or less, where it spends its few tokens on width; the best first draft it always holds."""
    if row.at_most is None:
        return row.figures.length, row.figures.length
    return 1 + row.figures.per_position[0], row.at_most


def launch_reasons(flags: Json, environment: Json, *, below: bool) -> Iterator[tuple[str, str]]:
    """Settings of a launch that let an engine accept less (or more) than the drafter could: what and change."""
    given = {str(name).lstrip("-").replace("-", "_"): value for name, value in flags.items()}
    simulated = environment.get("SGLANG_SIMULATE_ACC_LEN")
    if simulated not in (None, "", "-1", -1):
        yield f"SGLANG_SIMULATE_ACC_LEN={simulated} makes acceptance up", "remove it: its figures mean nothing"
    algorithm = given.get("speculative_algorithm")
    if below and algorithm is not None and str(algorithm).upper() != "EAGLE3":
        yield (
            f"speculative-algorithm is {algorithm}, with which no layer states are captured and fc is not run",
            "write speculative-algorithm: EAGLE3",
        )
    texts = {
        "speculative_draft_window_size": "limits what the drafter attends to",
        "speculative_draft_model_quantization": "rounds the drafter's weights",
        "speculative_token_map": "is another map from draft ids to tokens",
    }
    for name, what in texts.items():
        value = given.get(name)
        if below and value not in (None, "", "unquant"):
            flag = name.replace("_", "-")
            yield f"{flag} {value} {what}", f"serve once without {flag}"
    if below and str(given.get("kv_cache_dtype", "auto")).startswith("fp8"):
        yield "kv-cache-dtype rounds keys and values to fp8", "serve once with kv-cache-dtype: auto"
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = given.get(name)
        if not below and isinstance(value, int | float) and value < 1:
            flag = name.replace("_", "-")
            yield f"{flag} {value} accepts drafts that the target would not choose", f"remove {flag}"


def blamed(look: Look) -> list[Finding]:
    """What the choice of layers and the drafter are blamed for.

    What a part shows by itself is a proof. Of the two explanations by prediction the one that explains more counts:
    other layers may make up for a part that is wrong, and a repair for layers that are.
    """
    layers, (proofs, guesses) = list(_layers(look)), _drafter(look)
    drafter = [*proofs, *guesses]
    if not layers or not drafter:
        return [*layers, *drafter]
    wired = max((row.figures.length for row in look.rows if _packable(row)), default=0.0)
    mended = max((row.figures.length for row in look.rows if not _packable(row) and not row.is_feed), default=0.0)
    if proofs or wired <= mended:
        return [*drafter, *(layers if look.reference is not look.base else [])]
    return [*layers, *(finding for finding in guesses if finding.code != "WHATIF-TARGET")]


def _packable(row: Row) -> bool:
    """Whether it is a choice of layers, in the order in which an engine packs them."""
    return row.is_wiring and row.layers == tuple(sorted(row.layers))


def _layers(look: Look) -> Iterator[Finding]:
    """Whether another choice of layers, in an order that an engine can pack, predicts far more than what is fed."""
    reference = look.reference
    if reference is None:
        return
    better = [row for row in look.rows if _packable(row) and _better(row, reference)]
    if not better:
        return
    best = max(better, key=lambda row: row.figures.length)
    order = max((row for row in look.rows if row.is_wiring), key=lambda row: row.figures.length)
    if order is not best and _better(order, best):
        return  # the order of fc's blocks explains more: see the drafter
    where = f"the inputs of layers {numbers(best.layers)}"
    gain = f"{best.figures.length:.2f} is predicted with {where}, {reference.figures.length:.2f} with those"
    if look.contract and best.layers != look.contract and reference.layers == look.contract:
        message = f"{gain} of the contract ({numbers(look.contract)}): the contract may be wrong"
        fix = "look up what the drafter was trained on (pivot compare-training), then correct the contract in the pins"
        yield look.finding("WHATIF-CONTRACT", Severity.ERROR, message, fix)
        return
    message = f"{gain} that reach fc ({numbers(reference.layers)})"
    fix = f"make the engine keep {where}: sglang_server_eagle_layer_ids, as read by this engine"
    yield look.finding("WHATIF-LAYERS", Severity.ERROR, message, fix)


def _better(row: Row, other: Row) -> bool:
    difference = row.figures.against(other.figures)
    return difference.total > 0 and difference.counts


def _mends(row: Row, base: Row) -> bool:
    """Whether a repair gains enough for its part to be blamed.

    Rope settings have to gain twice as much: at the length of the prompts neighbouring thetas draft nearly alike, and
    none of them is then wrong.
    """
    gain = row.figures.length - base.figures.length
    return _better(row, base) and not ("rope" in row.repair and gain <= 2 * ACCURACY)


def _drafter(look: Look) -> tuple[list[Finding], list[Finding]]:
    """What of the drafter itself is wrong: what its parts prove, and what a repair of one part would gain."""
    base = look.base
    if base is None:
        return [], []
    poor = little(look)
    proofs = list(_proofs(look, poor))
    repaired = [row for row in look.rows if row.is_repair or _reordered(row, base)]
    better = sorted((row for row in repaired if _mends(row, base)), key=lambda row: -row.figures.length)
    if not better:
        return proofs, [_stranger(look)] if poor and not proofs else []
    best = better[0]
    code, what, fix = _repair(best, look)
    gain = (
        f"{best.figures.length:.2f} is predicted with {best.name}, {base.figures.length:.2f} with the drafter as it is"
    )
    proven = next((finding for finding in proofs if finding.code == code), None)
    if proven is not None:
        said = dataclasses.replace(proven, message=f"{proven.message}; {gain}")
        return [said, *(finding for finding in proofs if finding is not proven)], []
    others = [f"{row.name} {row.figures.length:.2f}" for row in better[1:4]]
    less = f"; less with {', '.join(others)}" if others else ""
    return proofs, [look.finding(code, Severity.ERROR, f"{what}: {gain}{less}", fix)]


def little(look: Look) -> bool:
    """Whether the drafter predicts little even with the right layers.

    That is: more often wrong than right with its first draft, or below what the inventory expects, by more than chance
    over the prompts; or fewer than one draft in three accepted, and not clearly less with the neighbours of all its
    layers: a drafter that fits its target notices those.
    """
    assert look.base is not None  # noqa: S101 - the callers look
    figures, first = look.base.figures, look.base.first
    lengths = list(figures.by_prompt.values())
    mean, error = mean_error(lengths)
    expected = look.question.least
    if mean_error(first)[0] + margin(first) < 0.5 or (expected > 0 and mean + margin(lengths) < expected):
        return True
    shifted = [tuple(layer + shift for layer in look.base.layers) for shift in (-1, 1)]
    beside = [row.figures.length for row in look.rows if row.is_wiring and row.layers in shifted]
    few = mean + error < 1 + len(figures.per_position) / 3
    return few and bool(beside) and figures.length - max(beside) <= ACCURACY


def _reordered(row: Row, base: Row) -> bool:
    """The same layers in another order than an engine packs them: as if fc's blocks stood in that order."""
    return row.is_wiring and row.layers != base.layers and sorted(row.layers) == sorted(base.layers)


def _proofs(look: Look, poor: bool) -> Iterator[Finding]:
    """What the parts show by themselves. poor: the drafter predicts little, so that what is odd is to blame."""
    parts = look.parts
    for index, norm in enumerate((parts.get("fc") or {}).get("blocks", [])):
        if norm == 0:
            message = f"block {index} of fc.weight is zero: the drafter does not see that layer"
            yield look.finding("WHATIF-FC-ZERO", Severity.ERROR, message, GET_AGAIN)
    for name in parts.get("not_finite", []):
        message = f"{name} of the drafter holds numbers that are not finite"
        yield look.finding("WHATIF-ZERO", Severity.ERROR, message, GET_AGAIN)
    for name in parts.get("zero", []):
        if not name.endswith("bias") and name != "fc.weight":
            yield look.finding("WHATIF-ZERO", Severity.ERROR, f"{name} of the drafter is all zero", GET_AGAIN)
    d2t = parts.get("d2t") or {}
    reason = ""
    if d2t.get("outside"):
        reason = f"leads {d2t['outside']} draft ids outside the vocabulary: it holds token ids, not differences"
    elif poor and d2t.get("zero") and d2t.get("agrees_with_t2d") is not True and _reduced(d2t):
        reason = f"is all zero, so that only the first {d2t['rows']} tokens can be drafted"
    elif poor and d2t.get("present") is False and _reduced(d2t):
        reason = f"is missing, so that only the first {d2t['rows']} tokens can be drafted"
    if reason:
        yield look.finding("WHATIF-D2T", Severity.ERROR, f"d2t {reason}", MAKE_D2T)


def _reduced(d2t: Json) -> bool:
    """Whether the drafter's vocabulary is smaller than the target's."""
    return bool(d2t.get("vocabulary")) and d2t["rows"] < d2t["vocabulary"]


def _repair(row: Row, look: Look) -> tuple[str, str, str]:
    """The code, what is wrong, and the change to make, for the repair that gains most."""
    repair, parts = row.repair, look.parts
    if not repair:
        order = [sorted(row.layers).index(layer) for layer in row.layers]
        what = f"the blocks of fc.weight stand in the order {order} of the layers"
        return "WHATIF-FC-ORDER", what, "put them in the order of the layers, or ask whoever exported the drafter"
    blocks = [round(norm, 2) for norm in (parts.get("fc") or {}).get("blocks", [])]
    cosine = (parts.get("head") or {}).get("cosine")
    seen = "" if cosine is None else f" (cosine to the target's rows of the same tokens: {cosine:.2f})"
    theta = (parts.get("rope") or {}).get("theta")
    said = "" if theta is None else f" (theta {theta:g})"
    part = "attention" if "attention" in repair.get("off", []) else "MLP"
    known = {
        "fc_scale": ("WHATIF-FC-SCALE", f"fc.weight is out of scale (norms of its blocks: {blocks})", GET_AGAIN),
        "head": ("WHATIF-HEAD", f"the drafter's lm_head is not one for this target{seen}", GET_AGAIN),
        "d2t": ("WHATIF-D2T", "d2t does not lead to the tokens that the head means", MAKE_D2T),
        "rope": ("WHATIF-ROPE", f"the drafter's rope settings are not those of its training{said}", WRITE_ROPE),
        "ones": ("WHATIF-NORM", f"{repair.get('ones', [''])[0]} does more harm than ones would", GET_AGAIN),
        "norm_output": (
            "WHATIF-NORM",
            "the state that goes from one draft step to the next is normed the wrong way",
            "write norm_output as in its training into the drafter's config.json",
        ),
        "off": ("WHATIF-PART", f"the drafter's {part} does more harm than good", GET_AGAIN),
    }
    return known[next(iter(repair))]


def _stranger(look: Look) -> Finding:
    """No wiring and no repair helps: a drafter of another target, or one that was never trained."""
    assert look.base is not None  # noqa: S101 - the caller looks
    first, _ = mean_error(look.base.first)
    message = (
        f"no choice of layers and no repair of one part predicts more than {look.base.figures.length:.2f} "
        f"({first:.0%} of first drafts are right): the drafter belongs to another target or checkpoint, or is untrained"
    )
    control = next((row for row in look.rows if row.repair.get("shuffle")), None)
    if control is not None:
        message += f"; with states of other positions it would be {control.figures.length:.2f}"
    head, embedding = look.parts.get("head") or {}, look.parts.get("embedding") or {}
    if head.get("cosine") is not None:
        message += f"; its head points {head['cosine']:.2f} the target's way (cosine)"
    if embedding.get("distance"):
        message += f"; its own embedding is {embedding['distance']:.2g} away from the target's"
    fix = "serve the drafter that was trained for this very checkpoint of the target, or train one"
    return look.finding("WHATIF-TARGET", Severity.ERROR, message, fix)
