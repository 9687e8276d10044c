"""``pivot check INVENTORY``: preflight's findings without a play."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pivot.findings import render
from pivot.inventory import inventory

PROJECT = Path(__file__).resolve().parents[3]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing would stop a run, 1 when something would, 2 when the inventory cannot be read."""
    parser = argparse.ArgumentParser(prog="pivot check", description="What preflight says about an inventory.")
    parser.add_argument("inventory", type=Path, help="a directory or file, for example inventory/lab")
    parser.add_argument("--host", action="append", help="look at this container alone (may be repeated)")
    parser.add_argument("--json", action="store_true", help="findings and layers as JSON, for other programs")
    parser.add_argument("-e", "--extra-vars", action="append", default=[], help="as ansible-playbook takes them")
    parser.add_argument("--vault-password-file", action="append", default=[], help="as ansible-playbook takes it")
    parsed = parser.parse_args(arguments)
    if not parsed.inventory.exists():
        return _refused(f"there is no inventory {parsed.inventory}")
    if broken := inventory.broken(parsed.inventory):
        print(render(broken), file=sys.stderr)
        return 2
    # Ansible reads its settings while it is imported, so it has to be told before
    if not Path("ansible.cfg").exists():
        os.environ.setdefault("ANSIBLE_CONFIG", str(PROJECT / "ansible.cfg"))
    from ansible.errors import AnsibleError  # noqa: PLC0415 - Ansible has to be told first

    from pivot.inventory import gather  # noqa: PLC0415 - it imports Ansible

    try:
        source = gather.Source(parsed.inventory, parsed.extra_vars, parsed.vault_password_file)
        if unread := source.unread_vaults():
            print(render(unread), file=sys.stderr)
            return 2
        containers = source.groups.get(inventory.CONTAINERS, [])
        if unknown := next((name for name in parsed.host or () if name not in containers), None):
            close = difflib.get_close_matches(unknown, containers, n=1)
            advice = f"did you mean {close[0]}?" if close else f"it has {', '.join(containers) or 'none'}"
            return _refused(f"{unknown} is no host of the group {inventory.CONTAINERS} of {parsed.inventory}: {advice}")
        report = source.check(PROJECT, parsed.host or containers)
    except AnsibleError as error:
        return _refused(" ".join(str(error).split()))
    print(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) if parsed.json else report.text())
    return 1 if report.failed else 0


def _refused(text: str) -> int:
    print(f"pivot check: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
