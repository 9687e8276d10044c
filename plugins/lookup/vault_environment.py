"""This run's vault options as the variables that hand them to an Ansible that it starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
name: vault_environment
short_description: The vault options of the command line, for a child's environment
description:
  - C(--vault-password-file) and C(--vault-id) as C(ANSIBLE_VAULT_PASSWORD_FILE) and C(ANSIBLE_VAULT_IDENTITY_LIST).
  - A password that was typed is not handed on.
author: Pivot contributors
"""


def environment(options: Mapping[str, Any]) -> dict[str, str]:
    """Ansible's variables for these options of its command line; empty where none was given."""
    files = [str(Path(name).expanduser().absolute()) for name in options.get("vault_password_files") or ()]
    ids = [*map(_absolute, options.get("vault_ids") or ()), *(f"default@{name}" for name in files[:-1])]
    found = {"ANSIBLE_VAULT_PASSWORD_FILE": files[-1]} if files else {}
    return found | ({"ANSIBLE_VAULT_IDENTITY_LIST": ",".join(ids)} if ids else {})


def _absolute(vault_id: str) -> str:
    """``label@source`` for another working directory."""
    label, at, source = vault_id.rpartition("@")
    return vault_id if source.startswith("prompt") else f"{label}{at}{Path(source).expanduser().absolute()}"


class LookupModule(LookupBase):
    """One mapping of variables."""

    def run(
        self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[dict[str, str]]:
        """Of the command line that this run was started with."""
        return [environment(context.CLIARGS)]
