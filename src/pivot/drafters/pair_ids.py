"""Which layers reach a drafter: what the engine does with its ids, and what they are against its contract."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pivot.drafters.configs import kind_of, read_ids, short
from pivot.drafters.layers import default_layers, ids_for, kept_layers, numbers
from pivot.drafters.pair import DEFAULT_COUNT, ERROR, IDS, INFO, WARNING, Look, fix_by_contract, ids_to_write

# model types of drafters and targets that come with transformers, not with the engine
TRANSFORMERS_TYPES = frozenset(
    {
        "llama", "llama4", "llama4_text", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "deepseek_v2", "deepseek_v3", "gpt_oss", "phi3", "gemma2", "gemma3", "gemma3_text", "glm4", "glm4_moe",
    }
)  # fmt: skip


def _engine(look: Look) -> None:
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
        fix = f"read {look.entry.get('setter')} and its capture loop, then add both to pivot.engines.engine_models"
        look.found.add("RULE", WARNING, message, fix)


def _types(look: Look) -> None:
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


def _algorithm(look: Look) -> None:
    """EAGLE-3 drafters need EAGLE3."""
    given = look.pair.flags.get("speculative-algorithm")
    name = look.drafter.architecture or ""
    if given is not None and str(given).upper() != "EAGLE3" and "eagle3" in name.lower():
        message = f"speculative-algorithm is {short(given)}, but {name} is an EAGLE-3 drafter: no states would be kept"
        look.found.add("ALGORITHM", ERROR, message, "write speculative-algorithm: EAGLE3 into sglang_server_launch")
    engine = look.pair.engine or {}
    others = set(engine.get("architectures") or []) - set(engine.get("drafters") or {})
    if str(given).upper() == "EAGLE3" and name in others:
        message = f"speculative-algorithm is EAGLE3, but {name}, the class of the drafter, is none for EAGLE-3"
        look.found.add(
            "ALGORITHM", ERROR, message, "correct architectures, pin an EAGLE-3 drafter, or use its algorithm"
        )


def _misspelt(look: Look) -> None:
    """Ids under a name that only resembles the right one, or in another object; nobody reads them."""
    if look.ids is not None or look.drafter.data.get(IDS) is not None or not look.readable:
        return
    for where, key, value in _nested(look.drafter.data):
        place = f"{where}.{key}" if where else key
        alike = difflib.get_close_matches(key, [IDS], n=1, cutoff=0.85)
        if alike and place != f"eagle_config.{IDS}" and isinstance(value, list):
            message = (
                f"{place} of the drafter's config.json is {short(value)}, and SGLang reads only eagle_config.{IDS}"
            )
            fix = f"write sglang_server_eagle_layer_ids: {short(value)}, which puts them there"
            look.found.add("KEY", ERROR, f"{message}: the default would be used", fix)


def _nested(data: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str, object]]:
    """Every key of a config, and of the objects in it, with where it stands."""
    for key, value in data.items():
        yield where, str(key), value
        if isinstance(value, Mapping) and not where:
            yield from _nested(value, str(key))


def _key(look: Look) -> None:
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
        said = f"{top} (layers {numbers(meant)})" if look.rule and list(meant) != top else str(top)
        message = f"{where} is not read, so {said} would be ignored and the default {numbers(default)} used"
        look.found.add("KEY", ERROR, message, fix)


def _count(look: Look) -> None:
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


def _fc_width(look: Look) -> int | None:
    """The input width of fc in the header, None when that is not known."""
    for name in ("fc.weight", "model.fc.weight"):
        _, shape = (look.tensors or {}).get(name, ("", ()))
        if len(shape) == 2:
            return shape[1]
    return None


def _fc(look: Look) -> None:
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


def _aux(look: Look) -> None:
    """Whether states are asked for at all."""
    if not look.use_aux:
        message = f"eagle_config.use_aux_hidden_state is {short(look.use_aux)}: no states are kept and fc is skipped"
        look.found.add("NO-AUX", ERROR, message, "write use_aux_hidden_state: true")
    elif not isinstance(look.use_aux, bool):
        message = (
            f"eagle_config.use_aux_hidden_state is {short(look.use_aux)} ({kind_of(look.use_aux)}), which counts as"
        )
        look.found.add("CONFIG", ERROR, f"{message} true", "write use_aux_hidden_state: true or false, without quotes")


def _range(look: Look) -> None:
    """Layers that do not exist, and the embedding."""
    kept, layers = look.kept(), look.layers
    if layers is not None and look.ids is not None and look.entry and look.rule is None:
        # at most one is added to an id, and one past the last layer is its output
        wrong = [value for value in look.ids if not -1 <= value <= layers]
        if wrong:
            message = f"the ids {numbers(wrong)} can be no layers of a target with {layers}, however they are read"
            look.found.add("RANGE", ERROR, message, "give ids of layers that exist")
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
        look.found.add("RANGE", ERROR, message, fix_by_contract(look, "give ids of layers that exist"))
    if 0 in kept and look.entry.get("embedding") != "kept":
        message = f"the input of layer 0 is the embedding, which SGLang {look.pair.version} cannot keep: it ends with"
        message += " a TypeError (a tensor and None are added)"
        look.found.add(
            "EMBEDDING", ERROR, message, fix_by_contract(look, "pin an SGLang that keeps it, or give other ids")
        )
    elif 0 in kept and not (look.contract and look.contract.inputs):
        message = (
            "the input of layer 0, the embedding, would be kept; if the ids count outputs, 0 meant that of layer 0"
        )
        look.found.add("EMBEDDING", WARNING, message, "record the drafter's convention in its contract")


def _agreement(look: Look) -> None:
    """The layers that are kept against those of the contract."""
    kept, contract = look.kept(), look.contract
    if kept is None or contract is None or contract.inputs is None or kept == contract.inputs:
        return
    message = f"the inputs of layers {numbers(kept)} would reach the drafter, which was trained on the {contract}"
    look.found.add("LAYERS", ERROR, message, fix_by_contract(look, ids_to_write(look, contract.inputs)))


def _order(look: Look) -> None:
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


def _convention(look: Look) -> None:
    """What numbers alone make suspicious, where no contract says what they mean."""
    ids, kept, layers = look.ids, look.kept(), look.layers
    if ids is None or kept is None or layers is None or (look.contract and look.contract.inputs):
        return
    inside = all(0 <= layer < layers for layer in kept)
    default = default_layers(layers)
    if look.rule == "always_plus_one" and inside and kept != tuple(sorted(default)):
        message = f"SGLang {look.pair.version} raises all ids by 1: {ids} are the inputs of layers {numbers(kept)}"
        lower = ids_for(ids, look.rule)
        fix = f"if inputs of {numbers(ids)} are meant, write {list(lower)}; " if lower else ""
        look.found.add("SHIFTED", WARNING, message, f"{fix}record the convention in the drafter's contract")
    rest = tuple(ids[1:])
    outputs, inputs = tuple(layer - 1 for layer in default), default
    if len(ids) == DEFAULT_COUNT and ((rest == outputs[1:] and ids[0] != 1) or (rest == inputs[1:] and ids[0] == 1)):
        message = f"the ids {ids} mix two ways of counting: {numbers(rest)} and {ids[0]} do not belong together"
        look.found.add("MIXED", WARNING, message, "ask how its trainer counts, and record it in the drafter's contract")


PARTS: tuple[Callable[[Look], None], ...] = (
    _engine,
    _types,
    _algorithm,
    _key,
    _misspelt,
    _count,
    _fc,
    _aux,
    _range,
    _agreement,
    _order,
    _convention,
)
