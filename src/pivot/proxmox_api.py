"""The session with the Proxmox API: create, update, start one container, and wait for its tasks."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import requests
from proxmoxer import ProxmoxAPI
from proxmoxer.backends.https import AuthenticationError
from proxmoxer.core import ResourceException

from pivot import proxmox
from pivot.findings import Finding, Severity

POLL_SECONDS = 0.3
TASK_SECONDS = 600.0
LOCKED = ("create", "rollback", "migrate", "disk")


class ApiError(Exception):
    """A refusal or an unreachable API, as the finding that explains it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Where the API is and who asks. Either a password (root@pam may pass devices) or a token."""

    host: str
    port: int
    user: str
    ca_path: str | None
    password: str | None = None
    token_id: str | None = None
    token_secret: str | None = None

    def connect(self, subject: str) -> ProxmoxAPI:
        """A session whose certificate is verified; raises ApiError with one sentence."""
        credentials: dict[str, Any] = (
            {"token_name": self.token_id, "token_value": self.token_secret}
            if self.token_id
            else {"password": self.password}
        )
        with translated(subject, f"{self.host}:{self.port}"):
            return ProxmoxAPI(
                self.host,
                port=self.port,
                user=self.user,
                verify_ssl=self.ca_path or True,
                timeout=30,
                **credentials,
            )


@dataclasses.dataclass(slots=True)
class Outcome:
    """What `ensure` did, or in check mode would do. before and after are configuration keys."""

    changed: bool = False
    created: bool = False
    started: bool = False
    restarted: bool = False
    before: dict[str, str] = dataclasses.field(default_factory=dict)
    after: dict[str, str] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)


@contextmanager
def translated(subject: str, where: str = "the Proxmox API") -> Iterator[None]:
    """Turn what proxmoxer and requests raise into an ApiError that a person understands."""
    try:
        yield
    except ResourceException as error:
        raise ApiError(
            proxmox.explain(subject, error.status_code, error.content or error.status_message, error.errors)
        ) from error
    except AuthenticationError as error:
        raise ApiError(proxmox.explain(subject, 401, "authentication failure")) from error
    except requests.exceptions.SSLError as error:
        raise ApiError(
            Finding(
                "PVE-CERTIFICATE",
                Severity.ERROR,
                subject,
                f"the certificate of {where} is not signed by the authority in proxmox_container_api_ca",
                "copy /etc/pve/pve-root-ca.pem of the cluster and name it in proxmox_container_api_ca",
            )
        ) from error
    except requests.exceptions.RequestException as error:
        raise ApiError(
            Finding(
                "PVE-UNREACHABLE",
                Severity.ERROR,
                subject,
                f"{where} does not answer ({type(error).__name__})",
                "check proxmox_container_api_host and _port and that pveproxy runs there; in the lab: make lab-up",
            )
        ) from error
    except OSError as error:  # requests looks for the authority's file itself
        raise ApiError(
            Finding(
                "PVE-CERTIFICATE",
                Severity.ERROR,
                subject,
                f"proxmox_container_api_ca names no file that can be used: {error}",
                "copy /etc/pve/pve-root-ca.pem of the cluster and name it in proxmox_container_api_ca",
            )
        ) from error


class Container:
    """One container of one node."""

    def __init__(self, api: ProxmoxAPI, node: str, vmid: int, subject: str) -> None:
        self.api, self.node, self.vmid, self.subject = api, node, vmid, subject
        self._lxc = api.nodes(node).lxc

    def config(self) -> dict[str, Any] | None:
        """The configuration with pending changes applied, None when the node has no such container."""
        try:
            with translated(self.subject):
                return dict(self._lxc(self.vmid).config.get())
        except ApiError as error:
            if "does not exist" in error.finding.message:
                return None
            raise

    def id_taken(self) -> bool:
        """Whether the id belongs to a guest somewhere in the cluster, of any kind."""
        try:
            self.api.cluster.nextid.get(vmid=self.vmid)
        except ResourceException as error:
            if error.status_code == 400:
                return True
            with translated(self.subject):
                raise
        return False

    def in_use(self, address: str) -> bool:
        """Whether a machine has this address already: port 22 answers or refuses within a second."""
        try:
            socket.create_connection((address, 22), timeout=1).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # nobody there, or nobody who shows
            return False
        return True

    def running(self) -> bool:
        """Whether it runs now."""
        with translated(self.subject):
            return bool(self._lxc(self.vmid).status.current.get()["status"] == "running")

    def pending(self) -> list[str]:
        """Keys whose change waits for a restart."""
        with translated(self.subject):
            return proxmox.pending_keys(self._lxc(self.vmid).pending.get())

    def create(self, wanted: Mapping[str, str]) -> None:
        """Create it and wait. An error after which the wanted container exists all the same is a success."""
        try:
            with translated(self.subject):
                upid = self._lxc.post(vmid=self.vmid, **wanted)
            self.wait(upid)
        except ApiError:
            actual = self.config()
            if actual is None or proxmox.owner_finding(self.subject, self.vmid, wanted["hostname"], actual):
                raise
            self.wait_unlocked()

    def update(self, plan: proxmox.Plan, digest: str | None) -> None:
        """Send a plan's changes; the digest protects against edits made meanwhile."""
        with translated(self.subject):
            if plan.delete:
                self._lxc(self.vmid).config.put(delete=",".join(plan.delete), **({"digest": digest} if digest else {}))
                digest = None
            if plan.set:
                self._lxc(self.vmid).config.put(**plan.set, **({"digest": digest} if digest else {}))

    def power(self, action: str) -> None:
        """``start``, ``shutdown`` or ``reboot``, and wait until it is done."""
        with translated(self.subject):
            upid = self._lxc(self.vmid).status(action).post()
        self.wait(upid)

    def wait_unlocked(self, seconds: float = TASK_SECONDS) -> None:
        """Wait while another task (for example a create whose client was killed) holds the container."""

        def unlocked() -> bool:
            config = self.config()
            return config is None or config.get("lock") not in LOCKED

        self._until(unlocked, seconds, f"container {self.vmid} is still locked by another task")

    def wait(self, upid: str, seconds: float = TASK_SECONDS) -> None:
        """Wait for a task; raises ApiError with the end of its log when it failed."""
        status: dict[str, Any] = {}

        def stopped() -> bool:
            with translated(self.subject):
                status.update(self.api.nodes(self.node).tasks(upid).status.get())
            return status.get("status") == "stopped"

        self._until(stopped, seconds, f"task {upid} did not end")
        result = str(status.get("exitstatus", ""))
        # "WARNINGS: 1" is a success with a notice, e.g. for systemd without nesting
        if result == "OK" or result.startswith("WARNINGS"):
            return
        with translated(self.subject):
            log = self.api.nodes(self.node).tasks(upid).log.get(limit=500)
        tail = " | ".join(str(line.get("t", "")).strip() for line in log[-4:])
        raise ApiError(proxmox.explain(self.subject, 500, f"{status.get('type', 'task')} failed: {result} ({tail})"))

    def _until(self, done: Callable[[], bool], seconds: float, failure: str) -> None:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                raise ApiError(
                    Finding(
                        "PVE-TIMEOUT",
                        Severity.ERROR,
                        self.subject,
                        f"{failure} within {seconds:.0f} s",
                        "look at the task on the node, then run the play again",
                    )
                )
            time.sleep(POLL_SECONDS)


