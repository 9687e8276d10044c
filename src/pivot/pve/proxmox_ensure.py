"""Bring one container to what is wanted: decide what to send, in which order, and what only root may."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pivot.findings import Finding, Severity
from pivot.pve import proxmox, proxmox_raw
from pivot.pve.proxmox_api import ApiError, Container
from pivot.pve.proxmox_values import family, static_address, switched_on

STATES = ("present", "started", "stopped", "restarted", "absent")
# how keys travel that only root@pam may set: over the session if it is root's, by pct on the node, or not at all
ROOT_VIA = ("pct", "ticket")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    wanted: configuration keys as Proxmox names them, values as text; raw: lines of ``lxc.*``; remove: keys, or raw
    lines, that shall not be there; confirm: ``<vmid> <hostname>``, for state absent; root_via: see `ROOT_VIA`; is_root:
    the session is; power_only: only the state is of interest, since somebody else has set the rest.
    """

    wanted: Mapping[str, str]
    raw: tuple[proxmox_raw.Line, ...] = ()
    state: str = "started"
    remove: tuple[str, ...] = ()
    allow_restart: bool = False
    root_via: str = "ticket"
    is_root: bool = True
    confirm: str = ""
    shutdown_seconds: int = 240
    power_only: bool = False


@dataclasses.dataclass(slots=True)
class Outcome:
    """What `ensure` did, or in check mode would do. before and after are configuration keys.

    deferred: what `pct set` on the node has to do before the container is started, with the digest that it has to find;
    raw: what has to be written into its file there. Where either is something, `ensure` is called again then.
    running: whether it runs when all of that is done.
    """

    changed: bool = False
    created: bool = False
    started: bool = False
    stopped: bool = False
    restarted: bool = False
    removed: bool = False
    running: bool = False
    before: dict[str, str] = dataclasses.field(default_factory=dict)
    after: dict[str, str] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    deferred: proxmox.Plan | None = None
    digest: str = ""
    raw: proxmox_raw.Edits = dataclasses.field(default_factory=proxmox_raw.Edits)

    @property
    def waits(self) -> bool:
        """Whether something has to be done on the node before the container is started."""
        return self.deferred is not None or self.raw.changes

    def reachable(self, *, check: bool) -> bool:
        """Whether there is something to connect to when all is done; check mode creates and starts nothing."""
        return self.running and not (check and (self.created or self.started))

    @property
    def refused(self) -> bool:
        """Whether an error stands."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)


def ensure(container: Container, request: Request, *, check: bool) -> Outcome:
    """Bring one container to the wanted configuration and state. With check nothing is sent."""
    said = _beforehand(container, request)
    if any(finding.severity is Severity.ERROR for finding in said):
        return Outcome(findings=said)
    container.wait_unlocked()
    actual = container.config()
    if actual is None:
        outcome = Outcome() if request.state == "absent" else _create(container, request, check=check)
    else:
        owner = proxmox.owner_finding(container.subject, container.vmid, request.wanted["hostname"], actual)
        if owner:
            outcome = Outcome(findings=[owner])
        elif request.state == "absent":
            outcome = _remove(container, request, actual, check=check)
        else:
            outcome = _update(container, request, actual, check=check)
    if outcome.deferred and not check:
        outcome.digest = str((container.config() or {}).get("digest", ""))
    outcome.findings += [*said, *container.notices]
    return outcome


def _beforehand(container: Container, request: Request) -> list[Finding]:
    """What is wrong with the request itself, and what is known of the API; once a run."""
    if request.power_only:
        return []
    release = proxmox.release_finding(container.subject, container.release())
    return [*proxmox_raw.findings(container.subject, request.raw), *([release] if release else [])]


# --- a new one


def _create(container: Container, request: Request, *, check: bool) -> Outcome:
    wanted = proxmox.to_create(request.wanted)
    raw = proxmox_raw.edits(request.raw, ())
    start = request.state in ("started", "restarted")
    shown = {key: value for key, value in wanted.items() if key not in proxmox.SECRET}
    for_root = _for_root(request, proxmox.root_only(wanted, None), wanted)
    findings = [
        *_root_refused(container, request, [*for_root, *([] if request.is_root else raw.keys)]),
        *_taken(container, wanted),
        *_cards(container, request, wanted),
    ]
    outcome = Outcome(changed=True, created=True, started=start, running=start, after=shown, findings=findings, raw=raw)
    if outcome.refused:
        return Outcome(findings=findings)
    later = {key: wanted[key] for key in for_root}
    if later:
        outcome.deferred = proxmox.Plan(set=later, delete=(), before={}, after=later)
    if raw.changes:
        outcome.after["lxc"] = proxmox_raw.shown(raw.add)
    if check:
        return outcome
    container.create({key: value for key, value in wanted.items() if key not in later})
    if start and not outcome.waits:
        container.power("start")
    return outcome


def _for_root(request: Request, keys: list[str], sent: Mapping[str, str]) -> list[str]:
    """The keys that this session leaves to somebody else. A protected container takes no other mounts, so that the
    protection goes with them."""
    if request.is_root:
        return []
    mounts = any(family(key) == "mp" for key in keys)
    return [*keys, *(["protection"] if mounts and switched_on(sent.get("protection")) else [])]


def _cards(container: Container, request: Request, wanted: Mapping[str, str]) -> list[Finding]:
    """Cards that the container is to have and others of the node have; asked only where it is to have any."""
    whole = {**wanted, "tags": wanted.get("tags", ""), "lxc": request.raw}
    return proxmox.gpu_findings(container.subject, whole, container.others()) if proxmox.gpus(whole) else []


def _taken(container: Container, wanted: Mapping[str, str]) -> list[Finding]:
    """Whether the id or the address is somebody's already."""
    found = []
    if container.id_taken():
        found.append(
            Finding(
                "PVE-VMID-TAKEN",
                Severity.ERROR,
                container.subject,
                f"vmid {container.vmid} is taken by a guest on another node or of another kind",
                "give proxmox_container_vmid a free id (pvesh get /cluster/nextid)",
            )
        )
    address = static_address(wanted)
    if address and container.in_use(address):
        found.append(
            Finding(
                "PVE-ADDRESS-IN-USE",
                Severity.ERROR,
                container.subject,
                f"container {container.vmid} is to be created with the address {address}, which another machine has",
                "give the host a free address (ansible_host, proxmox_container_net0), or take it from that machine",
            )
        )
    return found


