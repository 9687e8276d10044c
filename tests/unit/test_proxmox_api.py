"""What `ensure` sends, asked of a container that only remembers; the real one is in molecule/proxmox_container."""

import io

import pytest
import requests
from proxmoxer.core import ResourceException

from pivot import proxmox_api
from pivot.findings import Finding, Severity
from pivot.proxmox_api import ApiError, Container, ensure, translated

WANTED = {"hostname": "llm01", "ostemplate": "local:vztmpl/x", "rootfs": "ct:8", "memory": "2048", "cores": "2"}
RUNNING = {"hostname": "llm01", "memory": 2048, "cores": 2, "digest": "d1"}


class Remembering(Container):
    """A container whose state is a dictionary and whose calls are a list."""

    def __init__(self, config, *, running=True, pending=(), taken=False):
        self.node, self.vmid, self.subject = "pve1", 101, "llm01"
        self._config, self._running, self._pending, self._taken = config, running, list(pending), taken
        self.sent = []
        self.used = {"192.0.2.7"}

    def config(self):
        return self._config

    def id_taken(self):
        return self._taken

    def in_use(self, address):
        return address in self.used

    def running(self):
        return self._running

    def pending(self):
        return self._pending

    def create(self, wanted):
        self.sent.append("create")
        self._config = dict(wanted)

    def update(self, plan, digest):
        self.sent.append(("update", plan.set, plan.delete, digest))

    def power(self, action):
        self.sent.append(action)


def run(container, wanted=WANTED, *, check=False, allow_restart=False):
    return ensure(container, wanted, check=check, allow_restart=allow_restart)


def test_as_wanted_nothing_is_sent():
    container = Remembering(RUNNING)
    outcome = run(container)
    assert not outcome.changed
    assert container.sent == []


def test_a_missing_container_is_created_and_started():
    container = Remembering(None)
    outcome = run(container)
    assert (outcome.created, outcome.started) == (True, True)
    assert container.sent == ["create", "start"]


def test_check_mode_sends_nothing_and_shows_no_key():
    container = Remembering(None)
    outcome = run(container, {**WANTED, "ssh-public-keys": "ssh-ed25519 AAAA"}, check=True)
    assert outcome.changed
    assert container.sent == []
    assert "ssh-public-keys" not in outcome.after


def test_an_id_of_another_guest_is_never_created():
    container = Remembering(None, taken=True)
    assert [finding.code for finding in run(container).findings] == ["PVE-VMID-TAKEN"]
    assert container.sent == []


@pytest.mark.parametrize(("ip", "codes"), [("192.0.2.7/24", ["PVE-ADDRESS-IN-USE"]), ("192.0.2.8/24", [])])
def test_an_address_that_another_machine_has_is_never_given(ip, codes):
    container = Remembering(None)
    outcome = run(container, {**WANTED, "net0": f"name=eth0,bridge=vmbr0,ip={ip}"})
    assert [finding.code for finding in outcome.findings] == codes
    assert container.sent == ([] if codes else ["create", "start"])


@pytest.mark.parametrize(
    ("outcome", "used"),
    [(None, True), (ConnectionRefusedError(), True), (TimeoutError(), False), (OSError(113, "No route"), False)],
)
def test_an_address_is_in_use_where_port_22_answers_or_refuses(outcome, used, monkeypatch):
    def connect(place, timeout):
        assert place == ("192.0.2.7", 22)
        assert timeout <= 1
        if outcome:
            raise outcome
        return io.BytesIO()  # has a close, as a connection does

    monkeypatch.setattr(proxmox_api.socket, "create_connection", connect)
    assert Container.in_use(Remembering(None), "192.0.2.7") is used


def test_a_container_of_another_name_is_never_touched():
    container = Remembering({**RUNNING, "hostname": "db01"})
    assert [finding.code for finding in run(container).findings] == ["PVE-VMID-TAKEN"]
    assert container.sent == []


def test_a_change_without_restart_is_sent_with_the_digest():
    container = Remembering({**RUNNING, "memory": 1024})
    outcome = run(container)
    assert container.sent == [("update", {"memory": "2048"}, (), "d1")]
    assert (outcome.before, outcome.after) == ({"memory": "1024"}, {"memory": "2048"})


