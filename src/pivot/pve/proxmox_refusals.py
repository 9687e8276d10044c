"""What the Proxmox API's refusals and failed tasks mean for the person who runs the play.

Every refusal of the recordings (Proxmox VE 9.2.11, ``lab/tests/data``) has its sentence; nothing that was sent is ever
repeated in one, so that no secret can be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pivot.findings import Finding, Severity

# configuration keys as Proxmox names them → the role's variable, where it is not proxmox_container_<key>
VARIABLES = {
    "ostemplate": "proxmox_container_template",
    "ssh-public-keys": "proxmox_container_ssh_public_keys",
    "rootfs": "proxmox_container_rootfs_gib",
    "tokenid": "proxmox_container_api_token_id",
}
_FAMILY_VARIABLES = {"dev": "proxmox_container_devices", "mp": "proxmox_container_mounts"}
# what a person may do about it when the same call may well succeed in a moment
TRANSIENT = re.compile(
    r"^(?:50[234]|59[5-9])\b"
    r"|can't lock file .* got timeout|cfs-lock .* error: got lock request timeout|cluster not ready - no quorum"
    r"|^500 got timeout$|CT is locked|VM is locked|connection timed out|Connection refused|temporarily unavailable"
)


def explain(subject: str, status: int, reason: str, errors: Mapping[str, str] | None = None) -> Finding:
    """A refused call as one finding. status: the HTTP status; reason: its text; errors: parameter → what is wrong."""
    text = _plain(reason)
    details = "; ".join(_parameter(key, str(value)) for key, value in sorted((errors or {}).items()))
    whole = f"{status} {text} {details}".rstrip()
    for pattern, code, message, fix in _KNOWN:
        if re.search(pattern, whole):
            said = message.format(text=text, details=details, said=details or text)
            return Finding(code, Severity.ERROR, subject, said, fix)
    if errors:
        names = ", ".join(dict.fromkeys(variable(key) for key in sorted(errors)))
        message = f"Proxmox does not take these values: {details}"
        return Finding("PVE-PARAMETER", Severity.ERROR, subject, message, f"correct {names} in the inventory")
    message = f"Proxmox answered {status}: {text}"
    return Finding("PVE-REFUSED", Severity.ERROR, subject, message, "see the message")


def task_failed(subject: str, kind: str, result: str, log: Sequence[str]) -> Finding:
    """A failed task as one finding. kind: as Proxmox names it (vzcreate); result: exit status; log: its lines, of which
    the last and the one that says why are shown."""
    text, lines = f"{kind} failed: {_plain(result)}", [_plain(line) for line in log]
    tail = [line for line in lines[-4:] if line and line != _plain(result)]
    for pattern, code, message, fix in _KNOWN_OF_TASKS:
        why = next((line for line in (text, *lines) if re.search(pattern, line)), None)
        if why:
            shown = [*([] if why in (text, *tail) else [why]), *tail]
            return Finding(code, Severity.ERROR, subject, message.format(text=_with(text, shown)), fix)
    fix = "see the task's whole log on the node"
    return Finding("PVE-TASK-FAILED", Severity.ERROR, subject, _with(text, tail), fix)


def _with(text: str, lines: Sequence[str]) -> str:
    return f"{text} ({' | '.join(lines)})" if lines else text


def transient(status: int, reason: str) -> bool:
    """Whether the same call may succeed in a moment: locks, a proxy without its node, no quorum. Never 400 and 403."""
    return status not in (400, 401, 403) and bool(TRANSIENT.search(f"{status} {_plain(reason)}"))


def variable(key: str) -> str:
    """The role's variable behind a configuration key: ``dev3`` → proxmox_container_devices."""
    family = key.rstrip("0123456789")
    return VARIABLES.get(key) or _FAMILY_VARIABLES.get(family) or f"proxmox_container_{key.replace('-', '_')}"


def _plain(text: str) -> str:
    return " ".join(str(text).split())


def _parameter(key: str, text: str) -> str:
    """``dev0`` and Proxmox's nested words → ``dev0.mode: value does not match the regex pattern``."""
    words = _plain(re.sub(r"invalid format - (format error\n)?", "", text))
    return words if words.startswith(f"{key}.") else f"{key}: {words}"


_FULL = (
    r"(?i)no space left|not enough free space|out of space|insufficient free space|quota exceeded",
    "PVE-STORAGE-FULL",
    "a storage of the node is full: {said}",
    "free some space there, or name another storage in proxmox_container_storage; a plain re-run goes on",
)

