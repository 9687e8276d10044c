"""The drafter contract: which layers of the target an EAGLE-3 drafter will really be fed, and whether it fits at all.

Pure: four things decide (two configs, the drafter's safetensors header, the launch settings) and the engine's
description says how the engine reads them. A layer is named by its INPUT: the input of layer 3 is the output of layer
2, the input of layer 0 is the embedding. Input comes from files that others wrote, so nothing in it is trusted: what
cannot be used is a finding.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pivot import descriptions, fit, vocabulary
from pivot.configs import LARGEST, Config, Findings, read_ids, read_tensors, short
from pivot.findings import Finding, Severity
from pivot.layers import as_outputs, default_layers, ids_for, kept_layers, numbers
from pivot.wiring import as_inputs

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
IDS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_COUNT = 3  # states an engine takes when nothing says how many
# model types of drafters and targets that come with transformers, not with the engine
TRANSFORMERS_TYPES = frozenset(
    {
        "llama", "llama4", "llama4_text", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "deepseek_v2", "deepseek_v3", "gpt_oss", "phi3", "gemma2", "gemma3", "gemma3_text", "glm4", "glm4_moe",
    }
)  # fmt: skip
NORMS = ("fc_norm", "use_aux_norm", "norm_output", "norm_before_fc")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and its drafter as they are to be served.

    target, drafter: their config.json; tensors: the drafter's header, name → {dtype, shape}, of d2t and t2d also values
    (`pivot.vocabulary.facts`), None when not known;
    layer_ids: what the deployment sets, None keeps the drafter's own; engine: its description, None when there is
    none for `version`; flags, environment: of the launch; contract: target, layers, convention, source, or None;
    served: the repository that is served as the target; revisions: repository → revision, of what is pinned.
    """

    subject: str
    target: object
    drafter: object
    tensors: object = None
    layer_ids: object = None
    version: str
    engine: Mapping[str, Any] | None = None
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    contract: object = None
    served: str | None = None
    revisions: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The answer. line: which layers, for people; notes: what is worth knowing and no finding; layers: the layer
    inputs that reach the drafter, ascending, None when not known."""

    line: str
    notes: tuple[str, ...]
    layers: tuple[int, ...] | None
    findings: tuple[Finding, ...]

    def text(self) -> str:
        """The line and the notes, for a terminal; findings are rendered elsewhere."""
        return "\n".join([self.line, *(f"  {note}" for note in self.notes)])


@dataclasses.dataclass(frozen=True, slots=True)
class _Contract:
    """What a drafter was trained on: layers in the trainer's own numbers, and as layer inputs when that is known."""

    layers: tuple[int, ...]
    convention: str | None
    inputs: tuple[int, ...] | None
    target: str | None

    def __str__(self) -> str:
        if self.convention is None:
            return f"layers {numbers(self.layers)}, of inputs or outputs not known"
        return f"{self.convention}s of {numbers(self.layers)}"


