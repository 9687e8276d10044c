"""What an inventory says, before anything is touched: names that no role knows, wrong types, hosts that collide."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pivot.bundles.redact import Redactor
from pivot.findings import Finding, Severity
from pivot.places import directory_at, file_at

Options = Mapping[str, Mapping[str, Any]]
VAULT_HEADER = b"$ANSIBLE_VAULT"
# the groups that playbooks name
CONTAINERS, NODES = "inference", "proxmox"
# what names a container's node as ssh reaches it, the first that is set
NODE_NAMES = ("proxmox_container_node_host", "proxmox_container_node")
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

# what takes a secret of the vault
SECRETS = {"proxmox_container_api_password": "vault_proxmox_password", "sglang_server_api_key": "vault_sglang_api_key"}
# how the vault of an inventory is given, and what Ansible's parsers take otherwise than it is meant
VAULT_FIX = (
    "give its own: export ANSIBLE_VAULT_PASSWORD_FILE=FILE, or --vault-password-file FILE; without either, "
    "vault_password_file of ansible.cfg counts, which is the lab's (a lab of another clone: make lab-down lab-up)"
)
QUOTES_FIX = (
    "ansible-vault edit it, and write its values in single quotes ('' for one inside), those with {{, {% or {# with "
    "!unsafe before the quotes"
)
CLOSED = "the vault password that was given does not open "
TEMPLATE = "this is taken for an expression, and is none: "
# what is right for a type that the specs name, and how it is written
RIGHT = {
    "int": ("whole number", "write a whole number, without quotes or a unit"),
    "float": ("number", "write a number, without quotes or a unit"),
    "bool": ("boolean", "write true or false"),
    "list": ("list", "write a list: [a, b], or a line with - for each"),
    "dict": ("mapping", "write a mapping: {name: value}, or a line for each"),
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
    else:
        findings += _misspelt_groups(members, inventory)
    for host in sorted(stray):
        message = f"the host {host} ({where_set(host, inventory)}) is in no group, so nothing would be done with it"
        fix = f"put it under {CONTAINERS} (containers) or {NODES} (nodes), or remove it"
        findings.append(Finding("HOST-UNGROUPED", Severity.ERROR, "the inventory", message, fix))
    return findings


def _misspelt_groups(members: Mapping[str, Sequence[str]], inventory: Path) -> Iterator[Finding]:
    """Groups beside the right ones that no play names, with hosts that are in no other."""
    ours = {host for group in (CONTAINERS, NODES) for host in members.get(group, ())}
    for group in sorted(members.keys() - {"all", "ungrouped", CONTAINERS, NODES}):
        close = difflib.get_close_matches(group, (CONTAINERS, NODES), n=1, cutoff=0.8)
        lost = [host for host in members[group] if host not in ours]
        if close and lost:
            place = f"{group} ({where_set(group, inventory)})"
            message = f"{', '.join(lost)}: in the group {place}, which no playbook names"
            yield Finding("HOST-UNGROUPED", Severity.ERROR, "the inventory", message, f"did you mean {close[0]}?")


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
            what = _plainly(" ".join(text.split()))
            causes.setdefault(("VAR-EXPRESSION", what), {}).setdefault(what, set()).add(name)
    findings = []
    for (code, fix), group in sorted(causes.items()):
        names = sorted({name for own in group.values() for name in own})
        users = _some([f"{name} ({where_set(name, inventory)})" for name in names])
        if code == "VAR-UNDEFINED":
            message, advice = f"not set: {_some(sorted(group))}; needed by {users}", fix
        else:
            message, advice = f"{users} cannot be worked out: {fix}", _how_to_correct(fix)
        findings.append(Finding(code, Severity.ERROR, subject, message, advice))
    return findings


def _how_to_correct(said: str) -> str:
    """What helps against a variable that cannot be worked out."""
    if said.startswith(CLOSED):
        return VAULT_FIX
    if said.startswith(TEMPLATE):
        name = said.removeprefix(TEMPLATE)
        return (
            f"write {name}: !unsafe 'VALUE', in single quotes ('' for one inside); in an encrypted file with "
            "ansible-vault edit; where it is meant to be an expression, correct that"
        )
    return "correct the expression there, or what it reads"


def _plainly(text: str) -> str:
    """What Ansible says, where that is only a piece of the expression."""
    match = re.fullmatch(r"hostvars\[['\"](.+)['\"]\]", text)
    return f"there is no host {match[1]} in the inventory" if match else text


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
        for role, name, option in _required(specs, roles)
        if name not in given
    ]


def nulls(
    subject: str, values: Mapping[str, Any], specs: Mapping[str, Options], roles: Iterable[str], inventory: Path
) -> list[Finding]:
    """Required variables that are set and have no value."""
    return [
        Finding(
            "VAR-MISSING",
            Severity.ERROR,
            subject,
            f"{name} ({where_set(name, inventory)}) is null, and the role {role} cannot work without it",
            f"write its value there: {option.get('description', 'see roles/' + role)}",
        )
        for role, name, option in _required(specs, roles)
        if name in values and values[name] is None
    ]


def _required(specs: Mapping[str, Options], roles: Iterable[str]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Role, name and option of every variable without which one of the roles cannot work."""
    for role in roles:
        for name, option in sorted(specs.get(role, {}).items()):
            if option.get("required"):
                yield role, name, option


