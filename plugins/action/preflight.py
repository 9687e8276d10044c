"""Everything wrong with a host's settings, in one list; decisions are those of `pivot`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

from pivot import inventory, launch, pins
from pivot.findings import Finding
from pivot.report import as_result


class ActionModule(ActionBase):
    """Arguments: pins, root, inventory, launch, environment. Runs on the controller and touches nothing."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Failed when a finding is an error; the message holds all of them."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        given, subject = self._task.args, variables["inventory_hostname"]
        root, place = Path(given["root"]), Path(given["inventory"])
        specs = inventory.role_specs(root / "roles")
        found = [
            *pins.check(given["pins"], root, place),
            *inventory.unknown_variables(subject, self._inventory_names(variables), specs, place),
            *self._types(subject, specs, variables, place),
            *launch.check(subject, given["launch"], given["environment"]),
            *inventory.collisions(self._hosts(variables)),
        ]
        return as_result(found, "nothing to object to")

    def _inventory_names(self, variables: Mapping[str, Any]) -> list[str]:
        facts = variables.get("vars", {}).get("ansible_facts", {})
        return [name for name in variables if name not in facts and not name.startswith("__")]

    def _types(
        self, subject: str, specs: Mapping[str, inventory.Options], variables: Mapping[str, Any], place: Path
    ) -> list[Finding]:
        found: list[Finding] = []
        for options in specs.values():
            values, messages = {}, []
            for name in options.keys() & variables.keys():
                try:
                    values[name] = self._templar.template(variables[name])
                except AnsibleError as error:
                    messages.append(f"{name} cannot be worked out: {error.message}")
            # what is missing is reported by the role that needs it: not every host is given every role
            given = {name: {**options[name], "required": False, "default": None} for name in values}
            messages += ArgumentSpecValidator(given).validate(values).error_messages
            found += inventory.type_findings(subject, messages, options, place)
        return found

    def _hosts(self, variables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        hosts = {}
        for host in variables["groups"].get("inference", []):
            own = variables["hostvars"][host]
            hosts[host] = {name: own.get(name) for name in ("proxmox_container_vmid", "ansible_host")}
        return hosts
