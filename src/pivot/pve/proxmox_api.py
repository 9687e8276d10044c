"""The session with the Proxmox API: calls that survive what passes, and the one container they are about.

A refused call is an `ApiError`. A call that changes something and whose outcome is unclear (a lost answer, a timeout, a
lock, a proxy's 5xx) is `UnclearError`: whoever made it looks at what exists before anything is sent again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from proxmoxer import ProxmoxAPI
from proxmoxer.backends.https import AuthenticationError
from proxmoxer.core import ResourceException
from urllib3.util import ssl_ as urllib3_ssl

from pivot.findings import Finding, Severity
from pivot.pve import proxmox
from pivot.pve.proxmox_refusals import explain, task_failed, transient

POLL_SECONDS = 0.3
LATE_SECONDS = 60.0  # how long a container is watched whose shutdown took too long
TASK_SECONDS = 600.0
# how long a call is repeated that may succeed in a moment, and the first pause (they double)
PATIENCE_SECONDS = 45.0
FIRST_PAUSE = 0.5
# how long a task that was started by a lost call may take to show
SHOW_SECONDS = 3.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # no proxy leads there
LOCKED = ("create", "rollback", "migrate", "disk")


class ApiError(Exception):
    """A refusal or an unreachable API, as the finding that explains it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


class UnclearError(ApiError):
    """A call that may or may not have done its work. again: whether the same call may succeed in a moment."""

    def __init__(self, finding: Finding, *, again: bool) -> None:
        super().__init__(finding)
        self.again = again


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Where the API is and who asks. Either a password (root@pam may pass devices) or a token."""

    host: str
    port: int
    user: str
    ca_path: str | None
    password: str | None = dataclasses.field(default=None, repr=False)
    token_id: str | None = None
    token_secret: str | None = dataclasses.field(default=None, repr=False)

    @property
    def is_root(self) -> bool:
        """Whether Proxmox takes the session for root@pam: a ticket of that account, never a token."""
        return self.user == "root@pam" and not self.token_id

    def connect(self, subject: str) -> ProxmoxAPI:
        """A session whose certificate is verified; raises ApiError with one sentence."""
        credentials: dict[str, Any] = (
            {"token_name": self.token_id, "token_value": self.token_secret}
            if self.token_id
            else {"password": self.password}
        )
        # From Python 3.13 on urllib3 also asks whether an authority keeps to RFC 5280, and the one that PVE makes for a
        # cluster has no keyUsage. Chain, name and dates are verified all the same. It has to be said to all of urllib3:
        # proxmoxer logs in outside its session, so that no adapter of that one is asked.
        urllib3_ssl.VERIFY_X509_STRICT = ssl.VerifyFlags(0)  # type: ignore[attr-defined]  # its own default, no part of its interface
        if self.host in LOOPBACK:
            given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
            os.environ["no_proxy"] = ",".join(filter(None, [given, self.host]))
        with translated(subject, f"{self.host}:{self.port}"):
            return ProxmoxAPI(
                self.host,
                port=self.port,
                user=self.user,
                verify_ssl=self.ca_path or True,
                timeout=60,
                **credentials,
            )


@contextmanager
def translated(subject: str, where: str = "the Proxmox API") -> Iterator[None]:
    """Turn what proxmoxer and requests raise into an ApiError that a person understands."""
    try:
        yield
    except ResourceException as error:
        raise _refused(subject, error) from error
    except AuthenticationError as error:
        raise _no_login(subject, error) from error
    except requests.exceptions.SSLError as error:
        raise _untrusted(subject, where, str(error)) from error
    except requests.exceptions.JSONDecodeError as error:
        raise _strange(subject, where) from error
    except requests.exceptions.RequestException as error:
        raise _unreachable(subject, where, error) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # the client looked into what is no answer
        raise _strange(subject, where) from error
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


def _untrusted(subject: str, where: str, said: str) -> ApiError:
    """A connection whose certificate is none of the API's, by what the TLS library says."""
    reason = re.search(r"\] (?:certificate verify failed: )?(.+?) \(_ssl\.c", said)
    message = f"TLS with {where} fails: {reason[1] if reason else said[:200]}"
    fix = (
        "compare what it sends (openssl s_client -showcerts) with the authority in proxmox_container_api_ca, which is "
        "/etc/pve/pve-root-ca.pem of the cluster"
    )
    if re.search(r"issuer certificate|first certificate|self.signed", said):
        message = f"the certificate of {where} is not signed by the authority in proxmox_container_api_ca"
        fix = "copy /etc/pve/pve-root-ca.pem of the cluster and name it in proxmox_container_api_ca"
    elif "mismatch" in said:
        message = f"the certificate of {where} is made for other names"
        fix = "write a name or address of the node in proxmox_container_api_host that its certificate has"
    elif "expired" in said:
        message, fix = f"the certificate of {where} has expired", "renew it on the node (pvecm updatecerts --force)"
    elif "WRONG_VERSION" in said:
        message = f"{where} answers without TLS, which the Proxmox API never does"
        fix = "check proxmox_container_api_host and _port"
    return ApiError(Finding("PVE-CERTIFICATE", Severity.ERROR, subject, message, fix))