def _contract(value: object, layers: int | None, found: Findings) -> _Contract | None:
    """The contract of a pin, None when there is none or it cannot be used."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        found.add(
            "CONTRACT", ERROR, f"the contract is {short(value)}, not a mapping", "write target, layers, convention"
        )
        return None
    named = read_ids(value.get("layers"), "the contract's layers", found)
    convention = value.get("convention")
    if convention not in ("input", "output", None):
        message = f"the contract's convention is {short(convention)}"
        found.add("CONTRACT", ERROR, message, "write input, output or null")
        return None
    if named is None:
        return None
    if named != sorted(named):
        message = f"the contract's layers {named} do not ascend, but states reach fc in the order of the layers"
        fix = (
            "write them ascending, if the trainer also packed them so; otherwise this drafter cannot be served as it is"
        )
        found.add("CONTRACT", WARNING, message, fix)
    inputs = None if convention is None else as_inputs(named, convention)
    if inputs and layers and not (inputs[0] >= 0 and inputs[-1] < layers):
        message = f"the contract names {convention}s of {numbers(named)}, but the target has {layers} layers"
        found.add(
            "CONTRACT", ERROR, message, "correct the contract, or pin the target that the drafter was trained for"
        )
        inputs = None
    target = value.get("target")
    return _Contract(tuple(named), convention, inputs, target if isinstance(target, str) else None)


# --- the check


class _Check:
    """Everything that is looked at, read once."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.found = Findings(pair.subject)
        self.notes: list[str] = []
        self.whole = Config("the target's config.json", pair.target, self.found)
        text = self.whole.mapping("text_config")
        self.target = Config("text_config of the target's config.json", text, self.found) if text else self.whole
        self.drafter = Config("the drafter's config.json", pair.drafter, self.found)
        self.tensors = read_tensors(pair.tensors, self.found)
        self.layers = self.target.integer("num_hidden_layers")
        self.contract = _contract(pair.contract, self.layers, self.found)
        engine = pair.engine or {}
        self.entry: Mapping[str, Any] = (engine.get("eagle3") or {}).get(self.whole.architecture or "") or {}
        self.kind: Mapping[str, Any] = (engine.get("drafters") or {}).get(self.drafter.architecture or "") or {}
        self.rule: str | None = self.entry.get("rule") if self.entry.get("keeps") == "input" else None
        self.hidden_in = self.drafter.integer("target_hidden_size") or self.drafter.integer("hidden_size")
        eagle_config = self.drafter.mapping("eagle_config")
        where = f"eagle_config.{IDS} of the drafter's config.json"
        self.own = None if pair.layer_ids is not None else read_ids(eagle_config.get(IDS), where, self.found)
        self.ids = read_ids(pair.layer_ids, "sglang_server_eagle_layer_ids", self.found) or self.own
        # ids that are there and cannot be used are no reason to reckon with the default
        self.readable = self.ids is not None or (pair.layer_ids is None and eagle_config.get(IDS) is None)
        self.use_aux = eagle_config.get("use_aux_hidden_state", True)

    def kept(self) -> tuple[int, ...] | None:
        """The layer inputs the engine is told to keep, ascending; None when that is not known."""
        if not self.readable or self.rule is None or self.nothing_kept():
            return None
        if self.ids is not None:
            return tuple(sorted(kept_layers(self.ids, self.rule)))
        return tuple(sorted(default_layers(self.layers))) if self.layers else None

    def nothing_kept(self) -> str:
        """The setting that keeps all states from the drafter, empty when there is none."""
        given = self.pair.flags.get("speculative-algorithm")
        if given is not None and str(given).upper() != "EAGLE3":
            return f"speculative-algorithm is {short(given)}"
        return "" if self.use_aux else f"use_aux_hidden_state is {short(self.use_aux)}"

    def context(self) -> int | None:
        """Tokens a request may have."""
        asked = self.pair.flags.get("context-length")
        if asked is None:
            return self.target.integer("max_position_embeddings")
        digits = str(asked) if isinstance(asked, int | str) and not isinstance(asked, bool) else ""
        return int(digits) if re.fullmatch(r"[0-9]{1,9}", digits) else None  # what is wrong with it, the launch says


def check(pair: Pair) -> Verdict:
    """All findings about a pair at once, and the line that says which layers reach the drafter."""
    look = _Check(pair)
    kept = look.kept()
    if look.whole.data and look.drafter.data:
        for part in PARTS:
            part(look)
    return Verdict(_line(look, kept), tuple(look.notes), kept, tuple(look.found.items))


def facts(pair: Pair) -> set[str]:
    """What of a deployment the known faults ask for: the words of engine_faults.yml."""
    return _facts(_Check(pair))


def _facts(look: _Check) -> set[str]:
    flags = look.pair.flags
    words = {"eagle3"} if str(flags.get("speculative-algorithm", "EAGLE3")).upper() == "EAGLE3" else set()
    cpu = flags.get("device") == "cpu"
    words |= {"cpu"} if cpu else set()
    words |= {"cuda-graphs"} if not cpu and not flags.get("disable-cuda-graph") else set()
    if look.ids is not None:
        kept = look.kept()
        default = tuple(sorted(default_layers(look.layers))) if look.layers else None
        words |= {"ids-not-default"} if kept and kept != default else set()
        words |= {"ids-not-three"} if len(look.ids) != DEFAULT_COUNT else set()
    kind = look.drafter.data.get("model_type")
    return words | ({f"draft-model-type-{kind}"} if isinstance(kind, str) else set())