def test_a_device_needs_consent_to_a_restart():
    wanted = {**WANTED, "dev0": "/dev/nvidia0"}
    container = Remembering(RUNNING)
    outcome = run(container, wanted)
    assert [finding.code for finding in outcome.findings] == ["PVE-RESTART-NEEDED"]
    assert "dev0" in outcome.findings[0].message
    assert container.sent == []
    assert run(container, wanted, allow_restart=True).restarted
    assert container.sent == ["shutdown", ("update", {"dev0": "/dev/nvidia0"}, (), "d1"), "start"]


def test_a_refused_change_leaves_a_running_container_running():
    class Refusing(Remembering):
        def update(self, plan, digest):
            raise ApiError(Finding("PVE-DEVICE-MISSING", Severity.ERROR, "llm01", "no such device", ""))

    container = Refusing(RUNNING)
    with pytest.raises(ApiError, match="no such device"):
        run(container, {**WANTED, "dev0": "/dev/nvidia7"}, allow_restart=True)
    assert container.sent == ["shutdown", "start"]


def test_what_waits_for_a_restart_is_named():
    container = Remembering(RUNNING, pending=["features"])
    outcome = run(container)
    assert "features" in outcome.findings[0].message
    assert run(container, allow_restart=True).restarted
    assert container.sent == ["shutdown", "start"]


def test_a_stopped_container_is_started():
    container = Remembering(RUNNING, running=False)
    assert run(container).started
    assert container.sent == ["start"]


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (requests.exceptions.SSLError("self-signed"), "PVE-CERTIFICATE"),
        (requests.exceptions.ConnectionError("refused"), "PVE-UNREACHABLE"),
        (OSError("Could not find a suitable TLS CA certificate bundle"), "PVE-CERTIFICATE"),
        (ResourceException(403, "Forbidden", ""), "PVE-FORBIDDEN"),
    ],
)
def test_what_the_client_raises_becomes_one_finding(raised, code):
    with pytest.raises(ApiError) as caught, translated("llm01", "pve1:8006"):
        raise raised
    assert caught.value.finding.code == code


class Tasks(Container):
    """Container whose task ends as it is told."""

    def __init__(self, exitstatus):
        self.node, self.vmid, self.subject = "pve1", 101, "llm01"
        answer = {"status": "stopped", "exitstatus": exitstatus, "type": "vzcreate"}
        log = [{"t": "extracting archive"}, {"t": "TASK ERROR: no space left"}]

        class Resource:
            def __getattr__(self, name):
                return self

            def __call__(self, *_):
                return self

            def get(self, **given):
                return log if given else answer

        self.api = Resource()


@pytest.mark.parametrize("exitstatus", ["OK", "WARNINGS: 1"])
def test_a_task_with_a_notice_is_a_success(exitstatus):
    Tasks(exitstatus).wait("UPID:x")


def test_a_failed_task_shows_the_end_of_its_log():
    with pytest.raises(ApiError) as caught:
        Tasks("command failed").wait("UPID:x")
    assert "no space left" in caught.value.finding.message


class Half(Remembering):
    """Field case B04: the create answers with an error, and the container exists all the same."""

    def __init__(self, hostname):
        super().__init__(None)
        self.hostname = hostname

        class Lxc:
            def post(_, **__):  # noqa: N805 - self is the outer container here
                self._config = {"hostname": self.hostname}
                raise ResourceException(500, "unable to create CT 101 - can't lock file - got timeout", "")

        self._lxc = Lxc()

    create = Container.create


def test_field_case_b04_a_container_that_came_to_be_is_adopted():
    outcome = run(Half("llm01"))
    assert outcome.created


def test_field_case_b04_another_owner_is_not_adopted():
    with pytest.raises(ApiError):
        run(Half("db01"))


def test_a_container_that_stays_locked_is_reported(monkeypatch):
    monkeypatch.setattr(proxmox_api, "POLL_SECONDS", 0.01)
    with pytest.raises(ApiError) as caught:
        Remembering({**RUNNING, "lock": "create"}).wait_unlocked(0.05)
    assert caught.value.finding == Finding(
        "PVE-TIMEOUT",
        Severity.ERROR,
        "llm01",
        "container 101 is still locked by another task within 0 s",
        "look at the task on the node, then run the play again",
    )
