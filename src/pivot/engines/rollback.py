"""Going back to the set of release, launch configuration and drafter view that was healthy before.

Pure: decides from what `roles/sglang_server/files/server_state.py` found on a host. A set is kept once its server has
answered well; a set that a rollback went away from is none to go back to until a deployment has served it well again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pivot.findings import Finding, Severity


def running(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The kept set that runs now: the one whose start read the very same files. None when none does."""
    started = (state.get("running") or {}).get("started")
    found = [each for each in state["healthy"]["sets"] if started and each["started"] == started]
    return found[-1] if found else None


def due(state: Mapping[str, Any]) -> bool:
    """Whether the running server, found healthy just now, has to be kept as the newest set."""
    kept, now = state["healthy"], running(state)
    return now is None or now is not kept["sets"][-1] or bool(kept["going"]) or now["id"] in kept["left"]


def target(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The set to go to: that of a rollback that was interrupted, else the newest that is not the running one."""
    kept, now = state["healthy"], running(state)
    interrupted = [each for each in kept["sets"] if each["id"] == kept["going"]]
    others = [each for each in kept["sets"] if each is not now and each["id"] not in kept["left"]]
    return next(reversed(interrupted or others), None)


def findings(subject: str, state: Mapping[str, Any]) -> list[Finding]:
    """What forbids to go back."""
    chosen = target(state)
    if chosen is None:
        message = f"none of the {len(state['healthy']['sets'])} sets that were found healthy here is one to go back to"
        return [_error("ROLLBACK-NONE", subject, message, "deploy what is wanted: ansible-playbook deploy.yml")]
    found = []
    if chosen["missing"]:
        message = f"{describe(chosen)} cannot come back: {', '.join(chosen['missing'][:3])} is gone"
        found.append(_error("ROLLBACK-GONE", subject, message, "deploy it from an inventory that names it"))
    if any("pivot-probe" in name for name in state.get("drop_ins") or []):
        message = "the debug probe is on, and its end would not know the server that comes back"
        fix = "ansible-playbook deploy.yml --tags debug-off, then this again"
        found.append(_error("ROLLBACK-PROBE", subject, message, fix))
    return found


def _error(code: str, subject: str, message: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, subject, message, fix)


def describe(kept: Mapping[str, Any]) -> str:
    """A set in a few words."""
    about = kept["about"]
    release = kept["release"].rsplit("/", 1)[-1]
    return f"{release} with {about['model']}, drafter {about['drafter'] or 'none'} (healthy at {kept['at']})"


def plan(state: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """What a rollback does.

    findings: what forbids it, and then nothing else; to: the chosen set; from: the id of the running one, if it was
    kept; text: for people; restart: whether the chosen one does not run yet.
    """
    found = findings(subject, state)
    chosen, now = target(state), running(state)
    if found or chosen is None:
        return {"findings": [item.as_dict() for item in found]}
    before = describe(now) if now else "what is there now, which was never found healthy"
    return {
        "findings": [],
        "to": chosen,
        "from": now["id"] if now and now is not chosen else None,
        "text": f"from {before} back to {describe(chosen)}",
        "restart": now is not chosen,
    }