def _line(look: _Check, kept: tuple[int, ...] | None) -> str:
    """``ids [3, 5, 7] on 0.5.23 → inputs of layers 3, 5, 7 (outputs of 2, 4, 6); contract: …; agrees``."""
    ids, contract = look.ids, look.contract
    start = f"ids {ids}" if ids is not None else "no ids" if look.readable else "ids that cannot be used"
    line = f"{start} on {look.pair.version} → "
    if reason := look.nothing_kept():
        line += f"no states reach the drafter, as {reason}"
    elif kept is None:
        line += "layers not known"
    else:
        if ids is None:
            line += "its default, "
        elif look.rule == "plus_one_if_first_is_1" and ids[0] == 1:
            line += "all raised by 1, as the first is 1: "
        line += f"inputs of layers {numbers(kept)} (outputs of {as_outputs(kept)})"
    if contract is None:
        return f"{line}; no contract to compare with"
    line += f"; contract: {contract}"
    if contract.inputs is None or kept is None:
        return f"{line}; not compared"
    return f"{line}; agrees" if contract.inputs == kept else f"{line}; DISAGREES; {_write(look, contract.inputs)}"


def _write(look: _Check, wanted: Sequence[int]) -> str:
    """What to write so that these layer inputs are kept, with the reason where it cannot be done."""
    if look.rule is None:
        return "which ids to write is not known for this engine"
    if 0 in wanted and look.entry.get("embedding") != "kept":
        return f"SGLang {look.pair.version} cannot keep the embedding"
    ids = ids_for(wanted, look.rule)
    return f"write {list(ids)}" if ids is not None else "no ids make this engine keep them"


# --- the parts, each about one thing


def _engine(look: _Check) -> None:
    """Whether the engine knows both classes, and whether it is known here how it reads ids."""
    engine, version = look.pair.engine, look.pair.version
    if engine is None:
        message = f"there is no description of SGLang {version}, so what it does with ids and weights is not checked"
        fix = f"pivot engine describe WHEEL --out src/pivot/data/engines/sglang-{version}.json"
        look.found.add("ENGINE", WARNING, message, fix)
        return
    known = engine.get("architectures") or []
    for config in (look.whole, look.drafter):
        name = config.architecture
        if name and name not in known:
            message = f"SGLang {version} has no class {name}, which {config.name} names"
            look.found.add("ARCHITECTURE", ERROR, message, "pin an SGLang that has it, or another model")
    name = look.whole.architecture
    if name and name in known and not look.entry:
        message = f"{name} of SGLang {version} has no EAGLE-3 setter, so no states reach the drafter"
        look.found.add("TARGET-CLASS", ERROR, message, "pin a later SGLang, or serve without a drafter")
    elif look.entry and look.rule is None:
        message = f"how {name} of SGLang {version} turns ids into layers was not verified by anybody"
        fix = f"read {look.entry.get('setter')} and its capture loop, then add their shapes to pivot.engine_models"
        look.found.add("RULE", WARNING, message, fix)


def _types(look: _Check) -> None:
    """Whether the model_type of the configs has a config class."""
    if look.pair.engine is None:
        return
    known = {*(look.pair.engine.get("config_types") or []), *TRANSFORMERS_TYPES}
    for config in (look.whole, look.drafter):
        kind = config.text("model_type")
        if kind is None or kind in known or config.data.get("auto_map"):
            continue
        certain = kind == "kimi_k2"  # in no transformers; a KeyError in CONFIG_MAPPING (sglang issue 25673)
        message = f"model_type {short(kind)} of {config.name} is none that SGLang {look.pair.version} registers"
        fix = "pin an SGLang that knows it, or make sure that the transformers of its lock does"
        look.found.add("MODEL-TYPE", ERROR if certain else WARNING, message, fix)


def _algorithm(look: _Check) -> None:
    """EAGLE-3 drafters need EAGLE3."""
    given = look.pair.flags.get("speculative-algorithm")
    name = look.drafter.architecture or ""
    if given is not None and str(given).upper() != "EAGLE3" and "eagle3" in name.lower():
        message = f"speculative-algorithm is {short(given)}, but {name} is an EAGLE-3 drafter: no states would be kept"
        look.found.add("ALGORITHM", ERROR, message, "write speculative-algorithm: EAGLE3 into sglang_server_launch")


