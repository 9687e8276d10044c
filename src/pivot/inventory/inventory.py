"""What an inventory says, before anything is touched: names that no role knows, wrong types, hosts that collide."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pivot.findings import Finding, Severity
from pivot.places import directory_at, file_at

Options = Mapping[str, Mapping[str, Any]]
VAULT_HEADER = b"$ANSIBLE_VAULT"
# the groups that playbooks name
CONTAINERS, NODES = "inference", "proxmox"
# files of the controller by the variable that names them: whether it is the file or its directory that has to be there,
# and what would be right
FILES = {
    "ansible_ssh_private_key_file": ("file", "make a key pair there (ssh-keygen -t ed25519 -f {path}), or name yours"),
    "proxmox_container_known_hosts": ("directory", "mkdir -p {parent}, and put the node's key into the file"),
    "proxmox_container_api_ca": (
        "file",
        "copy /etc/pve/pve-root-ca.pem of the cluster there, or write null for a certificate of a public authority",
    ),
    "sglang_engine_lock": ("file", "name a lock of requirements/engine"),
    "sglang_server_health_prompts": ("file", "name a file like lab/models/prompts.json, or write null"),
}


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
    """``group_vars/inference/server.yml:12`` of an inventory directory, or a word when no file there sets it.

    Several places are all named: which one counts is for Ansible to say. An inventory that is a file is no directory.
    """
    pattern = re.compile(rf"^\s*{re.escape(name)}\s*:")
    places = [
        f"{path.relative_to(inventory)}:{number}"
        for path in sorted([*inventory.rglob("*.yml"), *inventory.rglob("*.yaml")])
        if file_at(path)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.match(line)
    ]
    return " or ".join(places) or "the command line or another inventory"


def groups(members: Mapping[str, Sequence[str]], inventory: Path) -> list[Finding]:
    """An inventory without a container to deploy, and hosts that no play will ever touch.

    members: Ansible's `groups`, names of hosts by group.
    """
    findings = []
    stray = list(members.get("ungrouped", []))
    if not members.get(CONTAINERS):
        close = difflib.get_close_matches(CONTAINERS, members.keys() - {"all", "ungrouped", NODES, CONTAINERS}, n=1)
        if close:
            fix = f"did you mean {CONTAINERS} where it says {close[0]} ({where_set(close[0], inventory)})?"
        else:
            fix = f"put the containers under {CONTAINERS}, as inventory/example/hosts.yml does, or name another with -i"
        message = f"no host is in the group {CONTAINERS}, so there is nothing to deploy"
        findings.append(Finding("HOST-NONE", Severity.ERROR, "the inventory", message, fix))
    for host in sorted(stray):
        message = f"the host {host} ({where_set(host, inventory)}) is in no group, so nothing would be done with it"
        fix = f"put it under {CONTAINERS} (containers) or {NODES} (nodes), or remove it"
        findings.append(Finding("HOST-UNGROUPED", Severity.ERROR, "the inventory", message, fix))
    return findings


def undefined(subject: str, problems: Mapping[str, str], inventory: Path) -> list[Finding]:
    """Variables whose expression cannot be worked out; those that lack the same thing are one finding.

    problems: what Ansible says, by the variable that was asked for.
    """
    lacking = {name: match[1] for name, text in problems.items() if (match := re.search(r"'(\w+)' is undefined", text))}
    lab_down = any(absent.startswith("lab_") for absent in lacking.values())
    causes: dict[tuple[str, str], dict[str, set[str]]] = {}  # code and fix → what is the matter → who needs it
    for name, text in sorted(problems.items()):
        if name in lacking:
            key, what = ("VAR-UNDEFINED", _how_to_set(lacking[name], lab_down=lab_down)), lacking[name]
            causes.setdefault(key, {}).setdefault(what, set()).add(name)
        else:
            what = " ".join(text.split())
            causes.setdefault(("VAR-EXPRESSION", what), {}).setdefault(what, set()).add(name)
    findings = []
    for (code, fix), group in sorted(causes.items()):
        names = sorted({name for own in group.values() for name in own})
        users = _some([f"{name} ({where_set(name, inventory)})" for name in names])
        if code == "VAR-UNDEFINED":
            message, advice = f"not set: {_some(sorted(group))}; needed by {users}", fix
        else:
            message, advice = f"{users} cannot be worked out: {fix}", "correct the expression there, or what it reads"
        findings.append(Finding(code, Severity.ERROR, subject, message, advice))
    return findings


def _some(items: Sequence[str]) -> str:
    """The first of many."""
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def _how_to_set(name: str, *, lab_down: bool) -> str:
    """What sets a variable of this name. lab_down: others are missing that `make lab-up` writes."""
    if name.startswith("lab_") or (name.startswith("vault_") and lab_down):
        return "the lab is not up: make lab-up"
    if name.startswith("vault_"):
        return (
            "write it into group_vars/all/vault.yml of the inventory (ansible-vault edit; names in vault.yml.example); "
            "the lab's is written by make lab-up"
        )
    if name == "ansible_host":
        return "give the host its address in hosts.yml: ansible_host"
    return "set it in the inventory, or correct the name where it is used"


def missing(
    subject: str, variables: Iterable[str], specs: Mapping[str, Options], roles: Iterable[str]
) -> list[Finding]:
    """Required variables that a host lacks, of the roles that it is going to be given."""
    given = set(variables)
    return [
        Finding(
            "VAR-MISSING",
            Severity.ERROR,
            subject,
            f"{name} is not set, and the role {role} cannot work without it",
            f"set it in the inventory: {option.get('description', 'see roles/' + role)}",
        )
        for role in roles
        for name, option in sorted(specs.get(role, {}).items())
        if option.get("required") and name not in given
    ]


def files(subject: str, values: Mapping[str, Any], inventory: Path) -> list[Finding]:
    """Files of the controller that variables name and that are not there. Values of other variables are left alone."""
    findings = []
    for name, (kind, fix) in FILES.items():
        if not isinstance(values.get(name), str) or not values[name]:
            continue
        path = Path(values[name])
        if file_at(path) if kind == "file" else directory_at(path.parent):
            continue
        message = f"{name} ({where_set(name, inventory)}) names {path}, whose directory does not exist"
        if kind == "file":
            message = f"{name} ({where_set(name, inventory)}) names {path}, which is no file of this controller"
        advice = fix.format(path=path, parent=path.parent)
        findings.append(Finding("FILE-MISSING", Severity.ERROR, subject, message, advice))
    return findings


def vaults(source: Path) -> list[Path]:
    """The encrypted files among the variables of an inventory source, which is a directory or a file in one."""
    directory = source if source.is_dir() else source.parent
    found = []
    for path in sorted([*directory.glob("group_vars/**/*"), *directory.glob("host_vars/**/*")]):
        if file_at(path):
            with path.open("rb") as stream:
                if stream.read(len(VAULT_HEADER)) == VAULT_HEADER:
                    found.append(path)
    return found


def closed_vault(path: Path) -> Finding:
    """A file that none of the given vault passwords opens."""
    return Finding(
        "VAULT-CLOSED",
        Severity.ERROR,
        str(path),
        "the vault password that was given does not open this file",
        "give its own: export ANSIBLE_VAULT_PASSWORD_FILE=FILE, or --vault-password-file FILE; without either, "
        "vault_password_file of ansible.cfg counts, which is the lab's (a lab of another clone: make lab-down lab-up)",
    )


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
                f"each host needs its own {word}: {variable} in hosts.yml",
            )
