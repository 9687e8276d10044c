"""A server that somebody set up: what is wrong with it, which layers reach its drafter, which inventory describes it.

Pure: judges what `roles/server_inspect/files/inspect_server.py` found on a host, with the checks of preflight.
Secrets were masked there; a masked value becomes the name of a vault's variable here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from pivot.bundles.redact import MASK
from pivot.drafters import model
from pivot.drafters.configs import short
from pivot.drafters.pair import IDS, Pair, drafts, quantisation, tensors_of
from pivot.engines import descriptions
from pivot.engines.provenance import some
from pivot.findings import Finding, Severity, render
from pivot.serving import budget, launch, launch_rules, nccl, units

ERROR, WARNING = Severity.ERROR, Severity.WARNING
# other spellings of what this module itself asks for, where no description says them
ALIASES = {
    "model": "model-path",
    "speculative-draft-model": "speculative-draft-model-path",
    "tensor-parallel-size": "tp-size",
}
# settings compared with what the server says of itself: name there → flag
COMPARED = {
    "speculative_algorithm": "speculative-algorithm",
    "speculative_num_steps": "speculative-num-steps",
    "speculative_eagle_topk": "speculative-eagle-topk",
    "speculative_num_draft_tokens": "speculative-num-draft-tokens",
}
SHOWN = ("attention_backend", "context_length", "kv_cache_dtype", "max_total_num_tokens")
WITHOUT_ENGINE = frozenset({"DRAFTER-ENGINE"})


@dataclasses.dataclass(frozen=True, slots=True)
class Inspection:
    """The answer. lines: what there is, for people; layers: which reach the drafter, one line; findings; inventory:
    a text of YAML, ``sglang_server_*`` variables."""

    lines: tuple[str, ...]
    layers: str
    findings: tuple[Finding, ...]
    inventory: str

    def text(self) -> str:
        """All of it, for a terminal."""
        found = render(self.findings) or "nothing to object to"
        parts = ["\n".join(self.lines), f"layers: {self.layers}", found, "the inventory that describes it:"]
        return "\n\n".join([*parts, self.inventory.rstrip("\n")])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for Ansible."""
        found = [finding.as_dict() for finding in self.findings]
        return {"text": self.text(), "layers": self.layers, "findings": found, "inventory": self.inventory}


# --- settings


class _Plain(yaml.SafeLoader):
    """YAML without aliases, which could stand for endlessly much."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node; an alias is refused."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name)")
        return super().compose_node(parent, index)


def config_flags(text: str) -> dict[str, Any]:
    """The flags of a --config file. ValueError, one sentence, when it is no YAML mapping of names."""
    try:
        data = yaml.load(text, _Plain)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ValueError(f"is no YAML{where}: {getattr(error, 'problem', None) or type(error).__name__}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ValueError("is no mapping of flags' names to values")
    return data


def argv_flags(argv: Sequence[str], table: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a command line as YAML would hold them; the last of the same name counts, as for SGLang.

    table: flags of the engine's description, which says the types; without it values stay texts.
    """
    words = _names(table)
    found: dict[str, Any] = {}
    position = next((index for index, word in enumerate(argv) if word.startswith("--")), len(argv))
    while position < len(argv):
        name, equals, value = argv[position][2:].partition("=")
        position += 1
        values = [value] if equals else []
        while not equals and position < len(argv) and not re.match(r"--[A-Za-z]", argv[position]):
            values.append(argv[position])
            position += 1
        flag = table.get(_whole(name, words)) or {}
        if name.startswith("no-") and name not in words and (table.get(name[3:]) or {}).get("type") == "on-off":
            found[name[3:]] = False
        else:
            found[name] = _typed(values, flag)
    return found


def _typed(values: Sequence[str], flag: Mapping[str, Any]) -> Any:
    """Values of one flag: true without any, a list where it takes several, numbers where it takes numbers."""
    items = [_number(value, flag.get("type")) for value in values]
    if not items:
        return True
    return items if flag.get("nargs") in ("+", "*") or len(items) > 1 else items[0]


def _number(text: str, kind: object) -> Any:
    if kind in ("int", "human_readable_int") and re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if kind == "float" and re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?", text):
        return float(text)
    return text


def _names(table: Mapping[str, Any]) -> dict[str, str]:
    """Every spelling of a flag → its name."""
    known = {alias: name for name, flag in table.items() for alias in (name, *flag.get("aliases", []))}
    return {**ALIASES, **known}