def empty_secrets(subject: str, given: Iterable[str], values: Mapping[str, Any]) -> list[Finding]:
    """Secrets whose name stands in the vault without a value, as the example's list of names has them."""
    names = set(given)
    return [
        Finding(
            "VAR-EMPTY",
            Severity.ERROR,
            subject,
            f"{vault} is empty, so {name} would be",
            "ansible-vault edit group_vars/all/vault.yml of the inventory, and write the value",
        )
        for name, vault in SECRETS.items()
        if vault in names and name in values and values[name] in (None, "")
    ]


def login(subject: str, values: Mapping[str, Any], inventory: Path) -> list[Finding]:
    """Roles work as root, over ssh as root: become would reach tasks of the controller too, and rsync has none."""
    findings = []
    user, become = values.get("ansible_user"), values.get("ansible_become")
    if user not in (None, "", "root"):
        message = f"ansible_user ({where_set('ansible_user', inventory)}) is {user}, and the roles log in as root"
        fix = "write ansible_user: root, with the key that the container was given"
        findings.append(Finding("VAR-LOGIN", Severity.ERROR, subject, message, fix))
    if str(become).lower() in ("true", "yes", "on", "1", "y", "t"):
        message = (
            f"ansible_become ({where_set('ansible_become', inventory)}) is set, which tasks on the controller get too"
        )
        fix = "remove it, and write ansible_user: root"
        findings.append(Finding("VAR-LOGIN", Severity.ERROR, subject, message, fix))
    return findings


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


def broken(source: Path) -> list[Finding]:
    """YAML files of an inventory source that cannot be read at all, each with the place of its first fault."""
    directory = source if source.is_dir() else source.parent
    paths = [*directory.glob("group_vars/**/*"), *directory.glob("host_vars/**/*")]
    paths += [*directory.glob("*")] if source.is_dir() else [source]
    found = []
    for path in sorted(item for item in paths if item.suffix in (".yml", ".yaml") and file_at(item)):
        try:
            for _ in yaml.parse(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
                pass
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            found.append(_broken(path, error))
    return found


def _broken(path: Path, error: Exception) -> Finding:
    mark, what, line = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error), ""
    if mark is not None:
        line = f":{mark.line + 1}"
        begun = getattr(error, "context_mark", None)
        what += f" ({getattr(error, 'context', None)}, line {begun.line + 1})" if begun else ""
    fix = "correct that line or the one above it: quotes, colons, indentation"
    if "\\t" in what:
        fix = "write spaces instead of the tab"
    return Finding("FILE-YAML", Severity.ERROR, f"{path}{line}", f"this is no YAML: {' '.join(what.split())}", fix)


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


def unread_vault(path: Path, state: str) -> list[Finding]:
    """What is the matter with an encrypted file. state: ``read``; ``closed`` where no given password opens it;
    ``broken`` where its text is no YAML. What a parser says of that would be a piece of a secret."""
    if state == "closed":
        message = "the vault password that was given does not open this file"
        return [Finding("VAULT-CLOSED", Severity.ERROR, str(path), message, VAULT_FIX)]
    if state == "broken":
        return [Finding("FILE-YAML", Severity.ERROR, str(path), "its decrypted text is no YAML", QUOTES_FIX)]
    return []