def ensure(container: Container, wanted: Mapping[str, str], *, check: bool, allow_restart: bool) -> Outcome:
    """Bring one container to the wanted configuration and start it. With check nothing is sent.

    wanted: configuration keys as Proxmox names them, values as strings; hostname, ostemplate and rootfs included.
    """
    container.wait_unlocked()
    actual = container.config()
    if actual is None:
        return _create(container, wanted, check=check)
    owner = proxmox.owner_finding(container.subject, container.vmid, wanted["hostname"], actual)
    if owner:
        return Outcome(findings=[owner])
    plan = proxmox.plan(container.subject, wanted, actual)
    outcome = Outcome(findings=list(plan.findings), before=plan.before, after=plan.after)
    if any(finding.severity is Severity.ERROR for finding in plan.findings):
        return outcome
    running = container.running()
    restart = running and (plan.needs_stop or bool(container.pending()))
    if restart and not allow_restart:
        outcome.findings.append(_restart_refused(container, plan))
        return outcome
    outcome.changed = plan.changes or restart or not running
    outcome.restarted, outcome.started = restart, not running
    if check or not outcome.changed:
        return outcome
    if restart:
        container.power("shutdown")
    try:
        if plan.changes:
            container.update(plan, actual.get("digest"))
    finally:  # a refused change leaves no container stopped that was running
        if restart or not running:
            container.power("start")
    return outcome


def _create(container: Container, wanted: Mapping[str, str], *, check: bool) -> Outcome:
    visible = {key: value for key, value in wanted.items() if key not in ("password", "ssh-public-keys")}
    outcome = Outcome(changed=True, created=True, started=True, after=visible)
    if container.id_taken():
        finding = Finding(
            "PVE-VMID-TAKEN",
            Severity.ERROR,
            container.subject,
            f"vmid {container.vmid} is taken by a guest on another node or of another kind",
            "give proxmox_container_vmid a free id (pvesh get /cluster/nextid)",
        )
        return Outcome(findings=[finding])
    address = proxmox.static_address(wanted)
    if address and container.in_use(address):
        finding = Finding(
            "PVE-ADDRESS-IN-USE",
            Severity.ERROR,
            container.subject,
            f"container {container.vmid} is to be created with the address {address}, which another machine has",
            "give the host a free address (ansible_host, proxmox_container_net0), or take it from that machine",
        )
        return Outcome(findings=[finding])
    if not check:
        container.create(wanted)
        container.power("start")
    return outcome


def _restart_refused(container: Container, plan: proxmox.Plan) -> Finding:
    keys = ", ".join((*plan.set, *plan.delete)) or ", ".join(container.pending())
    return Finding(
        "PVE-RESTART-NEEDED",
        Severity.ERROR,
        container.subject,
        f"the running container takes these changes only through a restart: {keys}",
        "set proxmox_container_allow_restart: true when the service may be interrupted",
    )
