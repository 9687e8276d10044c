"""What this run was told on its command line, as the variables that hand it to an Ansible that it starts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
name: run_environment
short_description: The files of vault passwords and values of the command line, for a child's environment
description:
  - C(--vault-password-file) and C(--vault-id) as C(ANSIBLE_VAULT_IDENTITY_LIST), beside those that are configured.
  - Files of C(--extra-vars) as C(PIVOT_EXTRA_VARS), a JSON list; see tests/host/conftest.py.
  - A password or a value that was typed is not handed on. At C(-vvv) Ansible prints a task's environment.
author: Pivot contributors
"""


def environment(options: Mapping[str, Any], configured: Sequence[str] = ()) -> dict[str, str]:
    """Variables for these options of the command line; empty where none was given: the rest is inherited.

    configured: vault ids of the configuration, which the variable would displace; a password file of it stays.
    """
    files = (f"default@{name}" for name in options.get("vault_password_files") or ())
    vault = [_absolute_id(vault_id) for vault_id in (*(options.get("vault_ids") or ()), *files)]
    values = [f"@{_absolute(one[1:])}" for one in options.get("extra_vars") or () if one.startswith("@")]
    return {
        **({"ANSIBLE_VAULT_IDENTITY_LIST": ",".join([*configured, *vault])} if vault else {}),
        **({"PIVOT_EXTRA_VARS": json.dumps(values)} if values else {}),
    }


def _absolute_id(vault_id: str) -> str:
    """``label@source`` for another working directory; Ansible splits at the first ``@`` too."""
    label, at, source = vault_id.partition("@") if "@" in vault_id else ("", "", vault_id)
    asked = source in ("prompt", "prompt_ask_vault_pass")
    return vault_id if asked else f"{label}{at}{_absolute(source)}"


def _absolute(name: str) -> Path:
    return Path(name).expanduser().absolute()


class LookupModule(LookupBase):
    """One mapping of variables."""

    def run(
        self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[dict[str, str]]:
        """Of the command line that this run was started with."""
        return [environment(context.CLIARGS, constants.DEFAULT_VAULT_IDENTITY_LIST or ())]
