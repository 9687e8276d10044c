"""Everything that can be known before anything is touched: all checks of an inventory's hosts, in one report.

Pure but for files of the controller that the variables name (manifests, locks, the inventory itself). What Ansible has
to work out first comes in as `Host`; the preflight action and ``pivot check`` both hand it over
(`pivot.inventory.gather`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot import faults
from pivot.drafters import model
from pivot.drafters.pair import deployed, drafts, quantisation, release
from pivot.engines import descriptions, patches, wheelhouse
from pivot.engines.engine import EngineError
from pivot.engines.engine_source import DescriptionError
from pivot.findings import Finding, Severity, errors, render, waive
from pivot.inventory import devices, inventory, networks, nodes, paths, pins, sizes
from pivot.places import file_at
from pivot.pve import proxmox_raw
from pivot.serving import budget, launch, launch_rules, nccl

# the roles that deploy.yml gives to every container
ROLES = ("proxmox_container", "sglang_engine", "model_weights", "sglang_server")
# looked at besides the variables of roles
OTHERS = (
    *("ansible_host", "ansible_ssh_private_key_file", "ansible_ssh_common_args", "ansible_user", "ansible_become"),
    *("pivot_pins", "pivot_root", "pivot_waivers"),
)
WHOLE = "the inventory"
Validate = Callable[[inventory.Options, Mapping[str, Any]], list[str]]
"""What Ansible's own validator says about the values of one role's options."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host as the inventory says it.

    given: names of all variables that are set for it, without facts; values: those of roles and of OTHERS that could
    be worked out; problems: what Ansible says about the others, by name; place: the inventory, or its directory.
    """

    name: str
    given: frozenset[str]
    values: Mapping[str, Any]
    problems: Mapping[str, str]
    place: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """What concerns several hosts.

    groups: names of hosts by group; addresses: ansible_host of every host, also of one that is left out, and of
    containers proxmox_container_vmid and what `pivot.inventory.nodes` and `pivot.inventory.devices` compare; waivers:
    pivot_waivers of every host.
    """

    groups: Mapping[str, Sequence[str]]
    addresses: Mapping[str, Mapping[str, Any]]
    waivers: Mapping[str, object]
    place: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """What is worth knowing about a host and no finding. layers: which reach the drafter, with notes; memory: what
    fits into a card. Empty where it is not known."""

    layers: str = ""
    notes: tuple[str, ...] = ()
    memory: str = ""

    def lines(self, host: str) -> list[str]:
        """For a terminal."""
        parts = [self.layers, *(f"  {note}" for note in self.notes), self.memory]
        return [f"{host}: {part}" for part in parts if part]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The answer: findings, each once, and what was said of every host that was looked at."""

    findings: tuple[Finding, ...]
    said: Mapping[str, Said]

    @property
    def failed(self) -> bool:
        """Whether a finding stops the run."""
        return bool(errors(self.findings))

    def lines(self) -> list[str]:
        """What was said, host by host."""
        return [line for host, said in self.said.items() for line in said.lines(host)]

    def text(self) -> str:
        """All of it, for a terminal."""
        return "\n".join([*self.lines(), render(self.findings) or "nothing to object to"])

    def summaries(self) -> dict[str, dict[str, str]]:
        """Per host, what the summary at the end of a run repeats."""
        rows = {host: {"layers": said.layers, "memory": said.memory} for host, said in self.said.items()}
        return {host: own for host, row in rows.items() if (own := {k: text for k, text in row.items() if text})}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        hosts = {host: dataclasses.asdict(said) for host, said in self.said.items()}
        return {"failed": self.failed, "findings": [item.as_dict() for item in self.findings], "hosts": hosts}


def names(specs: Mapping[str, inventory.Options]) -> set[str]:
    """The variables that have to be worked out for a host."""
    return {*OTHERS, *(name for options in specs.values() for name in options)}


