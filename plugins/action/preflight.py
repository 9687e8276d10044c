"""Everything wrong with an inventory, in one list; decisions are those of `pivot`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

from pivot import budget, descriptions, faults, inventory, launch, launch_rules, model, nccl, pins
from pivot.findings import Finding, Severity, waive
from pivot.report import as_result

PROJECT = Path(__file__).resolve().parents[2]
# looked at besides the variables of roles
CONNECTION = ("ansible_host", "ansible_ssh_private_key_file", "ansible_ssh_common_args")


class ActionModule(ActionBase):
    """Argument: roles, those that every host of the play is going to be given. Runs once and touches nothing."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Failed when a finding is an error; the message holds those of all hosts of the play, each once."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        place = Path(variables.get("inventory_dir") or PROJECT)
        self._layers: dict[str, str] = {}
        self._memory: dict[str, str] = {}
        found = inventory.groups(variables["groups"], place)
        if variables["groups"].get(inventory.CONTAINERS):
            specs = inventory.role_specs(PROJECT / "roles")
            for host in variables["ansible_play_hosts_all"]:
                found += self._host(host, variables["hostvars"], specs)
            found += inventory.collisions(_addresses(variables["hostvars"], variables["groups"]))
        result = as_result(list(dict.fromkeys(found)), "nothing to object to")
        lines = [*self._layers.items(), *self._memory.items()]
        result["msg"] = "\n".join([*(f"{host}: {line}" for host, line in lines), result["msg"]])
        if not result["failed"]:
            said = {"layers": self._layers, "memory": self._memory}
            result["pivot_summaries"] = {
                host: {name: own[host] for name, own in said.items() if host in own} for host, _ in lines
            }
        return result

    def _host(self, subject: str, hostvars: Any, specs: Mapping[str, inventory.Options]) -> list[Finding]:
        # as the inventory says it: the task is delegated, which changes the variables of the connection
        raw = {**hostvars.raw_get(subject), "hostvars": hostvars}
        place = Path(raw.get("inventory_dir") or PROJECT)
        known = {name for options in specs.values() for name in options}
        values, problems = self._work_out(raw, {*known, *CONNECTION, "pivot_pins", "pivot_root", "pivot_waivers"})
        found = inventory.undefined(subject, problems, place)
        found += inventory.files(subject, values, place)
        if "pivot_pins" not in problems:
            found += pins.check(values.get("pivot_pins"), Path(values.get("pivot_root") or PROJECT), place)
        found += inventory.missing(subject, raw, specs, self._task.args["roles"])
        facts = raw.get("ansible_facts", {})
        named = [name for name in raw if name not in facts and not name.startswith("__")]
        found += inventory.unknown_variables(subject, named, specs, place)
        for options in specs.values():
            found += inventory.type_findings(subject, _type_errors(options, values), options, place)
        flags, environment = values.get("sglang_server_launch", {}), values.get("sglang_server_environment", {})
        if isinstance(flags, Mapping) and isinstance(environment, Mapping):
            found += launch.check(subject, flags, environment)
            found += self._engine(subject, values, flags, environment)
            found += _nccl(subject, values, flags, environment, place)
            found += self._budget(subject, values)
        return waive(subject, found, values.get("pivot_waivers"), faults.codes)

    def _budget(self, subject: str, values: Mapping[str, Any]) -> list[Finding]:
        """What fits into the memory of a card, where the inventory says how much that is."""
        plan, found = budget.deployed(subject, values, _manifest)
        if plan is None:
            return found
        self._memory[subject] = budget.line(plan)
        return budget.check(plan)

    def _engine(
        self, subject: str, values: Mapping[str, Any], flags: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> list[Finding]:
        """What the pinned engine makes of the launch settings and of the drafter."""
        version = str(values.get("sglang_engine_version"))
        try:
            engine = descriptions.load(version)
            pair = model.deployed(subject, values, _manifest)
        except descriptions.DescriptionError as error:
            fix = "describe the wheel again: python -m pivot.descriptions describe WHEEL"
            return [Finding("ENGINE-DESCRIPTION", Severity.ERROR, subject, str(error), fix)]
        settings = launch_rules.Launch(
            subject=subject,
            flags=flags,
            environment=environment,
            version=version,
            engine=engine,
            drafter=bool(values.get("sglang_server_drafter_path")),
            quantisation=model.quantisation(pair.target) if pair else "",
            capability=str(values.get("gpu_runtime_compute_capability") or "") or None,
        )
        found = launch_rules.check(settings)
        if pair:
            verdict = model.check(pair)
            self._layers[subject] = verdict.line
            found += verdict.findings
        return found

    def _work_out(self, raw: dict[str, Any], names: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Values of those that are set, and what Ansible says about those that cannot be worked out."""
        templar = self._templar.copy_with_new_env(available_variables=raw)
        values: dict[str, Any] = {}
        problems: dict[str, str] = {}
        for name in sorted(names & raw.keys()):
            try:
                values[name] = templar.template(raw[name])
            except AnsibleError as error:
                problems[name] = str(error.message)
        return values, problems


def _nccl(
    subject: str, values: Mapping[str, Any], flags: Mapping[str, Any], environment: Mapping[str, Any], place: Path
) -> list[Finding]:
    """NCCL's variables; a reason for one is a comment where the inventory sets it."""
    if not any(str(name).startswith("NCCL_") for name in environment):
        return []
    directory = place if place.is_dir() else place.parent
    files = [path for path in sorted(directory.rglob("*.y*ml")) if path.is_file()]
    lock = Path(str(values.get("sglang_engine_lock") or ""))
    settings = nccl.Settings(
        subject=subject,
        environment=environment,
        reasons=nccl.commented(path.read_text(errors="replace") for path in files),
        # a lock that is missing is found where files are looked at
        version=nccl.locked_version(lock.read_text(errors="replace")) if lock.is_file() else None,
        custom_all_reduce=not flags.get("disable-custom-all-reduce"),
    )
    return nccl.check(settings)


def _manifest(path: str) -> object:
    """A manifest as JSON, None when it cannot be read: the pins say so."""
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return None


def _type_errors(options: inventory.Options, values: Mapping[str, Any]) -> list[str]:
    own = {name: values[name] for name in options if name in values}
    # what is missing is a finding of its own
    spec = {name: {**options[name], "required": False, "default": None} for name in own}
    return list(ArgumentSpecValidator(spec).validate(own).error_messages)


def _addresses(hostvars: Any, groups: Mapping[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Address of every host of the inventory, and id of every container, also of one that --limit leaves out."""
    found: dict[str, dict[str, Any]] = {}
    for host in groups["all"]:
        found[host] = {}
        names = ["ansible_host", *(["proxmox_container_vmid"] if host in groups[inventory.CONTAINERS] else [])]
        for name in names:
            try:
                found[host][name] = hostvars[host].get(name)
            except AnsibleError:
                continue  # what it lacks is found where its own variables are looked at
    return found
