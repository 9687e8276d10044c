#!/usr/bin/python
# Copyright: Pivot contributors
# Apache License 2.0 (see LICENSE)
"""Thin adapter: arguments in, `pivot.pve.proxmox_ensure.ensure`, result out. Runs on the controller."""

DOCUMENTATION = r"""
module: proxmox_container
short_description: An LXC container of a Proxmox VE cluster, with its devices, as wanted and running
description:
  - Creates, updates, starts, stops or removes one container through the Proxmox API, over TLS that is verified.
  - Runs on the controller with the interpreter that runs Ansible, where the C(pivot) package is installed.
  - Compares key by key and sub-key by sub-key, sends one change with what differs, and looks at what exists before
    anything is sent again after a lost answer.
  - For Proxmox VE 8.2 to 9.x, with a warning for others. Refusals and the spelling of values were recorded from 9.2.11
    alone; for 8.2 to 9.1 they are taken from the sources.
author: Pivot contributors
options:
  api_host: {description: Host of the API., type: str, required: true}
  api_port: {description: Port of the API., type: int, default: 8006}
  api_user: {description: Account with its realm., type: str, required: true}
  api_password: {description: Password. Only root@pam with a password may pass devices through., type: str}
  api_token_id: {description: Name of an API token of that account., type: str}
  api_token_secret: {description: Secret of the token., type: str}
  api_ca: {description: File with the authority that signed the API's certificate., type: path}
  node: {description: Node that holds the container., type: str, required: true}
  vmid: {description: Id of the container., type: int, required: true}
  config:
    description:
      - Configuration as Proxmox names it; C(hostname), and for creation C(ostemplate) and C(rootfs), included.
      - Devices are managed as a whole, other keys that are not named are kept.
    type: dict
    required: true
  lxc:
    description:
      - Raw lines of C(lxc.*), one key and value each, which shall stand in the container's file.
      - The API shows and never sets them; what differs is returned in C(raw), for the node, and the module is called
        again afterwards. A line takes the place of another of its key, except of keys that may stand several times.
        Lines that are not named are kept.
    type: list
    elements: dict
    default: []
  remove:
    description: Keys that shall not be there; also keys, or whole lines, of C(lxc.*).
    type: list
    elements: str
    default: []
  state:
    description:
      - C(present) makes it as wanted and leaves its power alone.
      - C(absent) destroys it with its volumes, and needs I(confirm).
    type: str
    choices: [present, started, stopped, restarted, absent]
    default: started
  allow_restart:
    description: Whether a running container may be restarted for changes that need it.
    type: bool
    default: false
  root_via:
    description:
      - Who sets what Proxmox leaves to root@pam (devices, features other than nesting, bind mounts, hook script) when
        the session is not root@pam with a password.
      - With C(pct) it is left out here and returned in C(deferred), for C(pct set) on the node; the module is called
        again afterwards. With C(ticket) it is refused, before anything is sent.
    type: str
    choices: [pct, ticket]
    default: pct
  power_only:
    description: Only bring it to its state, whatever its configuration is; for the call after C(pct).
    type: bool
    default: false
  confirm: {description: "For state absent: vmid and hostname, separated by a space.", type: str, default: ""}
  shutdown_seconds: {description: Seconds that a container gets to shut down., type: int, default: 240}
  task_seconds: {description: Seconds until a task of the node counts as endless., type: int, default: 600}
"""

EXAMPLES = r"""
- name: The inference container
  proxmox_container:
    api_host: pve1.example.org
    api_user: root@pam
    api_password: "{{ vault_proxmox_password }}"
    node: pve1
    vmid: 9001
    config: {hostname: llm01, ostemplate: "local:vztmpl/ubuntu-24.04.tar.zst", rootfs: "fast:200", memory: 786432}
"""

RETURN = r"""
vmid: {description: Id of the container., type: int, returned: always}
created: {description: Whether it was, or in check mode would be, created., type: bool, returned: always}
started: {description: Whether it was, or would be, started., type: bool, returned: always}
stopped: {description: Whether it was, or would be, stopped., type: bool, returned: always}
restarted: {description: Whether it was, or would be, restarted., type: bool, returned: always}
removed: {description: Whether it was, or would be, destroyed., type: bool, returned: always}
reachable:
  description:
    - Whether it runs when all is done, also what C(deferred) and C(raw) leave to the node and to the call after them.
    - In check mode, which creates and starts nothing, whether it runs now as well.
  type: bool
  returned: always
deferred:
  description: Arguments of C(pct set) for what only root may set, empty when nothing is left to it.
  type: list
  elements: str
  returned: always
raw:
  description: Raw lines to C(remove) from the container's file and to C(add) to it, pairs of key and value.
  type: dict
  returned: always
findings: {description: What a person should know., type: list, elements: dict, returned: always}
"""