# --- one that exists


def _update(container: Container, request: Request, actual: Mapping[str, Any], *, check: bool) -> Outcome:
    plan, raw = _differences(container, request, actual)
    for_root = _for_root(request, proxmox.root_only_of_plan(plan, actual), plan.set)
    running = container.running()
    outcome = Outcome(before=plan.before, after=plan.after, findings=list(plan.findings), raw=raw)
    if raw.changes:
        outcome.before["lxc"], outcome.after["lxc"] = proxmox_raw.shown(raw.remove), proxmox_raw.shown(raw.add)
    outcome.findings += _root_refused(container, request, [*for_root, *([] if request.is_root else raw.keys)])
    if raw.add or any(family(key) == "dev" for key in plan.set):
        outcome.findings += _cards(container, request, request.wanted)
    waiting = sorted({*container.pending(), *plan.waiting}) if running and request.state != "stopped" else []
    outcome.restarted = running and (
        request.state == "restarted"
        or (
            request.state != "stopped" and (plan.needs_stop or raw.changes or (bool(waiting) and request.allow_restart))
        )
    )
    outcome.findings += _restart_findings(container, request, _cold(plan, raw), waiting, restart=outcome.restarted)
    if outcome.refused:
        return Outcome(findings=outcome.findings)
    outcome.started = not running and request.state in ("started", "restarted")
    outcome.stopped = running and request.state == "stopped"
    outcome.running = outcome.started or (running and not outcome.stopped)
    outcome.changed = plan.changes or raw.changes or outcome.restarted or outcome.started or outcome.stopped
    if for_root:
        outcome.deferred = plan.only(for_root)
    if not check and outcome.changed:
        _apply(container, request, outcome, plan, actual.get("digest"))
    return outcome


def _differences(
    container: Container, request: Request, actual: Mapping[str, Any]
) -> tuple[proxmox.Plan, proxmox_raw.Edits]:
    """What the API has to be sent and what the node's file has to be given."""
    if request.power_only:
        return proxmox.Plan(set={}, delete=(), before={}, after={}), proxmox_raw.Edits()
    plan = proxmox.plan(container.subject, request.wanted, actual, request.remove)
    return plan, proxmox_raw.edits(request.raw, actual.get("lxc", ()), request.remove)


def _cold(plan: proxmox.Plan, raw: proxmox_raw.Edits) -> list[str]:
    """The keys whose change a running container takes only by a restart."""
    return [*(key for key in plan.keys if family(key) in proxmox.COLD_FAMILIES), *raw.keys]