_KNOWN = (
    (
        r"configuring device passthrough is only allowed for root@pam",
        "PVE-ROOT-ONLY",
        "Proxmox lets only root@pam with a password ticket pass devices through; no API token may, not even root's",
        "let pct on the node do it (proxmox_container_root_via: pct), or set proxmox_container_api_user: root@pam and "
        "proxmox_container_api_password in the vault",
    ),
    (
        r"changing feature flags",
        "PVE-ROOT-ONLY",
        "Proxmox lets only root@pam with a password ticket change features other than nesting, also to an empty value",
        "drop the flag from proxmox_container_features, or let pct on the node do it (proxmox_container_root_via: pct)",
    ),
    (
        r"mount point type \w+ is only allowed|arbitrary filesystem paths",
        "PVE-ROOT-ONLY",
        "Proxmox lets only root@pam with a password ticket set bind mounts and mounted devices",
        "use a storage volume, or let pct on the node do it (proxmox_container_root_via: pct)",
    ),
    (
        r"changing the hookscript is only allowed",
        "PVE-ROOT-ONLY",
        "Proxmox lets only root@pam with a password ticket set a hook script",
        "drop proxmox_container_hookscript, or let pct on the node do it (proxmox_container_root_via: pct)",
    ),
    (
        r"Device (\S+) does not exist",
        "PVE-DEVICE-MISSING",
        "the node says: {text}",
        "load the driver on the node (nvidia-smi or nvidia-modprobe creates the nodes), or correct "
        "proxmox_container_devices",
    ),
    (
        r"Path has to be defined",
        "PVE-PARAMETER",
        "Proxmox does not take a device without a path",
        "begin each of proxmox_container_devices with the path, for example /dev/nvidia0,mode=0666",
    ),
    _FULL,
    (
        r"unable to hotplug \w+",
        "PVE-RESTART-NEEDED",
        "the running container does not take the change: {details}",
        "set proxmox_container_allow_restart: true when the service may be interrupted",
    ),
    (
        r"unable to apply pending change \w+",
        "PVE-NOT-APPLIED",
        "the node could not make a change, which waits until it can: {details}",
        "mend what the node says and run the play again, or correct the value",
    ),
    (
        r"detected modified configuration",
        "PVE-CHANGED-MEANWHILE",
        "somebody changed the container's configuration while this run was comparing it",
        "run the play again",
    ),
    (
        r"CT (\d+) already exists|VM (\d+) already exists",
        "PVE-VMID-TAKEN",
        "the node says: {text}",
        "give proxmox_container_vmid a free id (pvesh get /cluster/nextid)",
    ),
    (
        r"Configuration file '\S*' does not exist",
        "PVE-NO-CONTAINER",
        "the node has no such container: {text}",
        "check proxmox_container_vmid and proxmox_container_node",
    ),
    (
        r"storage '\S*' (does not exist|is disabled|is not (available|online))",
        "PVE-STORAGE",
        "the node cannot use the storage: {text}",
        "correct proxmox_container_storage (pvesm status lists what the node has)",
    ),
    (
        r"does not support container directories|does not allow content type 'rootdir'",
        "PVE-STORAGE",
        "the storage does not take root file systems of containers: {said}",
        "name a storage with the content type rootdir in proxmox_container_storage (pvesm status --content rootdir)",
    ),
    (
        r"content type needs to be 'vztmpl'",
        "PVE-TEMPLATE",
        "the template is none: {text}",
        "name a volume of the content type vztmpl in proxmox_container_template (pveam list STORAGE)",
    ),
    (
        r"pool '(\S*)' does not exist",
        "PVE-POOL",
        "the cluster has no such pool: {text}",
        "correct proxmox_container_pool, or make the pool (pvesh create /pools --poolid NAME)",
    ),
    (
        r"script '\S*' does not exist",
        "PVE-HOOKSCRIPT",
        "the node has no such hook script: {text}",
        "put it on a storage with the content type snippets, or correct proxmox_container_hookscript",
    ),
    (
        r"SSH public key validation error",
        "PVE-PARAMETER",
        "Proxmox takes none of the given lines for an ssh public key",
        "correct proxmox_container_ssh_public_keys: one key a line, as in an .pub file",
    ),
    (
        r"unable to modify read-only option: '(\w+)'|unable to delete required option",
        "PVE-READ-ONLY",
        "Proxmox does not change this on an existing container: {text}",
        "leave it as it is, or back up and recreate the container",
    ),
    (
        r"no options specified",
        "PVE-NOTHING-SENT",
        "Proxmox was sent a change without any key",
        "this is a fault of this module: report it with the play's output",
    ),
    (
        r"unable to shrink disk size",
        "PVE-SHRINK",
        "Proxmox never shrinks a disk",
        "leave the size as it is, or back up and recreate the container",
    ),
    (
        r"CT \d+ not running|CT \d+ already running",
        "PVE-POWER",
        "the container changed its state meanwhile: {text}",
        "run the play again",
    ),
    (
        r"container is running",
        "PVE-RUNNING",
        "the container runs, and Proxmox destroys only stopped ones: {text}",
        "stop it first (proxmox_container_state: stopped)",
    ),
    (
        r"protection mode enabled",
        "PVE-PROTECTED",
        "the container is protected against removal and against other mounts: {text}",
        "set proxmox_container_protection: false first, in a run of its own",
    ),
    (
        r"invalid privilege '?VM\.Monitor",
        "PVE-PRIVILEGE",
        "VM.Monitor no longer exists in Proxmox VE 9",
        "use Sys.Audit in the role instead",
    ),
    (
        r"no such task|unable to parse worker upid",
        "PVE-NO-TASK",
        "the node knows no such task: {details}",
        "look at the node's task list; it may have been cleaned up",
    ),
    (
        r"hostname lookup '\S*' failed|^59[5-9]",
        "PVE-NODE-OFFLINE",
        "the API cannot reach the node: {text}",
        "check proxmox_container_node and that the node is up (pvecm status)",
    ),
    (
        r"no quorum|unable to open file '/etc/pve/\S*' - Permission denied",
        "PVE-NO-QUORUM",
        "the cluster has no quorum, so that nothing can be changed: {text}",
        "bring enough nodes back (pvecm status); nothing was changed",
    ),
    (
        r"can't lock file|cfs-lock|(CT|VM) is locked",
        "PVE-LOCKED",
        "another task holds the container's lock: {text}",
        "wait for that task (the node's task list names it), then run the play again",
    ),
    (
        r"^501 Method '\w+ \S+' not implemented",
        "PVE-VERSION",
        "this Proxmox VE does not know the call: {text}",
        "Pivot needs Proxmox VE 8.2 or later",
    ),
    (
        r"^401 Permission denied - invalid csrf token",
        "PVE-LOGIN",
        "Proxmox does not take the session's token against forgery ({text})",
        "run the play again; where a proxy stands before the API, it must keep the CSRFPreventionToken header",
    ),
    (
        r"^401",
        "PVE-LOGIN",
        "Proxmox does not accept the credentials ({text})",
        "check proxmox_container_api_user and the password or token in the vault",
    ),
    (
        r"^403 Permission check failed \(/\S*, [^)]+\)",
        "PVE-FORBIDDEN",
        "the account lacks a privilege: {text}",
        "grant a role with that privilege on that path (pveum acl modify), or use root@pam's password ticket",
    ),
    (
        r"^403 Forbidden|^403 Permission check failed",
        "PVE-FORBIDDEN",
        "the account may not do this: {text}",
        "a bare refusal is most often a feature other than nesting; grant what is missing (pveum acl modify), or use "
        "root@pam's password ticket",
    ),
)