def _key(look: _Check) -> None:
    """Ids at the top level of the config, where SGLang does not look."""
    if look.drafter.data.get(IDS) is None:
        return
    where = f"{IDS} at the top level of the drafter's config.json"
    top = read_ids(look.drafter.data[IDS], where, look.found)
    if top is None or not look.readable:
        return
    fix = f"write sglang_server_eagle_layer_ids: {top}, which puts them under eagle_config"
    if look.ids is not None:
        if sorted(top) != sorted(look.ids):
            message = f"{where} says {top} and is not read; {look.ids} under eagle_config count"
            look.found.add("KEY", WARNING, message, "make both agree, so that nobody is misled")
        return
    default = default_layers(look.layers) if look.layers else ()
    meant = kept_layers(top, look.rule) if look.rule else tuple(top)
    if sorted(meant) == sorted(default):
        message = f"{where} is not read; {top} happen to be the default layers {numbers(default)}"
        look.found.add("KEY", WARNING, message, fix)
    else:
        message = f"{where} is not read, so {top} would be ignored and the default {numbers(default)} used"
        look.found.add("KEY", ERROR, message, fix)


def _count(look: _Check) -> None:
    """As many ids as the drafter takes states."""
    told = look.drafter.integer("num_aux_hidden_states")
    width = _fc_width(look)
    if not look.readable or (told is None and width is not None):
        return  # the width of fc says it, see _fc
    count = DEFAULT_COUNT if look.ids is None else len(look.ids)
    needed = told or DEFAULT_COUNT
    if count != needed:
        source = "num_aux_hidden_states of its config.json" if told else "without num_aux_hidden_states"
        message = f"{count} ids are given, but the drafter takes {needed} states ({source})"
        look.found.add("COUNT", ERROR, message, f"give {needed} ids, or the drafter's own num_aux_hidden_states")


def _fc_width(look: _Check) -> int | None:
    """The input width of fc in the header, None when that is not known."""
    for name in ("fc.weight", "model.fc.weight"):
        _, shape = (look.tensors or {}).get(name, ("", ()))
        if len(shape) == 2:
            return shape[1]
    return None


def _fc(look: _Check) -> None:
    """The width of fc against the states that reach it."""
    width, size = _fc_width(look), look.hidden_in
    if width is None or size is None or not look.readable:
        return
    count = DEFAULT_COUNT if look.ids is None else len(look.ids)
    if width != count * size:
        made = f"{width // size} x {size}" if width % size == 0 else f"no multiple of {size}"
        message = f"fc takes {width} ({made}), but {count} ids give {count * size} ({count} x {size})"
        look.found.add("FC", ERROR, message, "give as many ids as the drafter was trained with")
    elif width == look.drafter.integer("hidden_size"):
        message = f"fc takes {width}, as wide as the embedding, and is then skipped silently"
        look.found.add("FC", ERROR, message, "use a drafter that takes several states")


def _aux(look: _Check) -> None:
    """Whether states are asked for at all."""
    if not look.use_aux:
        message = f"eagle_config.use_aux_hidden_state is {short(look.use_aux)}: no states are kept and fc is skipped"
        look.found.add("NO-AUX", ERROR, message, "write use_aux_hidden_state: true")


def _range(look: _Check) -> None:
    """Layers that do not exist, and the embedding."""
    kept, layers = look.kept(), look.layers
    if kept is None or layers is None:
        return
    if len(set(kept)) < len(kept):
        message = f"the default layers of a target with {layers} are {numbers(kept)}, and a layer is kept once"
        look.found.add("RANGE", ERROR, message, "set sglang_server_eagle_layer_ids")
    outside = [layer for layer in kept if not 0 <= layer < layers]
    if outside:
        word = "input of layer" if len(outside) == 1 else "inputs of layers"
        message = f"{word} {numbers(outside)} would be kept, but the target has layers 0 to {layers - 1}"
        message += f": only {len(kept) - len(outside)} of {len(kept)} states reach fc"
        if -1 in outside:
            message += "; -1 does not stand for the embedding"
        look.found.add("RANGE", ERROR, message, _fix(look, "give ids of layers that exist"))
    if 0 in kept and look.entry.get("embedding") != "kept":
        message = f"the input of layer 0 is the embedding, which SGLang {look.pair.version} cannot keep: it ends with"
        message += " a TypeError (a tensor and None are added)"
        look.found.add("EMBEDDING", ERROR, message, _fix(look, "pin an SGLang that keeps it, or give other ids"))
    elif 0 in kept and not (look.contract and look.contract.inputs):
        message = (
            "the input of layer 0, the embedding, would be kept; if the ids count outputs, 0 meant that of layer 0"
        )
        look.found.add("EMBEDDING", WARNING, message, "record the drafter's convention in its contract")


