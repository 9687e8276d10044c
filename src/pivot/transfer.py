"""How rsync reaches a host: with the variables that Ansible itself uses for ssh."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any


class TransferError(ValueError):
    """A connection that rsync cannot use; the text says which variable is the reason."""


def rsync_to(source: str, destination: str, connection: Mapping[str, Any], options: Sequence[str]) -> list[str]:
    """The call that makes a host's directory `destination` hold what the controller's directory `source` holds.

    connection: inventory_hostname and Ansible's ansible_{connection,host,port,user,ssh_private_key_file,
    ssh_common_args,ssh_extra_args}; unset ones are absent or empty.
    """
    call = ["rsync", *options, "--protect-args"]
    target = destination.rstrip("/") + "/"
    if connection.get("ansible_connection") != "local":
        host = str(connection.get("ansible_host") or connection["inventory_hostname"])
        host = f"[{host}]" if ":" in host else host
        user = connection.get("ansible_user")
        call += ["--rsh", remote_shell(connection)]
        target = f"{f'{user}@' if user else ''}{host}:{target}"
    return [*call, source.rstrip("/") + "/", target]


def remote_shell(connection: Mapping[str, Any]) -> str:
    """The ssh call for rsync's --rsh, which splits it at spaces and understands simple quotes."""
    words = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    if connection.get("ansible_port"):
        words += ["-p", str(connection["ansible_port"])]
    if connection.get("ansible_ssh_private_key_file"):
        words += ["-i", str(connection["ansible_ssh_private_key_file"])]
    for key in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
        words += shlex.split(str(connection.get(key) or ""))
    if any("'" in word for word in words):
        raise TransferError(
            "ansible_ssh_private_key_file, ansible_ssh_common_args or ansible_ssh_extra_args holds an apostrophe,"
            " which rsync cannot pass on: use a path without one"
        )
    return shlex.join(words)
