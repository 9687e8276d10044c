#!/usr/bin/python
# Copyright: Pivot contributors
# Apache License 2.0 (see LICENSE)
"""Thin adapter: arguments in, `pivot.proxmox_api.ensure`, result out. Runs on the controller."""

DOCUMENTATION = r"""
module: proxmox_container
short_description: An LXC container of a Proxmox VE cluster, with its devices, as wanted and running
description:
  - Creates, updates and starts one container through the Proxmox API, over TLS that is verified.
  - Runs on the controller with the interpreter that runs Ansible, where the C(pivot) package is installed.
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
    description: Configuration as Proxmox names it. Devices are managed as a whole, keys not named are kept.
    type: dict
    required: true
  allow_restart:
    description: Whether a running container may be restarted for changes that need it.
    type: bool
    default: false
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
restarted: {description: Whether it was, or would be, restarted., type: bool, returned: always}
findings: {description: What a person should know., type: list, elements: dict, returned: always}
"""

import yaml
from ansible.module_utils.basic import AnsibleModule

from pivot.findings import errors, render
from pivot.proxmox_api import Access, ApiError, Container, Outcome, ensure

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
    "allow_restart": {"type": "bool", "default": False},
}


def run(module: AnsibleModule) -> Outcome:
    """Connect and bring the container to what the arguments say."""
    given = module.params
    wanted = {
        key: str(int(value) if isinstance(value, bool) else value)
        for key, value in given["config"].items()
        if value is not None
    }
    subject = wanted.get("hostname", str(given["vmid"]))
    access = Access(
        host=given["api_host"],
        port=given["api_port"],
        user=given["api_user"],
        ca_path=given["api_ca"],
        password=given["api_password"],
        token_id=given["api_token_id"],
        token_secret=given["api_token_secret"],
    )
    container = Container(access.connect(subject), given["node"], given["vmid"], subject)
    return ensure(container, wanted, check=module.check_mode, allow_restart=given["allow_restart"])


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
    result = {
        "changed": outcome.changed,
        "vmid": module.params["vmid"],
        "created": outcome.created,
        "started": outcome.started,
        "restarted": outcome.restarted,
        "findings": [finding.as_dict() for finding in outcome.findings],
        "diff": {
            "before": yaml.safe_dump(outcome.before) if outcome.before else "",
            "after": yaml.safe_dump(outcome.after) if outcome.after else "",
        },
    }
    if errors(outcome.findings):
        module.fail_json(msg=render(outcome.findings))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