def unknown_variables(
    subject: str, variables: Iterable[str], specs: Mapping[str, Options], inventory: Path
) -> list[Finding]:
    """Variables with a role's prefix, or nearly so, that the role does not know; one would be ignored silently."""
    known = [name for options in specs.values() for name in options]
    findings = []
    for name in sorted(variables):
        owners = [role for role in specs if name.startswith(f"{role}_")]
        if any(name in specs[role] for role in owners):
            continue
        if owners:
            role = max(owners, key=len)
            # the prefix is common to all, so only what follows it can tell them apart
            rest = [option.removeprefix(f"{role}_") for option in specs[role]]
            close = difflib.get_close_matches(name.removeprefix(f"{role}_"), rest, n=1)
            what = f"no variable of the role {role}"
            fix = f"did you mean {role}_{close[0]}?" if close else f"see roles/{role}/meta/argument_specs.yml"
        elif meant := _nearly(name, known):
            what, fix = "no variable of any role, so nothing would read it", f"did you mean {meant}?"
        else:
            continue
        message = f"{name} ({where_set(name, inventory)}) is {what}"
        findings.append(Finding("VAR-UNKNOWN", Severity.ERROR, subject, message, fix))
    return findings


def _nearly(name: str, known: Sequence[str]) -> str:
    """The variable of a role that a name without a role's prefix is a slip for, empty when it is a name of its own."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.93)
    return close[0] if close else ""


def type_findings(
    subject: str, messages: Iterable[str], options: Options, inventory: Path, values: Mapping[str, Any]
) -> list[Finding]:
    """What Ansible's own validator says about a role's arguments, with the place where each was set."""
    findings = []
    for message in map(Redactor().text, messages):
        name = next((word for word in re.findall(r"\w+", message) if word in options), None)
        place = f" (set in {where_set(name, inventory)})" if name else ""
        text, fix = message, "give it the type or one of the values that the message names" if name else "set it"
        if name and f"argument '{name}'" in message and options[name].get("type") in RIGHT:
            what, fix = RIGHT[options[name]["type"]]
            text = f"{name} is {_given(values.get(name), options[name])}, which is no {what}"
        findings.append(Finding("VAR-TYPE", Severity.ERROR, subject, f"{text}{place}", fix))
    return findings


def _given(value: object, option: Mapping[str, Any]) -> str:
    """A value of the wrong type, as far as it may be shown: what was to be a list or a mapping may hold secrets."""
    if option.get("no_log"):
        return "what it is"
    if option["type"] in ("list", "dict"):
        kinds = {str: "a text", list: "a list", dict: "a mapping"}
        return next((words for kind, words in kinds.items() if isinstance(value, kind)), "a single value")
    return Redactor().text(f"{value!r:.60}")


def absent_nodes(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Nodes of containers that the inventory does not have: ssh would try the bare name, without any of its settings.

    hosts: variables of every host; proxmox_container_node_host is looked at, or proxmox_container_node without it.
    """
    for host, values in sorted(hosts.items()):
        name = next((key for key in NODE_NAMES if values.get(key)), None)
        if name is None or str(values[name]) in hosts:
            continue
        close = difflib.get_close_matches(str(values[name]), [*hosts.keys() - {host}], n=1)
        message = f"{name} is {values[name]}, which is no host of this inventory"
        fix = f"did you mean {close[0]}?" if close else f"add it to the group {NODES} with its address, or correct it"
        yield Finding("HOST-NODE", Severity.ERROR, host, message, fix)


def collisions(hosts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Two hosts with one container id or one address.

    hosts: variables per host; proxmox_container_vmid and ansible_host are looked at.
    """
    return [*_shared(hosts, "proxmox_container_vmid", "vmid"), *_shared(hosts, "ansible_host", "address")]


def _same(value: object) -> str:
    """A value so that two spellings of one number, name or address (2001:DB8::1, 2001:db8:0::1) are equal."""
    text = str(value).strip().lower()
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


def _shared(hosts: Mapping[str, Mapping[str, Any]], variable: str, word: str) -> Iterator[Finding]:
    owners: dict[str, list[str]] = {}
    for host in sorted(hosts):
        value = hosts[host].get(variable)
        if value is not None:
            owners.setdefault(_same(value), []).append(host)
    for value, names in sorted(owners.items()):
        if len(names) > 1:
            yield Finding(
                "HOST-COLLISION",
                Severity.ERROR,
                ", ".join(names),
                f"the {word} {value} is given to {len(names)} hosts ({variable})",
                f"each host needs its own {word}: {variable} in hosts.yml",
            )