def run(
    hosts: Iterable[Host],
    whole: Whole,
    specs: Mapping[str, inventory.Options],
    project: Path,
    validate: Validate,
    roles: Sequence[str] = ROLES,
) -> Report:
    """All checks.

    hosts: those to look at; specs: options by role; project: the directory that pins are relative to where the
    inventory sets no pivot_root; roles: those that every host is going to be given.
    """
    common = accepted(whole.waivers)
    found = waive(WHOLE, inventory.groups(whole.groups, whole.place), common, faults.codes)
    said: dict[str, Said] = {}
    for host in hosts:
        own = [*_variables(host, specs, project, validate, roles)]
        said[host.name], served = _served(host)
        found += waive(host.name, [*own, *served], host.values.get("pivot_waivers"), faults.codes)
    containers = [name for name in whole.groups.get(inventory.CONTAINERS, ()) if name in whole.addresses]
    together = nodes.check([nodes.node(name, whole.addresses[name]) for name in containers])
    together += devices.given_twice({name: whole.addresses[name] for name in containers})
    together += [*inventory.collisions(whole.addresses), *inventory.absent_nodes(whole.addresses)]
    found += waive(WHOLE, together, common, faults.codes)
    return Report(tuple(dict.fromkeys(found)), said)


def accepted(waivers: Mapping[str, object]) -> dict[str, str]:
    """The waivers that count for what concerns several hosts: those that every host of the inventory has.

    waivers: pivot_waivers by host. Those that cannot be used are found where the host itself is looked at.
    """
    each = [own if isinstance(own, Mapping) else {} for own in waivers.values()]
    if not each:
        return {}
    shared = {code: reason for code, reason in each[0].items() if all(code in own for own in each)}
    known = faults.codes() if shared else frozenset()
    return {
        code: reason for code, reason in shared.items() if code in known and isinstance(reason, str) and reason.strip()
    }


# --- one host


def _variables(
    host: Host, specs: Mapping[str, inventory.Options], project: Path, validate: Validate, roles: Sequence[str]
) -> Iterator[Finding]:
    """What its variables get wrong by themselves: missing, misspelt, of a wrong type, naming what is not there."""
    values = host.values
    yield from inventory.undefined(host.name, host.problems, host.place)
    yield from inventory.files(host.name, values, host.place)
    pinned: list[Finding] = []
    if "pivot_pins" not in host.problems:
        pinned = pins.check(values.get("pivot_pins"), Path(values.get("pivot_root") or project), host.place)
    yield from pinned
    yield from inventory.missing(host.name, host.given, specs, roles)
    own = {name: value for name, value in values.items() if name not in _handed_on(pinned)}
    yield from inventory.nulls(host.name, own, specs, roles, host.place)
    yield from inventory.empty_secrets(host.name, host.given, values)
    yield from inventory.login(host.name, values, host.place)
    yield from inventory.unknown_variables(host.name, host.given, specs, host.place)
    yield from devices.deployed(host.name, values)
    yield from networks.check(host.name, values)
    yield from proxmox_raw.deployed(host.name, values)
    yield from _patches(host, project)
    for options in specs.values():
        yield from inventory.type_findings(host.name, validate(options, values), options, host.place, values)
        yield from sizes.check(host.name, values, options, host.place)


def _handed_on(pinned: Sequence[Finding]) -> set[str]:
    """Variables of the engine that may hand on what its pin lacks, which is told of the pin."""
    lacking = (item for item in pinned if item.code == "PIN-NULL" and item.subject.startswith("pivot_pins.engines."))
    return {f"sglang_engine_{item.message.partition(' ')[0]}" for item in lacking}