def _fix(look: _Check, otherwise: str) -> str:
    """The ids the contract asks for, if it can be said."""
    inputs = look.contract.inputs if look.contract else None
    written = _write(look, inputs) if inputs else ""
    if not written.startswith("write"):
        return otherwise
    return f"sglang_server_eagle_layer_ids: {written.removeprefix('write ')}"


def _agreement(look: _Check) -> None:
    """The layers that are kept against those of the contract."""
    kept, contract = look.kept(), look.contract
    if kept is None or contract is None or contract.inputs is None or kept == contract.inputs:
        return
    message = f"the inputs of layers {numbers(kept)} would reach the drafter, which was trained on the {contract}"
    look.found.add("LAYERS", ERROR, message, _fix(look, _write(look, contract.inputs)))


def _order(look: _Check) -> None:
    """Orders and first ids that look like a fault, or are one."""
    ids, kept = look.ids, look.kept()
    if ids is None or kept is None:
        return
    compared = bool(look.contract and look.contract.inputs)
    agreed = bool(look.contract and look.contract.inputs == kept)
    one = look.rule == "plus_one_if_first_is_1"
    if ids != sorted(ids):
        message = f"the ids {ids} do not ascend; states are packed in the order of the layers all the same"
        if one and 1 in ids and ids[0] != 1:
            message += f", and as the first is {ids[0]} and not 1, none is raised by 1"
        fix = "" if compared else f"write {sorted(ids)} if that is meant"
        look.found.add("ORDER", INFO if agreed else WARNING, message, fix)
    if one and ids[0] == 1:
        plain = look.layers is not None and kept == tuple(sorted(default_layers(look.layers)))
        message = f"the first id is 1, so SGLang {look.pair.version} raises all by 1, to {numbers(kept)}"
        quiet = compared or plain  # a contract that disagrees is an error of its own
        fix = "" if quiet else f"write {list(ids_for(ids, look.rule or '') or ())} if these inputs are meant"
        look.found.add("FIRST-IS-1", INFO if quiet else WARNING, message, fix)


def _convention(look: _Check) -> None:
    """What numbers alone make suspicious, where no contract says what they mean."""
    ids, kept, layers = look.ids, look.kept(), look.layers
    if ids is None or kept is None or layers is None or (look.contract and look.contract.inputs):
        return
    inside = all(0 <= layer < layers for layer in kept)
    default = default_layers(layers)
    if look.rule == "always_plus_one" and inside and kept != tuple(sorted(default)):
        message = f"SGLang {look.pair.version} raises all ids by 1: {ids} are the inputs of layers {numbers(kept)}"
        lower = ids_for(ids, look.rule)
        fix = f"if inputs of {numbers(ids)} are meant, write {list(lower)}" if lower else "record the convention"
        look.found.add("SHIFTED", WARNING, message, f"{fix}; record the convention in the drafter's contract")
    rest = tuple(ids[1:])
    outputs, inputs = tuple(layer - 1 for layer in default), default
    if len(ids) == DEFAULT_COUNT and ((rest == outputs[1:] and ids[0] != 1) or (rest == inputs[1:] and ids[0] == 1)):
        message = f"the ids {ids} mix two ways of counting: {numbers(rest)} and {ids[0]} do not belong together"
        look.found.add("MIXED", WARNING, message, "ask how its trainer counts, and record it in the drafter's contract")


def _sizes(look: _Check) -> None:
    """Hidden size and vocabulary against the target."""
    size, given = look.target.integer("hidden_size"), look.drafter.integer("target_hidden_size")
    own = look.drafter.integer("hidden_size")
    if size and look.hidden_in and look.hidden_in != size:
        key = "target_hidden_size" if given else "hidden_size"
        message = f"{key} of the drafter is {look.hidden_in}, but the target's hidden size is {size}"
        look.found.add("HIDDEN", ERROR, message, "pin the drafter of this target")
    elif size and own and own != size and look.tensors is not None and not _has(look, "embed_tokens.weight"):
        message = (
            f"hidden_size {own} is not the target's {size}, so its embedding cannot be used, and there is no own one"
        )
        look.found.add("HIDDEN", ERROR, message, "pin a drafter with embed_tokens.weight")
    words, drafted = look.target.integer("vocab_size"), look.drafter.integer("vocab_size")
    if words and drafted and words != drafted:
        message = f"vocab_size of the drafter is {drafted}, but the target's is {words}"
        look.found.add("VOCAB", ERROR, message, "pin the drafter of this target")
    small = look.drafter.integer("draft_vocab_size")
    if small and drafted and small > drafted:
        message = f"draft_vocab_size {small} is larger than vocab_size {drafted}"
        look.found.add("VOCAB", ERROR, message, "fetch the pinned revision again")
    tied = look.drafter.data.get("tie_word_embeddings") is True
    if look.kind.get("loader", "").startswith("llama") and "draft_vocab_size" not in look.drafter.data and not tied:
        message = (
            f"draft_vocab_size is missing, which {look.drafter.architecture} reads without asking: it would not start"
        )
        look.found.add("VOCAB", ERROR, message, "write it, or null when the target's head is used")


