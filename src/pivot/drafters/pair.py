"""A target and its drafter: what their files, the launch and the contract say, read once for all checks.

Input comes from files that others wrote, so nothing in it is trusted: what cannot be used is a finding.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pivot.drafters.configs import Config, Findings, read_ids, read_tensors, short
from pivot.drafters.layers import default_layers, ids_for, kept_layers, numbers
from pivot.engines import descriptions
from pivot.findings import Severity
from pivot.wirings.wiring import as_inputs

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
IDS = "eagle_aux_hidden_state_layer_ids"
# how configs name the number of their own drafting layers
DRAFTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
DEFAULT_COUNT = 3  # states an engine takes when nothing says how many


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and its drafter as they are to be served.

    target, drafter: their config.json; tensors: the drafter's header, name → {dtype, shape}, of d2t and t2d also values
    (`pivot.drafters.vocabulary.facts`), None when not known;
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
class Contract:
    """What a drafter was trained on: layers in the trainer's own numbers, and as layer inputs when that is known."""

    layers: tuple[int, ...]
    convention: str | None
    inputs: tuple[int, ...] | None
    target: str | None

    def __str__(self) -> str:
        """For people."""
        if self.convention is None:
            return f"layers {numbers(self.layers)}, of inputs or outputs not known"
        return f"{self.convention}s of {numbers(self.layers)}"


def _contract(value: object, layers: int | None, found: Findings) -> Contract | None:
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
    return Contract(tuple(named), convention, inputs, target if isinstance(target, str) else None)


class Look:
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


def facts(pair: Pair) -> set[str]:
    """What of a deployment the known faults ask for: the words of engine_faults.yml."""
    return words(Look(pair))


def words(look: Look) -> set[str]:
    """The same of what was read already."""
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


def ids_to_write(look: Look, wanted: Sequence[int]) -> str:
    """What to write so that these layer inputs are kept, with the reason where it cannot be done."""
    if look.rule is None:
        return "which ids to write is not known for this engine"
    if 0 in wanted and look.entry.get("embedding") != "kept":
        return f"SGLang {look.pair.version} cannot keep the embedding"
    ids = ids_for(wanted, look.rule)
    return f"write {list(ids)}" if ids is not None else "no ids make this engine keep them"


def fix_by_contract(look: Look, otherwise: str) -> str:
    """The ids the contract asks for, if it can be said."""
    inputs = look.contract.inputs if look.contract else None
    written = ids_to_write(look, inputs) if inputs else ""
    if not written.startswith("write"):
        return otherwise
    return f"sglang_server_eagle_layer_ids: {written.removeprefix('write ')}"


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


def drafts(target: object) -> bool:
    """Whether a target's config says that its checkpoint has layers that draft (multi-token prediction)."""
    configs = [target, target.get("text_config") if isinstance(target, Mapping) else None]
    counts = [config.get(key) for config in configs if isinstance(config, Mapping) for key in DRAFTING]
    return any(isinstance(count, int) and count > 0 for count in counts)


def tensors_of(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """All tensors of a manifest in one mapping, None when it holds none. Names of several files come together."""
    files = manifest.get("safetensors")
    if not isinstance(files, Mapping) or not files:
        return None
    return {name: entry for tensors in _mappings(files) for name, entry in tensors.items()}


def _mappings(files: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (tensors for tensors in files.values() if isinstance(tensors, Mapping))