import yaml
from ansible.module_utils.basic import AnsibleModule

from pivot.findings import Finding, Severity, render
from pivot.pve.proxmox import pct_arguments
from pivot.pve.proxmox_api import Access, ApiError, Container, Session
from pivot.pve.proxmox_ensure import ROOT_VIA, STATES, Outcome, Request, ensure
from pivot.pve.proxmox_raw import parsed

ARGUMENTS = {
    "api_host": {"type": "str", "required": True},
    "api_port": {"type": "int", "default": 8006},
    "api_user": {"type": "str", "required": True},
    "api_password": {"type": "str", "no_log": True},
    "api_token_id": {"type": "str", "no_log": False},
    "api_token_secret": {"type": "str", "no_log": True},
    "api_ca": {"type": "path"},
    "node": {"type": "str", "required": True},
    "vmid": {"type": "int", "required": True},
    "config": {"type": "dict", "required": True},
    "lxc": {"type": "list", "elements": "dict", "default": []},
    "remove": {"type": "list", "elements": "str", "default": []},
    "state": {"type": "str", "choices": list(STATES), "default": "started"},
    "allow_restart": {"type": "bool", "default": False},
    "root_via": {"type": "str", "choices": list(ROOT_VIA), "default": "pct"},
    "power_only": {"type": "bool", "default": False},
    "confirm": {"type": "str", "default": ""},
    "shutdown_seconds": {"type": "int", "default": 240},
    "task_seconds": {"type": "int", "default": 600},
}


def run(module: AnsibleModule) -> Outcome:
    """Connect and bring the container to what the arguments say."""
    given = module.params
    if given["config"].get("password"):  # of the container's root
        module.no_log_values.add(str(given["config"]["password"]))
    wanted = {
        key: str(int(value) if isinstance(value, bool) else value)
        for key, value in given["config"].items()
        if value is not None
    }
    access = Access(
        host=given["api_host"],
        port=given["api_port"],
        user=given["api_user"],
        ca_path=given["api_ca"],
        password=given["api_password"],
        token_id=given["api_token_id"],
        token_secret=given["api_token_secret"],
    )
    session = Session(access, wanted.get("hostname", str(given["vmid"])))
    container = Container(session, given["node"], given["vmid"])
    container.task_seconds = given["task_seconds"]
    request = Request(
        wanted=wanted,
        raw=parsed(given["lxc"]),
        state=given["state"],
        remove=tuple(given["remove"]),
        allow_restart=given["allow_restart"],
        root_via=given["root_via"],
        is_root=access.is_root,
        power_only=given["power_only"],
        confirm=given["confirm"],
        shutdown_seconds=given["shutdown_seconds"],
    )
    return ensure(container, request, check=module.check_mode)


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        ARGUMENTS,
        supports_check_mode=True,
        required_one_of=[("api_password", "api_token_id")],
        required_together=[("api_token_id", "api_token_secret")],
        mutually_exclusive=[("api_password", "api_token_id")],
    )
    try:
        outcome = run(module)
    except ApiError as error:
        module.fail_json(msg=render([error.finding]))
    if outcome.refused:
        module.fail_json(msg=render(outcome.findings))
    for finding in outcome.findings:
        say(module, finding)
    module.exit_json(
        changed=outcome.changed,
        vmid=module.params["vmid"],
        created=outcome.created,
        started=outcome.started,
        stopped=outcome.stopped,
        restarted=outcome.restarted,
        removed=outcome.removed,
        reachable=outcome.reachable(check=module.check_mode),
        deferred=pct_arguments(outcome.deferred, outcome.digest) if outcome.deferred else [],
        raw=outcome.raw.as_dict() if outcome.raw.changes else {},
        findings=[finding.as_dict() for finding in outcome.findings],
        diff={
            "before": yaml.safe_dump(outcome.before) if outcome.before else "",
            "after": yaml.safe_dump(outcome.after) if outcome.after else "",
        },
    )


def say(module: AnsibleModule, finding: Finding) -> None:
    """Show what is no error; what needs no action is only returned."""
    if finding.severity is Severity.WARNING:
        module.warn(render([finding]))


if __name__ == "__main__":
    main()
