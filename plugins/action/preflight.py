"""Everything wrong with an inventory, in one list; decisions are those of `pivot.inventory.check`."""

from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

from pivot.inventory import check, gather, inventory
from pivot.report import as_result

PROJECT = Path(__file__).resolve().parents[2]


class ActionModule(ActionBase):
    """Argument: roles, those that every host of the play is going to be given. Runs once and touches nothing."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Failed when a finding is an error; the message holds those of all hosts of the play, each once."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        hostvars, groups = variables["hostvars"], variables["groups"]
        specs = inventory.role_specs(PROJECT / "roles")
        # the task is delegated, which changes the variables of the connection: they are taken as the inventory says
        named = variables["ansible_play_hosts_all"] if groups.get(inventory.CONTAINERS) else []
        names = check.names(specs)
        hosts = (gather.host(name, hostvars, self._engine, names, PROJECT) for name in named)
        place = Path(variables.get("inventory_dir") or PROJECT)
        whole = gather.whole(hostvars, groups, self._engine, place)
        report = check.run(hosts, whole, specs, PROJECT, gather.validate, self._task.args["roles"])
        result = as_result(report.findings, "nothing to object to", report.lines())
        return result if report.failed else {**result, "pivot_summaries": report.summaries()}

    def _engine(self, variables: dict[str, Any]) -> Any:
        return self._templar.copy_with_new_env(available_variables=variables)