def _strange(subject: str, where: str) -> ApiError:
    message = f"{where} answers, but not as the Proxmox API does"
    fix = (
        "check proxmox_container_api_host and _port and what stands between (another service, a proxy's page); an "
        "account with a second factor cannot log in with its password: use a token"
    )
    return ApiError(Finding("PVE-ANSWER", Severity.ERROR, subject, message, fix))


def _no_login(subject: str, error: AuthenticationError) -> ApiError:
    """A login that failed; proxmoxer says so whatever the answer was."""
    code = re.search(r"code: (\d{3})", str(error))
    if code and int(code[1]) >= 500:
        return UnclearError(explain(subject, int(code[1]), "nobody could log in"), again=True)
    return ApiError(explain(subject, 401, "authentication failure"))


def _unreachable(subject: str, where: str, error: Exception) -> UnclearError:
    message = f"{where} does not answer ({type(error).__name__})"
    fix = "check proxmox_container_api_host and _port and that pveproxy runs there; in the lab: make lab-up"
    if isinstance(error, requests.exceptions.ProxyError):
        message = f"the proxy of this environment (https_proxy) does not lead to {where}"
        fix = f"have it answered without one: export no_proxy=$no_proxy,{where.rpartition(':')[0]}"
    return UnclearError(Finding("PVE-UNREACHABLE", Severity.ERROR, subject, message, fix), again=True)


def _refused(subject: str, error: ResourceException) -> ApiError:
    """A refusal; what is no plain 4xx may have done its work all the same (field case B04)."""
    reason = error.content or error.status_message
    given = error.errors if isinstance(error.errors, Mapping) else {}
    errors = {key: text for key, text in given.items() if isinstance(text, str)}  # bytes: a proxy's page
    finding = explain(subject, error.status_code, reason, errors)
    if 400 <= error.status_code < 500:
        return ApiError(finding)
    return UnclearError(finding, again=transient(error.status_code, reason))


class Session:
    """Calls of the API: reading ones are repeated while that may help, an expired ticket is renewed once a call."""

    def __init__(self, access: Access, subject: str) -> None:
        self.access, self.subject = access, subject
        self._api: ProxmoxAPI | None = None
        self._reached = False

    def get(self, path: str, **query: Any) -> Any:
        """Read; raises ApiError when the API refuses, or does not answer for `PATIENCE_SECONDS`."""
        return self.patiently(lambda: self._call("get", path, query))

    def send(self, method: str, path: str, **body: Any) -> Any:
        """Change something, once; raises `UnclearError` where nobody knows whether it happened."""
        return self._call(method, path, body)

    def patiently(self, call: Callable[[], Any]) -> Any:
        """Repeat a call that changes nothing, or whose effect was looked at, while it may succeed in a moment.

        An API that never answered before is not waited for: its address is likelier wrong than its node busy.
        """
        end, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE
        while True:
            try:
                return call()
            except UnclearError as error:
                if not error.again or not self._reached or time.monotonic() + pause > end:
                    raise
                time.sleep(pause)
                pause *= 2

    def _connected(self) -> ProxmoxAPI:
        try:
            return self.access.connect(self.subject)
        except UnclearError as error:
            self._reached |= error.finding.code != "PVE-UNREACHABLE"
            raise

    def _call(self, method: str, path: str, parameters: Mapping[str, Any]) -> Any:
        fresh = self._api is None
        if self._api is None:
            self._api = self._connected()
        with translated(self.subject, f"{self.access.host}:{self.access.port}"):
            try:
                answer = getattr(self._api(path), method)(**parameters)
            except (ResourceException, AuthenticationError) as error:
                self._reached = True
                # a ticket lasts two hours, and the client renews it with itself; a refused call has changed nothing, so
                # it may be made again
                refused = isinstance(error, AuthenticationError) or error.status_code == 401
                if not refused or fresh or self.access.token_id:
                    raise
            else:
                self._reached = True
                if isinstance(answer, Mapping) and isinstance(answer.get("errors"), bytes):  # proxmoxer's for no JSON
                    raise TypeError("no JSON")
                return answer
        self._api = None
        return self._call(method, path, parameters)


