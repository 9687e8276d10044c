"""This run's vault options as the variables that hand them to an Ansible that it starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
name: vault_environment
short_description: The vault options of the command line, for a child's environment
description:
  - C(--vault-password-file) and C(--vault-id) as C(ANSIBLE_VAULT_IDENTITY_LIST), beside those that are configured.
  - A password that was typed is not handed on.
author: Pivot contributors
"""


def environment(options: Mapping[str, Any], configured: Sequence[str] = ()) -> dict[str, str]:
    """Ansible's variable for these options of its command line; empty where none was given: the rest is inherited.

    configured: vault ids of the configuration, which the variable would displace; a password file of it stays.
    """
    files = (f"default@{name}" for name in options.get("vault_password_files") or ())
    given = [_absolute(vault_id) for vault_id in (*(options.get("vault_ids") or ()), *files)]
    return {"ANSIBLE_VAULT_IDENTITY_LIST": ",".join([*configured, *given])} if given else {}


def _absolute(vault_id: str) -> str:
    """``label@source`` for another working directory; Ansible splits at the first ``@`` too."""
    label, at, source = vault_id.partition("@") if "@" in vault_id else ("", "", vault_id)
    asked = source in ("prompt", "prompt_ask_vault_pass")
    return vault_id if asked else f"{label}{at}{Path(source).expanduser().absolute()}"


class LookupModule(LookupBase):
    """One mapping of variables."""

    def run(
        self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[dict[str, str]]:
        """Of the command line that this run was started with."""
        return [environment(context.CLIARGS, constants.DEFAULT_VAULT_IDENTITY_LIST or ())]