def merged(config: Mapping[str, Any], line: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that count, under their own names: those of the command line win. Where the file stands is no flag."""
    names = _names(table)
    flags = {_whole(name, names): value for part in (config, line) for name, value in part.items()}
    return {name: value for name, value in flags.items() if name != "config"}


def _whole(name: str, names: Mapping[str, str]) -> str:
    """The flag that a spelling means, also a beginning that only one flag has; the spelling itself where none is."""
    begun = {names[other] for other in names if other.startswith(name)}
    return names.get(name) or (begun.pop() if len(begun) == 1 else name)


# --- the inspection


def examine(subject: str, host: Mapping[str, Any], contract: object = None) -> Inspection:
    """Everything about the server of one host. host: what inspect_server.py printed; contract: of the drafter, or None.

    DescriptionError when the kept description of its engine is damaged.
    """
    version = str(host["engine"]["version"] or (host["server_info"] or {}).get("version") or "")
    engine = descriptions.load(version) if version else None
    table = (engine or {}).get("flags") or {}
    found = [*_problems(subject, host["problems"]), *_engine(subject, version, engine)]
    try:
        config = config_flags(host["config"]["text"])
    except ValueError as error:
        config = {}
        message = f"{host['config']['path']}, which --config names, {error}"
        found.append(_finding("INSPECT-CONFIG", ERROR, subject, message, "correct the file"))
    flags = merged(config, argv_flags(host["argv"], table), table)
    environment = host["environment"]
    target, drafter = host["target"] or {}, host["drafter"] or {}
    settings = launch_rules.Launch(
        subject=subject,
        flags=flags,
        environment=environment,
        version=version,
        engine=engine,
        capability=next(iter(host["capabilities"]), None),
        drafter=bool(drafter),
        quantisation=quantisation(target.get("config")),
        own_drafter=drafts(target.get("config")),
    )
    formal = launch.check(subject, {name: flags[name] for name in flags if name not in launch.RESERVED}, environment)
    transport = nccl.Settings(
        subject=subject,
        environment=environment,
        version=host["engine"]["nccl"] or None,
        custom_all_reduce=not flags.get("disable-custom-all-reduce"),
    )
    found += [_here(item) for item in (*formal, *launch_rules.check(settings), *nccl.check(transport))]
    found += _drift(subject, flags, host["server_info"] or {})
    layers, ids = "no drafter is served", None
    if drafter:
        layers = "not known, as the config of target or drafter could not be read"
        ids = _own_ids(drafter.get("config"))
    if drafter.get("config") is not None and target.get("config") is not None:
        verdict = model.check(_pair(settings, target, drafter, contract))
        layers = verdict.line
        found += [finding for finding in verdict.findings if finding.code not in WITHOUT_ENGINE]
    found += [*_places(subject, host["engine"]), *units.check(subject, host["unit"]["text"])]
    plan = _plan(subject, host, flags)
    found += budget.check(plan) if plan else []
    text = inventory(subject, version, host, flags, ids)
    lines = [*_lines(subject, version, host), *([f"  {'memory':<13} {budget.line(plan)}"] if plan else [])]
    return Inspection(tuple(lines), layers, tuple(dict.fromkeys(found)), text)


def _plan(subject: str, host: Mapping[str, Any], flags: Mapping[str, Any]) -> budget.Plan | None:
    """What one card has to hold, None where it is not known."""
    target, drafter = host["target"] or {}, host["drafter"]
    size = host["card_mib"] / 1024
    if not size:
        return None
    if not drafter:
        return budget.of(subject, flags, size, target.get("config"), target.get("bytes"))
    own = drafter["config"] or {}
    return budget.of(subject, flags, size, target.get("config"), target.get("bytes"), own, drafter["bytes"])


def _places(subject: str, engine: Mapping[str, Any]) -> Iterator[Finding]:
    """Code that is not where an installed release has it, so that its version says little."""
    for install in engine["installs"]:
        if install["altered"]:
            named = some([f"{path} ({what})" for path, what in install["altered"]])
            message = f"files of SGLang {install['version']} are not those that were published: {named}"
            fix = "install the wheel again; what was checked here is what the version number stands for"
            yield _finding("INSPECT-FILES", WARNING, subject, message, fix)
        if not install["editable"]:
            continue
        message = f"SGLang {install['version']} is an editable installation of {install['editable']}"
        if install["changed"]:
            message += f", where {install['changed']} tracked files differ from its commit"
        fix = "install a released wheel; what was checked here is what the version number stands for"
        yield _finding("INSPECT-EDITABLE", WARNING, subject, message, fix)
    if len(engine["installs"]) > 1:
        places = ", ".join(f"{install['version']} in {install['place']}" for install in engine["installs"])
        message = f"SGLang is installed more than once for this interpreter: {places}; the first was checked"
        yield _finding("INSPECT-INSTALLS", WARNING, subject, message, "leave one")
    editable = {install["editable"] for install in engine["installs"]}
    strays = [(place, why) for place, why in engine["paths"] if not any(_inside(place, home) for home in editable)]
    if strays:
        named = some([f"{place} ({why})" for place, why in strays])
        message = f"Python also takes code from {named}: a module there can stand in for one of the engine"
        yield _finding("INSPECT-PATHS", WARNING, subject, message, "remove what is not meant")


def _inside(place: str, home: str) -> bool:
    return bool(home) and (place == home or place.startswith(f"{home}/"))


def _pair(
    settings: launch_rules.Launch, target: Mapping[str, Any], drafter: Mapping[str, Any], contract: object
) -> Pair:
    tensors = drafter.get("tensors")
    return Pair(
        subject=settings.subject,
        target=target["config"],
        drafter=drafter["config"],
        tensors=tensors_of({"safetensors": tensors}) if tensors else None,
        version=settings.version or "unknown",
        engine=settings.engine,
        flags=settings.flags,
        environment=settings.environment,
        contract=contract,
    )


def _finding(code: str, severity: Severity, subject: str, message: str, fix: str) -> Finding:
    return Finding(code, severity, subject, message, fix)


def _problems(subject: str, problems: Iterable[Sequence[str]]) -> Iterator[Finding]:
    """What the host could not read."""
    for what, sentence in problems:
        if what == "several":
            yield _finding(
                "INSPECT-SEVERAL",
                WARNING,
                subject,
                f"more than one server runs here: {sentence}",
                "-e server_inspect_pid=PID",
            )
        elif what == "other":
            message = f"another server than the named one is looked at: {sentence}"
            yield _finding(
                "INSPECT-OTHER", WARNING, subject, message, "start the unit, or name the right one: server_inspect_unit"
            )
        elif what == "server_info":
            message = f"the server did not say what it runs with: {sentence}"
            yield _finding(
                "INSPECT-ANSWER", WARNING, subject, message, "look at the server's log; all else was checked"
            )
        else:
            fix = "fetch the file again or correct its path; all else was checked"
            yield _finding("INSPECT-UNREADABLE", ERROR, subject, f"{what}: {sentence}", fix)


def _engine(subject: str, version: str, engine: Mapping[str, Any] | None) -> Iterator[Finding]:
    """One sentence where the engine is not known."""
    if engine is None:
        which = f"SGLang {version} has no description here" if version else "the version of SGLang was not found"
        message = f"{which}: names of flags and variables and the layers are not checked, all relations and sizes are"
        fix = "pivot engine describe WHEEL --out src/pivot/data/engines/sglang-VERSION.json"
        yield _finding("INSPECT-ENGINE", WARNING, subject, message, fix)


def _here(finding: Finding) -> Finding:
    """A finding of preflight in the words of a server that has no inventory."""
    texts = [finding.message, finding.fix]
    for index, text in enumerate(texts):
        plain = text.replace(f"{launch_rules.FLAGS}.", "--").replace(f"{launch_rules.VARIABLES}.", "the variable ")
        texts[index] = plain.replace("sglang_server_drafter_path", "--speculative-draft-model-path")
    return dataclasses.replace(finding, message=texts[0], fix=texts[1])


def _drift(subject: str, flags: Mapping[str, Any], info: Mapping[str, Any]) -> Iterator[Finding]:
    """What the running server says of itself against what it was told, where it was told something."""
    for name, flag in COMPARED.items():
        if flag in flags and name in info and str(flags[flag]).upper() != str(info[name]).upper():
            message = f"--{flag} is {short(flags[flag])}, but the server runs with {short(info[name])}"
            yield _finding(
                "INSPECT-DRIFT", WARNING, subject, message, "restart it, or see in its log why it was changed"
            )


def _own_ids(config: object) -> list[int] | None:
    """The ids where SGLang reads them, None without usable ones."""
    nested = config.get("eagle_config") if isinstance(config, Mapping) else None
    ids = nested.get(IDS) if isinstance(nested, Mapping) else None
    whole = isinstance(ids, list) and all(type(item) is int for item in ids)
    return list(ids) if whole and ids else None


def _lines(subject: str, version: str, host: Mapping[str, Any]) -> Iterator[str]:
    """What there is."""
    unit, pid = host["unit"], host["pid"]
    state = f"process {pid}" if pid else "not running: command line and variables as the unit says them"
    yield f"{subject}: {unit['name'] or 'no unit'}, {state}"
    rows = {
        "engine": f"SGLang {version or 'of unknown version'}, {host['engine']['python']}",
        "plugins": ", ".join(host["engine"]["plugins"]),
        "unit file": unit["FragmentPath"],
        "drop-ins": unit["DropInPaths"],
        "config": host["config"]["path"],
        "target": _place(host["target"] or {}),
        "quantisation": quantisation((host["target"] or {}).get("config")) or "none",
        "drafter": _place(host["drafter"] or {}),
        "answers": ", ".join(f"{name} {short(value)}" for name, value in _answers(host["server_info"])),
    }
    yield from (f"  {name:<13} {value}" for name, value in rows.items() if value)


def _place(found: Mapping[str, Any]) -> str:
    """A model as it is named, and where that is."""
    name, path = found.get("name", ""), found.get("path", "")
    return name if name == path else f"{name} ({path})"


def _answers(info: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    return [(name.replace("_", " "), info[name]) for name in SHOWN if info and info.get(name) is not None]


# --- the inventory


class _Dumper(yaml.SafeDumper):
    """YAML for an inventory: what only looks like a template is marked as none."""

    def ignore_aliases(self, data: Any) -> bool:
        """Everything is written out."""
        return True


class _Vault(str):
    """A text that is a template on purpose."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    if "{{" in text or "{%" in text or "{#" in text:
        return dumper.represent_scalar("!unsafe", text, style='"')
    return dumper.represent_str(text)


def _template(dumper: yaml.SafeDumper, text: _Vault) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"')


_Dumper.add_representer(str, _text)
_Dumper.add_representer(_Vault, _template)


def _sealed(name: str, value: Any) -> Any:
    """A value, or the name of a vault's variable where it was masked."""
    if isinstance(value, str):
        short_name = name.removeprefix("sglang_server_environment_").replace("sglang_server_launch_", "sglang_")
        variable = "vault_" + re.sub(r"\W+", "_", short_name.replace("sglang_server_", "sglang_")).lower()
        return _Vault(f"{{{{ {variable} }}}}") if MASK in value else str(value)
    if isinstance(value, list):
        return [_sealed(name, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _sealed(f"{name}_{key}", item) for key, item in value.items()}
    return value


def inventory(
    subject: str, version: str, host: Mapping[str, Any], flags: Mapping[str, Any], ids: Sequence[int] | None
) -> str:
    """The variables that describe the server, as YAML. Secrets are names of a vault's variables."""
    unit, drafter = host["unit"], host["drafter"] or {}
    values: dict[str, Any] = {
        "sglang_engine_version": version or None,
        "sglang_server_name": PurePosixPath(unit["name"]).stem or None,
        "sglang_server_user": unit["User"] or None,
        "sglang_server_python": host["engine"]["python"] or None,
        "sglang_server_accelerator": "cpu" if flags.get("device") == "cpu" else None,
    }
    values |= {variable: flags.get(flag) for flag, variable in sorted(launch.RESERVED.items())}
    if host["target"]:
        values["sglang_server_model_path"] = host["target"]["path"]
    if drafter:
        values["sglang_server_drafter_path"] = drafter["path"]
        values["sglang_server_drafter_config"] = drafter.get("config")
        values["sglang_server_drafter_files"] = [name for name in drafter["files"] if name != "config.json"]
        values["sglang_server_eagle_layer_ids"] = list(ids) if ids else None
    values["sglang_server_launch"] = {name: flags[name] for name in sorted(flags) if name not in launch.RESERVED}
    values["sglang_server_environment"] = dict(sorted(host["environment"].items()))
    sealed = {name: _sealed(name, value) for name, value in values.items() if value is not None}
    if host["card_mib"]:
        values["gpu_runtime_accelerator"] = "cuda"
        values["gpu_runtime_memory_gib"] = round(host["card_mib"] / 1024, 1)
        values["gpu_runtime_compute_capability"] = next(iter(host["capabilities"]), None)
        sealed |= {name: values[name] for name in values if name.startswith("gpu_") and values[name] is not None}
    start = f"# {subject} as it was found; of its environment only what concerns the engine is here\n"
    return start + yaml.dump(sealed, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