def _has(look: _Check, name: str) -> bool:
    tensors = look.tensors or {}
    return name in tensors or f"model.{name}" in tensors


def _vocabulary(look: _Check) -> None:
    """d2t, t2d and the head."""
    if look.tensors is not None:
        vocabulary.check(look.drafter, look.tensors, look.pair.tensors, look.found, look.notes)


def _fit(look: _Check) -> None:
    """Weights against the config beside them, attention against the backend."""
    if look.tensors is not None:
        fit.shapes(look.drafter, look.tensors, look.found)
    fit.backend(look.drafter, look.pair.flags, look.found)


def _context(look: _Check) -> None:
    """Tokens: the engine gives the drafter the target's context, and refuses one longer than its own."""
    asked, own = look.context(), look.drafter.integer("max_position_embeddings")
    if asked is None or own is None:
        return
    scaling = look.drafter.mapping("rope_scaling")
    factor = _positive(scaling.get("factor")) or 1.0
    if "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3":
        factor = 1.0
    reach = int(own * factor)
    if reach >= asked:
        return
    override = str(look.pair.environment.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "")).lower()
    forced = override in ("1", "true", "yes", "y")
    message = f"the drafter reaches {reach} tokens (max_position_embeddings {own}), but the context is {asked}"
    fix = f"write context-length: {reach}, or use a drafter trained for longer texts"
    look.found.add("CONTEXT", WARNING if forced else ERROR, message, fix)


def _positive(value: object) -> float:
    """A usable number, 0 for anything else."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST
    return float(value) if usable and isinstance(value, int | float) else 0.0


def _rope(look: _Check) -> None:
    """Rotary embedding: the drafter's own may differ from the target's, so only the impossible is a finding."""
    theta, scaling = look.drafter.rope
    other, others = look.target.rope
    if theta is not None and _positive(theta) < 1000:
        message = f"rope_theta of the drafter is {short(theta)}; values from 10000 on are usual"
        look.found.add("ROPE", WARNING, message, "compare it with the one it was trained with")
    reach = int(_positive(scaling.get("original_max_position_embeddings")) * _positive(scaling.get("factor")))
    asked = look.context()
    if reach and asked and reach < asked:
        message = f"the drafter's rope scaling reaches {reach} tokens, but the context is {asked}"
        look.found.add("ROPE", WARNING, message, "expect short accept lengths beyond it, or ask for less context")
    mine, its = (theta, scaling.get("factor")), (other, others.get("factor"))
    if mine != its:
        look.notes.append(
            f"rope: theta {short(theta)}, factor {short(mine[1])} here, {short(other)} and {short(its[1])} in the "
            "target; both can be right, it is a matter of the drafter's training"
        )


def _class(look: _Check) -> None:
    """What the drafter's class refuses or does not read."""
    name, version = look.drafter.architecture, look.pair.version
    number = look.drafter.integer("num_hidden_layers")
    if look.kind.get("one_layer") and number and number != 1:
        message = f"num_hidden_layers is {number}, but {name} of SGLang {version} takes 1 only"
        look.found.add("NUM-LAYERS", ERROR, message, "pin a drafter with one layer")
    if look.kind.get("needs_q_lora") and look.drafter.integer("q_lora_rank") is None:
        look.found.add("Q-LORA", ERROR, f"q_lora_rank is missing, which {name} needs", "pin a drafter that has it")
    unread = [key for key in NORMS if look.drafter.data.get(key) and key not in look.kind.get("reads", [key])]
    if unread:
        message = f"{', '.join(unread)} of the drafter's config.json is not read by {name} of SGLang {version}"
        message += ": it would be served without them, with a low accept length"
        look.found.add("NORMS", ERROR, message, "pin an SGLang that reads them (EAGLE-3.1: sglang pull request 26506)")