class Container:
    """One container of one node. notices: what its tasks warned of."""

    def __init__(self, session: Session, node: str, vmid: int) -> None:
        self.session, self.node, self.vmid, self.subject = session, node, vmid, session.subject
        self.path = f"nodes/{node}/lxc/{vmid}"
        self.task_seconds = TASK_SECONDS
        self.notices: list[Finding] = []

    # --- looking

    def release(self) -> str:
        """The release of Proxmox VE, for example ``9.2.11``."""
        return str(self.session.get("version").get("version", ""))

    def config(self) -> dict[str, Any] | None:
        """The configuration with pending changes applied, None when the node has no such container."""
        try:
            return dict(self.session.get(f"{self.path}/config"))
        except ApiError as error:
            if error.finding.code == "PVE-NO-CONTAINER":
                return None
            raise

    def id_taken(self) -> bool:
        """Whether the id belongs to a guest somewhere in the cluster, of any kind."""
        try:
            self.session.get("cluster/nextid", vmid=self.vmid)
        except ApiError as error:
            if error.finding.code in ("PVE-PARAMETER", "PVE-VMID-TAKEN"):
                return True
            raise
        return False

    def others(self) -> dict[int, dict[str, Any]]:
        """Configurations of the node's other containers, by vmid; those that may not be read are left out."""
        found: dict[int, dict[str, Any]] = {}
        for item in self.session.get(f"nodes/{self.node}/lxc"):
            vmid = int(item["vmid"])
            if vmid == self.vmid:
                continue
            try:
                found[vmid] = dict(self.session.get(f"nodes/{self.node}/lxc/{vmid}/config"))
            except ApiError as error:
                if error.finding.code not in ("PVE-NO-CONTAINER", "PVE-FORBIDDEN"):
                    raise
        return found

    @staticmethod
    def in_use(address: str) -> bool:
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
        return bool(self.status()["status"] == "running")

    def stops_late(self) -> bool:
        """Whether it stops after all, though its shutdown was reported as failed; False where nobody can tell."""
        try:
            self._until(lambda: not self.running(), "it did not stop", LATE_SECONDS)
        except ApiError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        """What the node says of it at the moment."""
        return dict(self.session.get(f"{self.path}/status/current"))

    def pending(self) -> list[str]:
        """Keys whose change waits for a restart."""
        return proxmox.pending_keys(self.session.get(f"{self.path}/pending"))

    # --- changing

    def create(self, wanted: Mapping[str, str]) -> None:
        """Create it and wait. A call after which the wanted container exists all the same is a success."""

        def attempt() -> str:
            earlier = set(self._creations())
            try:
                return str(self.session.send("post", f"nodes/{self.node}/lxc", vmid=self.vmid, **wanted))
            except UnclearError:
                if not self._came_to_be(wanted["hostname"], earlier):
                    raise
                return ""

        with serialised(self.session.access.host, self.node):
            self._wait_for(self.session.patiently(attempt))

    def _creations(self) -> list[str]:
        """Tasks of the node that made a container of this id, or still do: known by name, as two clocks may differ."""
        tasks = self.session.get(f"nodes/{self.node}/tasks", vmid=self.vmid, source="all")
        return [str(task["upid"]) for task in tasks if task.get("type") == "vzcreate"]

    def _came_to_be(self, hostname: str, earlier: set[str]) -> bool:
        """Whether a create whose answer was lost made, or makes, our container; raises for anybody else's."""
        end = time.monotonic() + SHOW_SECONDS
        while True:
            for upid in self._creations():
                if upid not in earlier:
                    self.wait(upid)
            self.wait_unlocked()  # until then it has no name
            actual = self.config()
            if actual is not None:
                owner = proxmox.owner_finding(self.subject, self.vmid, hostname, actual)
                if owner:
                    raise ApiError(owner)
                return True
            if time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS)

    def update(self, plan: proxmox.Plan, digest: str | None, left: Callable[[], proxmox.Plan]) -> None:
        """Send a plan's changes in one call; the digest protects against edits made meanwhile.

        left: looks again and says what still differs, after a call whose outcome is unclear.
        """
        body = {**plan.set, **({"delete": ",".join(plan.delete)} if plan.delete else {})}
        if digest:
            body["digest"] = digest

        def attempt() -> None:
            try:
                self.session.send("put", f"{self.path}/config", **body)
            except UnclearError:
                if left().changes:
                    raise

        self.session.patiently(attempt)

    def power(self, action: str, **body: Any) -> None:
        """``start`` or ``shutdown``, and wait until it is done. body: may give a shutdown its timeout in seconds."""
        seconds = max(self.task_seconds, float(body.get("timeout", 0)) + PATIENCE_SECONDS)
        wanted = "running" if action == "start" else "stopped"

        def attempt() -> str:
            try:
                return str(self.session.send("post", f"{self.path}/status/{action}", **body))
            except UnclearError:
                if self.status()["status"] != wanted:
                    raise
                return ""

        self._wait_for(self.session.patiently(attempt), seconds)
        status = self.status()
        if status["status"] != wanted and (status.get("ha") or {}).get("managed"):
            # the task only asked the cluster's high availability for it
            self._until(lambda: self.status()["status"] == wanted, f"high availability did not {action} it", seconds)

    def destroy(self) -> None:
        """Destroy the stopped container and its volumes, and its place in backup and replication jobs."""

        def attempt() -> str:
            try:
                return str(self.session.send("delete", self.path, purge=1))
            except UnclearError:
                if self.config() is not None:
                    raise
                return ""

        self._wait_for(self.session.patiently(attempt))

    # --- waiting

    def _wait_for(self, upid: str, seconds: float | None = None) -> None:
        """Wait for a task that was begun; none where an answer was lost and its work found done. Not to be repeated
        with what began it: that would begin a second one."""
        if upid:
            self.wait(upid, seconds)

    def wait_unlocked(self) -> None:
        """Wait while another task (for example a create whose client was killed) holds the container."""

        def unlocked() -> bool:
            config = self.config()
            return config is None or config.get("lock") not in LOCKED

        self._until(unlocked, f"container {self.vmid} is still locked by another task")

    def wait(self, upid: str, seconds: float | None = None) -> None:
        """Wait for a task; raises ApiError with the end of its log when it failed. seconds: if not task_seconds."""
        path = f"nodes/{self.node}/tasks/{upid}"
        status: dict[str, Any] = {}

        def stopped() -> bool:
            status.update(self.session.get(f"{path}/status"))
            return status.get("status") == "stopped"

        self._until(stopped, f"task {upid} did not end", seconds)
        result, kind = str(status.get("exitstatus", "")), str(status.get("type", "task"))
        if result == "OK":
            return
        log = [str(line.get("t", "")).strip() for line in self.session.get(f"{path}/log", limit=5000)]
        if not result.startswith("WARNINGS: "):
            raise ApiError(task_failed(self.subject, kind, result, log))
        said = " | ".join(line.removeprefix("WARN:").strip() for line in log if line.startswith("WARN")) or result
        fix = "none is needed where the container works; nesting=1 in proxmox_container_features ends systemd's warning"
        message = f"{kind} succeeded with a warning: {said}"
        self.notices.append(Finding("PVE-TASK-WARNING", Severity.INFO, self.subject, message, fix))

    def _until(self, done: Callable[[], bool], failure: str, seconds: float | None = None) -> None:
        patience = self.task_seconds if seconds is None else seconds
        end = time.monotonic() + patience
        while not done():
            if time.monotonic() > end:
                message = f"{failure} within {patience:.0f} s"
                fix = "look at the task on the node, then run the play again"
                raise ApiError(Finding("PVE-TIMEOUT", Severity.ERROR, self.subject, message, fix))
            time.sleep(POLL_SECONDS)


@contextmanager
def serialised(host: str, node: str) -> Iterator[None]:
    """One creation a node at a time, over all processes of this user on this controller."""
    name = hashlib.sha256(f"{host} {node}".encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"pivot-create-{os.getuid()}-{name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
