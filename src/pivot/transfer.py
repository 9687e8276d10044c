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
    ssh_common_args,ssh_extra_args}; unset ones are absent or empty. TransferError when rsync cannot use it.
    """
    shell, prefix = _remote(connection)
    return ["rsync", *options, "--protect-args", *shell, _directory(source), prefix + _directory(destination)]


def rsync_from(source: str, destination: str, connection: Mapping[str, Any], options: Sequence[str]) -> list[str]:
    """The call that makes the controller's directory `destination` hold what a host's directory `source` holds."""
    shell, prefix = _remote(connection)
    return ["rsync", *options, "--protect-args", *shell, prefix + _directory(source), _directory(destination)]


def _directory(path: str) -> str:
    return path.rstrip("/") + "/"


def _remote(connection: Mapping[str, Any]) -> tuple[list[str], str]:
    """rsync's options that reach the host, and what stands before a path there."""
    kind = str(connection.get("ansible_connection") or "ssh").rsplit(".", 1)[-1]
    if kind == "local":
        return [], ""
    if kind not in ("ssh", "smart"):
        raise TransferError(f"ansible_connection is {kind}: files travel over ssh, or locally")
    host = str(connection.get("ansible_host") or connection["inventory_hostname"])
    user = connection.get("ansible_user")
    address = f"[{host}]" if ":" in host else host
    return ["--rsh", remote_shell(connection)], f"{f'{user}@' if user else ''}{address}:"


def remote_shell(connection: Mapping[str, Any]) -> str:
    """The ssh call for rsync's --rsh, which splits it at spaces and understands simple quotes."""
    words = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    if connection.get("ansible_port"):
        words += ["-p", str(connection["ansible_port"])]
    # the variables of another host still have the names that its inventory gave them
    if key := connection.get("ansible_ssh_private_key_file") or connection.get("ansible_private_key_file"):
        words += ["-i", str(key)]
    for key in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
        words += shlex.split(str(connection.get(key) or ""))
    if any("'" in word for word in words):
        raise TransferError(
            "ansible_ssh_private_key_file, ansible_ssh_common_args or ansible_ssh_extra_args holds an apostrophe,"
            " which rsync cannot pass on: use a path without one"
        )
    return shlex.join(words)