def _quantised(look: _Check) -> None:
    """Quantisation of the drafter itself, and what it would inherit."""
    own = look.drafter.mapping("quantization_config")
    dtypes = {dtype for name, (dtype, _) in (look.tensors or {}).items() if not vocabulary.is_map(name)}
    others = dtypes - vocabulary.FLOATS
    if own or (others and look.kind.get("float_only")):
        what = own.get("quant_method", own.get("quant_algo", "some method")) if own else ", ".join(sorted(others))
        message = f"the drafter's weights are quantised ({short(what)})"
        certain = bool(look.kind.get("float_only"))
        if certain:
            message += f", but {look.drafter.architecture} takes BF16, F16 and F32 only"
        look.found.add("QUANTISED", ERROR if certain else WARNING, message, "pin a drafter in bfloat16")
    if own or look.pair.flags.get("speculative-draft-model-quantization") is not None:
        return
    flag = look.pair.flags.get("quantization")
    method = str(flag or quantisation(look.pair.target))
    if not method or method == "unquant":
        return
    certain = flag is not None or any(word in method.lower() for word in ("fp4", "modelopt", "awq"))
    message = f"the drafter is not quantised, but would inherit {short(method)} of the target"
    fix = "write speculative-draft-model-quantization: unquant into sglang_server_launch"
    look.found.add("QUANT-INHERITED", ERROR if certain else WARNING, message, fix)


# names of tensors that a loader has a place for (engine_models.LOADERS), one pattern a loader; others are dropped
_MLP = r"mlp\.(gate|up|down)_proj\.\w+|(input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
_MHA = rf"self_attn\.[qkvo]_proj\.\w+|{_MLP}"
_MLA = rf"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|q_a_layernorm|kv_a_layernorm)\.\w+|{_MLP}"
_OUTER = r"fc\.(weight|bias)|norm\.weight|embed_tokens\.weight"
LAYER_NAMES = {
    "llama-midlayer": re.compile(rf"(model\.)?midlayer\.({_MHA})"),
    "llama": re.compile(rf"(model\.)?(midlayer|layers\.\d+)\.({_MHA})"),
    "mla": re.compile(rf"(midlayer|layers\.0)\.({_MLA})"),
}
OUTER_NAMES = {
    "llama-midlayer": re.compile(rf"(model\.)?({_OUTER})|lm_head\.weight|.*(d2t|t2d).*"),
    "llama": re.compile(rf"(model\.)?({_OUTER})|lm_head\.weight|.*(d2t|t2d).*"),
    "mla": re.compile(rf"{_OUTER}|lm_head\.weight|(.*\.)?(d2t|t2d)"),
}
NORM_NAMES = re.compile(r"(model\.)?(fc_norm\.\d+|aux_norm_(low|mid|high)|input_norm)\.weight")


def _weights(look: _Check) -> None:
    """Tensors that the loader has no place for and drops, and what it then lacks."""
    loader = look.kind.get("loader")
    if look.tensors is None or loader not in LAYER_NAMES or look.drafter.mapping("quantization_config"):
        return
    layer, outer = LAYER_NAMES[loader], OUTER_NAMES[loader]
    names = sorted(name for name in look.tensors if not name.endswith("rotary_emb.inv_freq"))
    norms = any(look.drafter.data.get(key) and key in look.kind.get("reads", []) for key in NORMS)
    dropped = [
        name
        for name in names
        if not layer.fullmatch(name) and not outer.fullmatch(name) and not (norms and NORM_NAMES.fullmatch(name))
    ]
    who = f"the loader of {look.drafter.architecture} in SGLang {look.pair.version}"
    lacking = [] if any(layer.fullmatch(name) for name in names) else ["weight of its layer"]
    lacking += [] if _taken(look, "fc.weight", outer) else ["fc.weight"]
    if lacking:
        message = f"{who} finds no {' and no '.join(lacking)} among the drafter's tensors"
        message += f"; it drops {_first(dropped)}" if dropped else ""
        look.found.add(
            "WEIGHTS", ERROR, message, "pin a revision in the layout that this engine loads, or another engine"
        )
    elif dropped:
        message = f"{who} has no place for {_first(dropped)} and drops {'it' if len(dropped) == 1 else 'them'}"
        look.found.add("WEIGHTS", WARNING, message, "pin a revision in the layout that this engine loads")