_KNOWN_OF_TASKS = (
    (
        r"volume '\S*' does not exist|can't find file",
        "PVE-TEMPLATE",
        "the node has no such template: {text}",
        "correct proxmox_container_template (pveam list STORAGE), or download it (pveam download)",
    ),
    (
        r"Configuration file '\S*' does not exist",
        "PVE-NO-CONTAINER",
        "the node has no such container: {text}",
        "check proxmox_container_vmid and proxmox_container_node",
    ),
    (_FULL[0], _FULL[1], "a storage of the node is full: {text}", _FULL[3]),
    (
        r"no quorum|unable to open file '/etc/pve/\S*' - Permission denied",
        "PVE-NO-QUORUM",
        "the cluster lost its quorum during the task: {text}",
        "bring enough nodes back (pvecm status), then run the play again",
    ),
    (
        r"Could not get mode or device ID of|is not a device|Device \S+ does not exist",
        "PVE-DEVICE-MISSING",
        "the node lacks a device that the container is given: {text}",
        "load the driver on the node (nvidia-smi or nvidia-modprobe creates the nodes), or correct "
        "proxmox_container_devices",
    ),
    (
        r"can't lock file|cfs-lock|(CT|VM) is locked",
        "PVE-LOCKED",
        "another task holds the container's lock: {text}",
        "wait for that task (the node's task list names it), then run the play again",
    ),
    (
        r"bridge '\S*' does not exist|no physical interface on bridge",
        "PVE-BRIDGE",
        "the node has no such bridge: {text}",
        "correct the bridge in proxmox_container_net0",
    ),
)