def _patches(host: Host, project: Path) -> list[Finding]:
    """Patches of the engine, tried on the published wheel where a wheelhouse of this controller has it."""
    entries, named = host.values.get("sglang_engine_patches"), host.values.get("sglang_engine_lock")
    place = file_at(named) if isinstance(named, str) else None
    if not entries or place is None:
        return []  # a lock that is missing is found where files are looked at
    try:
        lock = wheelhouse.read_lock(place)
    except EngineError:
        return []  # and a broken one where the pins are
    cache = host.values.get("sglang_engine_wheelhouse") or project / wheelhouse.DEFAULT_CACHE
    return patches.check(host.name, entries, project, lock, Path(str(cache)))


def _served(host: Host) -> tuple[Said, list[Finding]]:
    """What the engine makes of the launch settings and of the drafter, and what fits into a card."""
    flags = host.values.get("sglang_server_launch", {})
    own = host.values.get("sglang_server_environment", {})
    if not isinstance(flags, Mapping) or not isinstance(own, Mapping):
        return Said(), []  # a type that is found where types are looked at
    environment = nccl.environment(host.values.get("sglang_server_nccl_profile"), own)
    found = launch.check(host.name, flags, environment, host.values.get("sglang_server_api_key"))
    verdict, more = _engine(host, flags, environment)
    found += more
    found += _nccl(host, flags, environment)
    found += paths.beforehand(host.name, flags, environment, host.values)
    plan, more = budget.deployed(host.name, host.values, read_manifest)
    found += more
    found += budget.check(plan) if plan else []
    layers, notes = (verdict.line, verdict.notes) if verdict else ("", ())
    return Said(layers, notes, budget.line(plan) if plan else ""), found


def _engine(
    host: Host, flags: Mapping[str, Any], environment: Mapping[str, Any]
) -> tuple[model.Verdict | None, list[Finding]]:
    version = str(host.values.get("sglang_engine_version"))
    try:
        engine = descriptions.load(version)
        pair = deployed(host.name, host.values, read_manifest)
    except DescriptionError as error:
        fix = "describe the wheel again: pivot engine describe WHEEL"
        return None, [Finding("ENGINE-DESCRIPTION", Severity.ERROR, host.name, str(error), fix)]
    target = (release(host.values, host.values.get("sglang_server_model_path"), read_manifest) or {}).get("config")
    settings = launch_rules.Launch(
        subject=host.name,
        flags=flags,
        environment=environment,
        version=version,
        engine=engine,
        drafter=bool(host.values.get("sglang_server_drafter_path")),
        quantisation=quantisation(target),
        own_drafter=drafts(target),
        capability=str(host.values.get("gpu_runtime_compute_capability") or "") or None,
    )
    verdict = model.check(pair) if pair else None
    return verdict, [*launch_rules.check(settings), *(verdict.findings if verdict else ())]


def _nccl(host: Host, flags: Mapping[str, Any], environment: Mapping[str, Any]) -> list[Finding]:
    """NCCL's variables; a reason for one is a comment where the inventory sets it."""
    if not any(str(name).startswith("NCCL_") for name in environment):
        return []
    directory = host.place if host.place.is_dir() else host.place.parent
    files = [path for path in sorted(directory.rglob("*.y*ml")) if file_at(path)]
    named = host.values.get("sglang_engine_lock")
    lock = file_at(named) if isinstance(named, str) else None
    settings = nccl.Settings(
        subject=host.name,
        environment=environment,
        reasons=nccl.commented(path.read_text(errors="replace") for path in files)
        | nccl.profile_reasons(
            host.values.get("sglang_server_nccl_profile"), host.values.get("sglang_server_environment", {})
        ),
        # a lock that is missing is found where files are looked at
        version=nccl.locked_version(lock.read_text(errors="replace")) if lock else None,
        custom_all_reduce=not flags.get("disable-custom-all-reduce"),
    )
    return nccl.check(settings)


def read_manifest(path: str) -> object:
    """A manifest as JSON, None when it cannot be read: the pins say so."""
    place = file_at(path)
    try:
        return json.loads(place.read_bytes()) if place else None
    except (OSError, ValueError, RecursionError):
        return None
