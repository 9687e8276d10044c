"""What a person reads at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pivot.bundles.redact import Redactor
from pivot.findings import Finding, Severity, errors, render

NEXT = (
    ("is it all right", "ansible-playbook deploy.yml --tags verify"),
    ("what reaches the drafter", "ansible-playbook deploy.yml --tags debug-on (then debug-off)"),
    ("logs to the controller", "ansible-playbook deploy.yml --tags collect"),
)


def as_result(found: Sequence[Finding], good: str, said: Sequence[str] = ()) -> dict[str, Any]:
    """Findings as an Ansible result: failed by an error, with all of them as its message.

    Otherwise warnings are shown as such, and under pivot_said stand the lines that pivot_report prints: `said`, what is
    worth knowing, and the findings that are only an info. good: the message when there is nothing to say.
    """
    failed = bool(errors(found))
    message = "\n".join([*said, render(found) or good])
    result: dict[str, Any] = {"changed": False, "failed": failed, "msg": message}
    if failed:
        return result
    warned = [render([finding]) for finding in found if finding.severity is Severity.WARNING]
    infos = render([finding for finding in found if finding.severity is Severity.INFO])
    lines = [*said, *infos.splitlines()]
    return {**result, **({"warnings": warned} if warned else {}), **({"pivot_said": lines} if lines else {})}


def duration(seconds: float) -> str:
    """``4.2 s``, ``75 s`` or ``12 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def table(rows: Sequence[tuple[str, str]], indent: str = "  ") -> list[str]:
    """Rows of a name and a value, the values aligned."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{indent}{name.replace('_', ' '):<{width}}  {value}" for name, value in rows]


def summary(hosts: Mapping[str, Mapping[str, Any]], phases: Sequence[tuple[str, float]], log: str | None) -> str:
    """The end of a run: one block a host, then where the time went, where the log is, and what to do next.

    hosts: what the roles reported, per host; phases: plays and their seconds, in order.
    """
    lines: list[str] = []
    for host, facts in sorted(hosts.items()):
        lines += ["", host, *table([(name, _value(value)) for name, value in facts.items() if value not in ("", None)])]
    spent = [(name, seconds) for name, seconds in phases if seconds >= 0.05]
    if spent:
        total = sum(seconds for _, seconds in spent)
        shares = ", ".join(f"{name} {duration(seconds)}" for name, seconds in spent)
        lines += ["", f"took  {duration(total)}: {shares}"]
    if log:
        lines.append(f"log   {log}")
    if hosts:
        lines += ["next", *table([(command, f"# {what}") for what, command in NEXT])]
    return "\n".join(lines).strip("\n")


def masked_diff(path: str, before: str, after: str) -> dict[str, str]:
    """A file's difference as Ansible shows it, values of names that say secret masked in both texts."""
    redactor = Redactor()
    shown = {"before": redactor.text(before), "after": redactor.text(after)}
    unseen = "; only what is masked differs" if before != after and shown["before"] == shown["after"] else ""
    return {"before_header": f"{path} (as it is)", "after_header": f"{path} (as wanted{unseen})", **shown}