def _apply(container: Container, request: Request, outcome: Outcome, plan: proxmox.Plan, digest: str | None) -> None:
    """Send what was decided. What is done on the node comes before the start, which is left to the next call then."""

    def left() -> proxmox.Plan:
        now = proxmox.plan(container.subject, request.wanted, container.config() or {}, request.remove)
        return now.only(direct.keys)

    direct = plan.only(set(plan.keys) - set(outcome.deferred.keys if outcome.deferred else ()))
    if outcome.restarted or outcome.stopped:
        _shut_down(container, request.shutdown_seconds, again=outcome.restarted)
    start = outcome.restarted or outcome.started
    try:
        if direct.changes:
            container.update(direct, digest, left)
    except BaseException:
        if outcome.restarted:  # a refused change leaves no container stopped that was running
            container.power("start")
        raise
    if start and not outcome.waits:
        container.power("start")
    elif direct.changes and not (outcome.restarted or outcome.stopped) and container.running():
        _settle(container, request, outcome)


def _shut_down(container: Container, seconds: int, *, again: bool) -> None:
    """Shut it down. One that stops after its time was up is left to nobody, so it is started where it shall run."""
    try:
        container.power("shutdown", timeout=seconds)
    except ApiError:
        if again and container.stops_late():
            container.power("start")
        raise


def _settle(container: Container, request: Request, outcome: Outcome) -> None:
    """Restart for what the node could not change in the running container: only it knows, and only afterwards."""
    waiting = container.pending()
    if waiting and request.allow_restart:
        _shut_down(container, request.shutdown_seconds, again=True)
        container.power("start")
        outcome.restarted = True
    elif waiting:
        outcome.findings = [finding for finding in outcome.findings if finding.code != "PVE-PENDING"]
        outcome.findings.append(_pending(container, waiting))


def _root_refused(container: Container, request: Request, keys: list[str]) -> list[Finding]:
    """One finding with all keys that this session may not set and nobody else is asked to."""
    if not keys or request.root_via == "pct":
        return []
    return [
        Finding(
            "PVE-ROOT-ONLY",
            Severity.ERROR,
            container.subject,
            f"only root@pam with a password ticket may set {', '.join(keys)}; this session is none",
            "let pct on the node do it (proxmox_container_root_via: pct), or set proxmox_container_api_user: root@pam "
            "and proxmox_container_api_password in the vault",
        )
    ]


def _restart_findings(
    container: Container, request: Request, cold: list[str], waiting: list[str], *, restart: bool
) -> list[Finding]:
    """A restart that nobody consented to, and changes that go on waiting for one."""
    if restart and not request.allow_restart:
        return [
            Finding(
                "PVE-RESTART-NEEDED",
                Severity.ERROR,
                container.subject,
                f"the running container takes these changes only through a restart: "
                f"{', '.join(cold) or 'state restarted'}",
                "set proxmox_container_allow_restart: true when the service may be interrupted",
            )
        ]
    return [_pending(container, waiting)] if waiting and not restart else []


def _pending(container: Container, waiting: list[str]) -> Finding:
    return Finding(
        "PVE-PENDING",
        Severity.WARNING,
        container.subject,
        f"changes of {', '.join(waiting)} wait for a restart of the container",
        "set proxmox_container_allow_restart: true when the service may be interrupted",
    )


# --- none


def _remove(container: Container, request: Request, actual: Mapping[str, Any], *, check: bool) -> Outcome:
    """Destroy a container of ours, when vmid and hostname were named for it and it is not protected."""
    needed = f"{container.vmid} {request.wanted['hostname']}"
    if request.confirm != needed:
        message = f"container {container.vmid} and all its volumes would be destroyed, and nobody confirmed that"
        fix = f'set proxmox_container_confirm_absent: "{needed}" for this run'
        return Outcome(findings=[Finding("PVE-UNCONFIRMED", Severity.ERROR, container.subject, message, fix)])
    if switched_on(actual.get("protection")):
        message = f"container {container.vmid} is protected against removal"
        fix = "set proxmox_container_protection: false first, in a run of its own"
        return Outcome(findings=[Finding("PVE-PROTECTED", Severity.ERROR, container.subject, message, fix)])
    shown = {key: str(value) for key, value in actual.items() if key not in ("digest", "lxc")}
    outcome = Outcome(changed=True, removed=True, stopped=container.running(), before=shown)
    if not check:
        if outcome.stopped:
            container.power("shutdown", timeout=request.shutdown_seconds)
        container.destroy()
    return outcome
