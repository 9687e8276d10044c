"""The scenario's container through the API of the lab: `guest.py destroy|stop|create`; prints what it did.

create makes it and does not start it: what a run leaves that was killed between the two.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from pivot.pve.proxmox_api import Access, ApiError

ROOT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
LAB = ROOT / "inventory/lab/group_vars/all/lab.yml"
VMID, NAME = 190, "molecule-190"


def wait(node: Any, upid: str) -> None:
    """Wait for a task of the node; a failed one ends the program with its status."""
    while (status := node.tasks(upid).status.get())["status"] != "stopped":
        time.sleep(0.2)
    if not status["exitstatus"].startswith(("OK", "WARNINGS")):
        sys.exit(f"{status['type']}: {status['exitstatus']}")


def wanted(lab: dict[str, Any]) -> dict[str, Any]:
    """What the role would ask for, apart from its defaults."""
    address = lab["lab_gateway"].rsplit(".", 1)[0] + ".90"
    return {
        "vmid": VMID,
        "hostname": NAME,
        "ostemplate": lab["lab_template"],
        "rootfs": "ct:4",
        "memory": 512,
        "net0": f"name=eth0,bridge={lab['lab_bridge']},ip={address}/24",
        "unprivileged": 1,
        "features": "nesting=1",
        "ssh-public-keys": lab["lab_ssh_public_key"],
    }


def act(verb: str, lab: dict[str, Any]) -> str:
    """Carry out one verb."""
    secret = json.loads((ROOT / ".lab/secrets.json").read_text())["vault_proxmox_password"]
    access = Access(lab["lab_api_host"], lab["lab_api_port"], "root@pam", lab["lab_api_ca"], password=secret)
    node = access.connect(NAME).nodes("pve1")
    if verb == "create":
        wait(node, node.lxc.post(**wanted(lab)))
        return "created"
    guest = next((item for item in node.lxc.get() if int(item["vmid"]) == VMID), None)
    if guest is None:
        return "there is none"
    if guest["name"] != NAME:
        sys.exit(f"vmid {VMID} is {guest['name']}: not this scenario's, left alone")
    if guest["status"] == "running":
        wait(node, node.lxc(VMID).status.stop.post())
    if verb == "destroy":
        wait(node, node.lxc(VMID).delete())
    return verb


def main() -> None:
    """Entry point."""
    if not LAB.exists():
        print("there is no lab, so no container of it")
        return
    try:
        print(act(sys.argv[1], yaml.safe_load(LAB.read_text())))
    except ApiError as error:
        if sys.argv[1] != "destroy" or error.finding.code != "PVE-UNREACHABLE":
            raise
        print("the lab's API does not answer: its containers go with `pivot-lab down`")


main()
