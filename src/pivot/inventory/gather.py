"""What an inventory says of its hosts, worked out by Ansible itself: the only module here that imports it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.cli import CLI
from ansible.errors import AnsibleError
from ansible.inventory.manager import InventoryManager
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import AnsibleVaultError, EncryptedString
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar
from ansible.utils.context_objects import CLIArgs
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager

from pivot.findings import Finding
from pivot.inventory import check, devices, inventory, nodes
from pivot.inventory.check import Host, Report, Whole

Engine = Callable[[dict[str, Any]], Any]
"""Ansible's templar for the given variables."""


def host(name: str, hostvars: Any, engine: Engine, names: set[str], project: Path) -> Host:
    """One host as the inventory says it; a task's own variables do not count.

    hostvars: Ansible's; names: the variables to work out; project: the place of a host without an inventory.
    """
    raw = {**hostvars.raw_get(name), "hostvars": hostvars}
    values, problems = _work_out(engine(raw), raw, names)
    facts = raw.get("ansible_facts", {})
    return Host(
        name=name,
        given=frozenset(key for key in raw if key not in facts and not key.startswith("__")),
        values=values,
        problems=problems,
        place=Path(raw.get("inventory_dir") or project),
    )


def whole(hostvars: Any, groups: Mapping[str, list[str]], engine: Engine, place: Path) -> Whole:
    """What concerns several hosts: all addresses and waivers, also of hosts that a run leaves out."""
    addresses: dict[str, Mapping[str, Any]] = {}
    waivers: dict[str, object] = {}
    for name in groups["all"]:
        raw = {**hostvars.raw_get(name), "hostvars": hostvars}
        names = {"ansible_host"} | (
            {"proxmox_container_vmid", *devices.VARIABLES, *nodes.VARIABLES}
            if name in groups.get(inventory.CONTAINERS, [])
            else set()
        )
        # what cannot be worked out is found where the host's own variables are looked at
        values, _ = _work_out(engine(raw), raw, {*names, "pivot_waivers"})
        waivers[name] = values.pop("pivot_waivers", None)
        addresses[name] = values
    return Whole(groups, addresses, waivers, place)


def validate(options: inventory.Options, values: Mapping[str, Any]) -> list[str]:
    """What Ansible's own validator says about the values of one role's options."""
    own = {name: values[name] for name in options if name in values}
    # what is missing is a finding of its own
    spec = {name: {**options[name], "required": False, "default": None} for name in own}
    # the validator makes a list or a mapping of a text, but the role gets the text
    texts = [
        name
        for name in own
        if options[name].get("type") in ("list", "dict") and isinstance(own[name], str) and own[name]
    ]
    said = [f"argument '{name}' is a text, not a {options[name]['type']}" for name in texts]
    others = {name: value for name, value in own.items() if name not in texts}
    validator = ArgumentSpecValidator({name: spec[name] for name in others})
    return [*said, *validator.validate(others).error_messages]


def _work_out(templar: Any, raw: Mapping[str, Any], names: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of those that are set, and what Ansible says about those that cannot be worked out."""
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name in sorted(names & raw.keys()):
        try:
            values[name] = templar.template(raw[name])
        except AnsibleError as error:
            problems[name] = next(_wrong_secrets(templar, raw, name), _said(error))
    return values, problems


def _said(error: AnsibleError) -> str:
    """What Ansible says, in words that lead to the fix."""
    text = str(error.message)
    return f"{inventory.CLOSED}a value that is encrypted by itself" if "undecryptable" in text else text


def _wrong_secrets(templar: Any, raw: Mapping[str, Any], name: str) -> Iterator[str]:
    """What is the matter with the secrets that a variable reads; what Ansible says of them may be a piece of one."""
    for each in sorted(_read(raw, name)):
        if not each.startswith("vault_") and not isinstance(raw[each], EncryptedString):
            continue
        try:
            templar.template(raw[each])
        except AnsibleError as error:
            if "undecryptable" in str(error.message):
                yield inventory.CLOSED + each
            elif not re.search(r"'(vault|lab)_\w+' is undefined", str(error.message)):
                yield inventory.TEMPLATE + each


def _read(raw: Mapping[str, Any], name: str) -> set[str]:
    """A variable, those that its expression names, and theirs."""
    seen, todo = {name}, [name]
    while todo:
        value = raw[todo.pop()]
        words = re.findall(r"\w+", repr(value)) if isinstance(value, (str, list, dict)) else ()
        fresh = raw.keys() & set(words) - seen
        seen |= fresh
        todo += fresh
    return seen


class Source:
    """An inventory that is read outside of a play. AnsibleError when Ansible cannot read it."""

    def __init__(self, source: Path, extra_vars: Sequence[str] = (), passwords: Sequence[str] = ()) -> None:
        self._source = source
        context.CLIARGS = CLIArgs({"extra_vars": tuple(extra_vars)})
        init_plugin_loader()
        self._loader = DataLoader()
        secrets = CLI.setup_vault_secrets(
            self._loader, constants.DEFAULT_VAULT_IDENTITY_LIST, list(passwords), auto_prompt=False
        )
        self._loader.set_vault_secrets(secrets)
        manager = InventoryManager(loader=self._loader, sources=[str(source)])
        variables = VariableManager(loader=self._loader, inventory=manager)
        self._hostvars = HostVars(inventory=manager, variable_manager=variables, loader=self._loader)
        self.groups: dict[str, list[str]] = manager.get_groups_dict()

    def unread_vaults(self) -> list[Finding]:
        """The encrypted files that the given passwords do not open, and those whose text is no YAML."""
        vaults = inventory.vaults(self._source)
        return [finding for path in vaults for finding in inventory.unread_vault(path, self._state(path))]

    def _state(self, vault: Path) -> str:
        """As `inventory.unread_vault` calls it."""
        try:
            self._loader.load_from_file(str(vault), cache="all", unsafe=True, trusted_as_template=True)
        except AnsibleVaultError:
            return "closed"
        except AnsibleError:
            return "broken"
        return "read"

    def check(self, project: Path, hosts: Sequence[str]) -> Report:
        """What preflight says of these hosts. project: the directory that holds the roles."""
        specs = inventory.role_specs(project / "roles")
        names = check.names(specs)
        place = self._source if self._source.is_dir() else self._source.parent
        return check.run(
            (host(name, self._hostvars, self._engine, names, project) for name in hosts),
            whole(self._hostvars, self.groups, self._engine, place.resolve()),
            specs,
            project,
            validate,
        )

    def _engine(self, variables: dict[str, Any]) -> Any:
        return Templar(loader=self._loader, variables=variables)
