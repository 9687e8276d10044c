"""What an inventory says, before anything is touched: names that no role knows, wrong types, hosts that collide."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pivot.findings import Finding, Severity

Options = Mapping[str, Mapping[str, Any]]


def role_specs(roles: Path) -> dict[str, Options]:
    """The options of every role under a directory, all entry points together. A broken spec raises yaml.YAMLError."""
    specs: dict[str, Options] = {}
    for path in sorted(roles.glob("*/meta/argument_specs.yml")):
        entries = yaml.safe_load(path.read_text())["argument_specs"]
        specs[path.parts[-3]] = {
            name: option for entry in entries.values() for name, option in (entry.get("options") or {}).items()
        }
    return specs


def where_set(name: str, inventory: Path) -> str:
    """``group_vars/inference/server.yml:12`` of an inventory directory, or a word when no file there sets it."""
    pattern = re.compile(rf"^\s*{re.escape(name)}\s*:")
    for path in sorted([*inventory.rglob("*.yml"), *inventory.rglob("*.yaml")]):
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            if pattern.match(line):
                return f"{path.relative_to(inventory)}:{number}"
    return "the command line or another inventory"


def unknown_variables(
    subject: str, variables: Iterable[str], specs: Mapping[str, Options], inventory: Path
) -> list[Finding]:
    """Variables with a role's prefix that the role does not know; a misspelt one would be ignored silently."""
    findings = []
    for name in sorted(variables):
        owners = [role for role in specs if name.startswith(f"{role}_")]
        if not owners or any(name in specs[role] for role in owners):
            continue
        role = max(owners, key=len)
        # the prefix is common to all, so only what follows it can tell them apart
        rest = [option.removeprefix(f"{role}_") for option in specs[role]]
        close = difflib.get_close_matches(name.removeprefix(f"{role}_"), rest, n=1)
        findings.append(
            Finding(
                "VAR-UNKNOWN",
                Severity.ERROR,
                subject,
                f"{name} ({where_set(name, inventory)}) is no variable of the role {role}",
                f"did you mean {role}_{close[0]}?" if close else f"see roles/{role}/meta/argument_specs.yml",
            )
        )
    return findings


def type_findings(subject: str, messages: Iterable[str], variables: Iterable[str], inventory: Path) -> list[Finding]:
    """What Ansible's own validator says about a role's arguments, with the place where each was set."""
    known = set(variables)
    findings = []
    for message in messages:
        name = next((word for word in re.findall(r"\w+", message) if word in known), None)
        place = f" (set in {where_set(name, inventory)})" if name else ""
        fix = "give it the type or one of the values that the message names" if name else "set it"
        findings.append(Finding("VAR-TYPE", Severity.ERROR, subject, f"{message}{place}", fix))
    return findings


def collisions(hosts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Two hosts with one container id or one address.

    hosts: variables per host; proxmox_container_vmid and ansible_host are looked at.
    """
    return [*_shared(hosts, "proxmox_container_vmid", "vmid"), *_shared(hosts, "ansible_host", "address")]


def _shared(hosts: Mapping[str, Mapping[str, Any]], variable: str, word: str) -> Iterator[Finding]:
    owners: dict[str, list[str]] = {}
    for host in sorted(hosts):
        value = hosts[host].get(variable)
        if value is not None:
            owners.setdefault(str(value), []).append(host)
    for value, names in sorted(owners.items()):
        if len(names) > 1:
            yield Finding(
                "HOST-COLLISION",
                Severity.ERROR,
                ", ".join(names),
                f"the {word} {value} is given to {len(names)} hosts ({variable})",
                f"give each host a {word} of its own in the inventory's host variables",
            )