def _taken(look: _Check, name: str, pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(option) for option in (name, f"model.{name}") if option in (look.tensors or {}))


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _intended(look: _Check) -> None:
    """The target that the drafter was made for, and revisions that can move."""
    contract, served = look.contract, look.pair.served
    if contract and contract.target and served and contract.target != served:
        message = f"the drafter was made for {contract.target}, but {served} is served"
        look.found.add("TARGET", ERROR, message, "pin the drafter of this target, or correct the contract")
    for repository, revision in sorted(look.pair.revisions.items()):
        if not isinstance(revision, str) or not re.fullmatch(r"[0-9a-f]{7,64}", revision):
            message = f"the revision of {repository} is {short(revision)}, which can come to mean other files"
            look.found.add("UNPINNED", WARNING, message, "pin a commit; drafters are republished in place")


def _known_faults(look: _Check) -> None:
    """What is known of this version."""
    for fault in descriptions.faults(look.pair.version, _facts(look)):
        message = f"SGLang {look.pair.version}: {fault['message']} ({fault['basis']}: {fault['source']})"
        look.found.add("ENGINE-FAULT", Severity(fault["severity"]), message, fault["fix"])


PARTS: tuple[Callable[[_Check], None], ...] = (
    _engine, _types, _algorithm, _key, _count, _fc, _aux, _range, _agreement, _order, _convention, _sizes,
    _vocabulary, _fit, _context, _rope, _class, _quantised, _weights, _intended, _known_faults,
)  # fmt: skip


def deployed(subject: str, values: Mapping[str, Any], read: Callable[[str], object]) -> Pair | None:
    """The pair that a host's variables describe, None when it has no drafter or no manifest to go by.

    values: the host's variables, worked out; read: a manifest by its path, as JSON, None when it cannot be read. What
    the variables lack or get wrong is found where they are looked at themselves.
    """
    target = release(values, values.get("sglang_server_model_path"), read)
    drafter = release(values, values.get("sglang_server_drafter_path"), read)
    if target is None or drafter is None:
        return None
    config = values.get("sglang_server_drafter_config")
    flags, environment = values.get("sglang_server_launch"), values.get("sglang_server_environment")
    pins = values.get("pivot_pins")
    models = pins.get("models") if isinstance(pins, Mapping) else None
    contracts = [
        pin.get("contract")
        for pin in (models.values() if isinstance(models, Mapping) else ())
        if isinstance(pin, Mapping) and all(pin.get(key) == drafter.get(key) for key in ("repository", "revision"))
    ]
    version = str(values.get("sglang_engine_version"))
    return Pair(
        subject=subject,
        target=target.get("config"),
        drafter=config if isinstance(config, Mapping) and config else drafter.get("config"),
        tensors=tensors_of(drafter),
        layer_ids=values.get("sglang_server_eagle_layer_ids"),
        version=version,
        engine=descriptions.load(version),
        flags=flags if isinstance(flags, Mapping) else {},
        environment=environment if isinstance(environment, Mapping) else {},
        contract=next((item for item in contracts if item is not None), None),
        served=str(target.get("repository")),
        revisions={str(model.get("repository")): model.get("revision") for model in (target, drafter)},
    )


def release(values: Mapping[str, Any], path: object, read: Callable[[str], object]) -> Mapping[str, Any] | None:
    """The manifest of the deployed model that stands at a path, ``<root>/<repository>/<revision>``."""
    models = values.get("model_weights_models")
    for model in models if isinstance(models, list) and isinstance(path, str) else ():
        if not isinstance(model, Mapping) or not model.get("revision"):
            continue
        if str(path).rstrip("/").endswith(f"/{model.get('repository')}/{model.get('revision')}"):
            manifest = read(str(model.get("manifest")))
            return manifest if isinstance(manifest, Mapping) else None
    return None


def quantisation(target: object) -> str:
    """The method of a target's checkpoint, empty when it has none."""
    for config in (target, target.get("text_config") if isinstance(target, Mapping) else None):
        given = config.get("quantization_config") if isinstance(config, Mapping) else None
        if isinstance(given, Mapping) and given:
            return str(given.get("quant_method") or given.get("quant_algo") or "unnamed")
    return ""


def tensors_of(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """All tensors of a manifest in one mapping, None when it holds none. Names of several files come together."""
    files = manifest.get("safetensors")
    if not isinstance(files, Mapping) or not files:
        return None
    return {name: entry for tensors in _mappings(files) for name, entry in tensors.items()}


def _mappings(files: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (tensors for tensors in files.values() if isinstance(tensors, Mapping))
