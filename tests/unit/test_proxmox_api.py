"""What the API says and how a container's calls survive it, over a session whose answers are given."""

import io
import os

import pytest
import requests
from proxmoxer.backends.https import AuthenticationError
from proxmoxer.core import ResourceException

from pivot.findings import Finding, Severity
from pivot.pve import proxmox, proxmox_api
from pivot.pve.proxmox_api import Access, ApiError, Container, Session, UnclearError, translated

ACCESS = Access("pve1", 8006, "root@pam", None, password="made-up")
WANTED = {"hostname": "llm01", "ostemplate": "local:vztmpl/x", "rootfs": "ct:8", "memory": "2048", "cores": "2"}
RUNNING = {"hostname": "llm01", "memory": 2048, "cores": 2, "unprivileged": 1, "digest": "d1"}


class Clock:
    """Time that passes only while somebody sleeps, so that no busy machine changes what a test sees."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    given = Clock()
    monkeypatch.setattr(proxmox_api, "time", given)
    return given


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
    assert Container.in_use("192.0.2.7") is used


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("certificate verify failed: unable to get local issuer certificate", "not signed by the authority"),
        ("certificate verify failed: Hostname mismatch, certificate is not valid for 'pve'.", "made for other names"),
        ("certificate verify failed: IP address mismatch, certificate is not valid for '192.0.2.1'.", "other names"),
        ("certificate verify failed: certificate has expired", "has expired"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "answers without TLS"),
        ("certificate verify failed: self-signed certificate in certificate chain", "not signed by the authority"),
        (
            "Max retries exceeded with url: / (Caused by SSLError(SSLCertVerificationError(1, '[SSL: "
            "CERTIFICATE_VERIFY_FAILED] certificate verify failed: EE certificate key too weak (_ssl.c:1010)')))",
            "TLS with pve1:8006 fails: EE certificate key too weak",
        ),
        ("[SSL: UNEXPECTED_EOF] EOF occurred in violation of protocol (_ssl.c:1006)", "fails: EOF occurred"),
        ("no cipher match", "TLS with pve1:8006 fails: no cipher match"),
    ],
)
def test_what_is_wrong_with_a_certificate_is_told_apart(said, words):
    with pytest.raises(ApiError) as caught, translated("llm01", "pve1:8006"):
        raise requests.exceptions.SSLError(said)
    assert caught.value.finding.code == "PVE-CERTIFICATE"
    assert words in caught.value.finding.message
    assert "pve1:8006" in caught.value.finding.message


def test_a_failed_task_is_explained_by_any_line_of_its_log():
    log = [f"tar: ./usr/lib/{number}: Cannot write: No space left on device" for number in range(3)]
    log += ["tar: Exiting with failure status"] * 3 + ["  Logical volume removed.", "TASK ERROR: x"]
    with pytest.raises(ApiError) as caught:
        Container(Scripted(task("command 'tar' failed: exit code 2", *log)), "pve1", 101).wait("UPID:x")
    assert caught.value.finding.code == "PVE-STORAGE-FULL"
    assert caught.value.finding.message.count("tar: ") == 1 + 2  # the line that says why, and the last ones


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (requests.exceptions.SSLError("self-signed"), "PVE-CERTIFICATE"),
        (requests.exceptions.ConnectionError("refused"), "PVE-UNREACHABLE"),
        (OSError("Could not find a suitable TLS CA certificate bundle"), "PVE-CERTIFICATE"),
        (ResourceException(403, "Forbidden", ""), "PVE-FORBIDDEN"),
        (ResourceException(502, "Bad Gateway", "", {"errors": b"<html>"}), "PVE-REFUSED"),  # a proxy's page
        (requests.exceptions.JSONDecodeError("x", "", 0), "PVE-ANSWER"),
        (KeyError("data"), "PVE-ANSWER"),
        (AuthenticationError("Couldn't authenticate user: x to y code: 401"), "PVE-LOGIN"),
        (AuthenticationError("Couldn't authenticate user: x to y code: 595"), "PVE-NODE-OFFLINE"),
        (AuthenticationError("Couldn't authenticate user: missing Two Factor Authentication (TFA)"), "PVE-LOGIN"),
    ],
)
def test_what_the_client_raises_becomes_one_finding(raised, code):
    with pytest.raises(ApiError) as caught, translated("llm01", "pve1:8006"):
        raise raised
    assert caught.value.finding.code == code


class Scripted(Session):
    """A session whose answers are given: path → answer, an exception, or a list of them, one a call."""

    def __init__(self, answers, access=ACCESS):
        super().__init__(access, "llm01")
        self._reached = True
        self.answers, self.calls = answers, []

    def _call(self, method, path, parameters):
        self.calls.append((method, path, dict(parameters)))
        answer = self.answers[path]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def lost(reason="got timeout", status=500):
    with pytest.raises(ApiError) as caught, translated("llm01"):
        raise ResourceException(status, reason, "")
    return caught.value


TASK = "nodes/pve1/tasks/UPID:x"


def task(exitstatus, *log):
    return {
        f"{TASK}/status": {"status": "stopped", "exitstatus": exitstatus, "type": "vzcreate"},
        f"{TASK}/log": [[{"t": line} for line in log]],  # one answer, which is a list
    }


def test_a_task_that_ended_well_leaves_nothing_to_say():
    container = Container(Scripted(task("OK")), "pve1", 101)
    container.wait("UPID:x")
    assert container.notices == []


def test_a_task_with_warnings_is_a_success_that_shows_them():
    log = ("extracting archive", "WARN: Systemd 257 detected. You may need to enable nesting.", "TASK WARNINGS: 1")
    container = Container(Scripted(task("WARNINGS: 1", *log)), "pve1", 101)
    container.wait("UPID:x")
    (notice,) = container.notices
    assert (notice.code, notice.severity) == ("PVE-TASK-WARNING", Severity.INFO)
    assert notice.message == (
        "vzcreate succeeded with a warning: Systemd 257 detected. You may need to enable nesting."
    )


@pytest.mark.parametrize(
    ("result", "log", "code", "words"),
    [
        ("command failed", "TASK ERROR: no space left on device", "PVE-STORAGE-FULL", "no space left"),
        ("unable to create CT 101 - volume 'local:vztmpl/nope.tar.zst' does not exist", "", "PVE-TEMPLATE", "nope"),
        ("unexpected status", "", "PVE-TASK-FAILED", "vzcreate failed: unexpected status"),
        ("cluster not ready - no quorum?", "", "PVE-NO-QUORUM", "quorum"),
    ],
)
def test_a_failed_task_ends_at_once_with_the_end_of_its_log(result, log, code, words):
    with pytest.raises(ApiError) as caught:
        Container(Scripted(task(result, "extracting archive", log)), "pve1", 101).wait("UPID:x")
    assert caught.value.finding.code == code
    assert words in caught.value.finding.message
    assert "\n" not in caught.value.finding.message


def test_an_endless_task_is_named_and_not_waited_for_for_ever(clock):
    container = Container(Scripted({f"{TASK}/status": {"status": "running"}}), "pve1", 101)
    with pytest.raises(ApiError) as caught:
        container.wait("UPID:x")
    assert 600 < clock.now < 601
    assert caught.value.finding.code == "PVE-TIMEOUT"
    assert "UPID:x" in caught.value.finding.message


CREATE, CONFIG, TASKS = "nodes/pve1/lxc", "nodes/pve1/lxc/101/config", "nodes/pve1/tasks"


def absent():
    return lost("Configuration file 'nodes/pve1/lxc/101.conf' does not exist")


def creating(post, config, tasks=()):
    return Scripted({CREATE: post, CONFIG: config, TASKS: list(tasks) or [[]], **task("OK")})


def posts(session):
    return [call for call in session.calls if call[0] == "post"]


LOCK = "unable to create CT 101 - can't lock file '/run/lock/lxc/pve-config-101.lock' - got timeout"


def test_field_case_b04_a_container_that_came_to_be_is_adopted():
    session = creating(lost(LOCK), {"hostname": "llm01"})
    Container(session, "pve1", 101).create(WANTED)
    assert len(posts(session)) == 1


def test_field_case_b04_another_owner_is_not_adopted_and_named():
    session = creating(lost(LOCK), {"hostname": "db01"})
    with pytest.raises(ApiError) as caught:
        Container(session, "pve1", 101).create(WANTED)
    assert caught.value.finding.code == "PVE-VMID-TAKEN"
    assert "'db01'" in caught.value.finding.message
    assert len(posts(session)) == 1


def test_a_container_that_is_still_made_has_a_lock_and_no_name_yet():
    made = {"lock": "create", "digest": "d0"}
    session = creating(lost("Broken pipe", 596), [made, made, {"hostname": "llm01"}])
    Container(session, "pve1", 101).create(WANTED)
    assert len(posts(session)) == 1


def test_a_create_that_never_began_is_sent_again():
    session = creating([lost(LOCK), "UPID:x"], absent())
    Container(session, "pve1", 101).create(WANTED)
    assert len(posts(session)) == 2


def made(upid="UPID:x"):
    return [{"type": "vzcreate", "starttime": 1, "upid": upid}]


def test_a_create_whose_task_still_works_is_waited_for():
    session = creating(lost("Connection refused", 595), [absent(), {"hostname": "llm01"}], [[], made()])
    Container(session, "pve1", 101).create(WANTED)
    assert len(posts(session)) == 1
    assert ("get", f"{TASK}/status", {}) in session.calls


def test_a_task_that_made_the_container_earlier_is_not_taken_for_this_one():
    """Whatever the node's clock says: it may be minutes off the controller's."""
    session = creating([lost(LOCK), "UPID:x"], absent(), [made("UPID:old")])
    Container(session, "pve1", 101).create(WANTED)
    assert len(posts(session)) == 2
    assert not [path for _, path, _ in session.calls if "UPID:old" in path]


def test_a_refused_create_is_not_sent_again():
    session = creating(lost("Permission check failed (/, Sys.Modify)", 403), absent())
    with pytest.raises(ApiError):
        Container(session, "pve1", 101).create(WANTED)
    assert len(posts(session)) == 1


def test_a_create_that_is_refused_for_good_with_500_is_not_sent_again():
    session = creating(lost("storage 'nope' does not exist"), absent())
    with pytest.raises(ApiError) as caught:
        Container(session, "pve1", 101).create(WANTED)
    assert caught.value.finding.code == "PVE-STORAGE"
    assert len(posts(session)) == 1


def test_patience_ends_with_the_last_refusal(clock):
    session = creating(lost("No route to host", 595), absent())
    with pytest.raises(ApiError) as caught:
        Container(session, "pve1", 101).create(WANTED)
    assert caught.value.finding.code == "PVE-NODE-OFFLINE"
    # six times 3 s of looking, and pauses of 0.5, 1, 2, 4 and 8 s; one of 16 s would end after 45 s
    assert len(posts(session)) == 6
    assert 33.5 <= clock.now < 35.5


def test_an_api_that_never_answered_is_not_waited_for():
    session = Scripted({"version": UnclearError(Finding("PVE-UNREACHABLE", Severity.ERROR, "x", "", ""), again=True)})
    session._reached = False
    with pytest.raises(ApiError):
        session.get("version")
    assert len(session.calls) == 1


class Renewed(Session):
    """A session whose API refuses the first ticket after a while."""

    def __init__(self, refusals):
        self.made = []
        session = self

        class Api:
            def __call__(self, path):
                return self

            def get(self, **_):
                if refusals:
                    refusal = refusals.pop()
                    if isinstance(refusal, Exception):
                        raise refusal
                    raise ResourceException(refusal, "permission denied - invalid PVE ticket", "")
                return {"version": "9.2.11"}

        class Given(Access):
            def connect(self, subject):
                session.made.append(subject)
                return Api()

        super().__init__(Given("pve1", 8006, "root@pam", None, password="made-up"), "llm01")


def test_an_expired_ticket_is_renewed_once():
    session = Renewed([])
    session.get("version")
    refusing = Renewed([401])
    refusing._api = refusing.access.connect("llm01")  # a ticket of an hour ago
    assert refusing.get("version") == {"version": "9.2.11"}
    assert (len(session.made), len(refusing.made)) == (1, 2)


def test_a_ticket_that_can_no_longer_be_renewed_is_made_anew():
    refusing = Renewed([AuthenticationError("Couldn't authenticate user: x to y code: 401")])
    refusing._api = refusing.access.connect("llm01")  # an hour ago: the client renews it with itself
    assert refusing.get("version") == {"version": "9.2.11"}
    assert len(refusing.made) == 2


def test_credentials_that_are_wrong_are_not_tried_twice():
    session = Renewed([401, 401])
    with pytest.raises(ApiError) as caught:
        session.get("version")
    assert caught.value.finding.code == "PVE-LOGIN"
    assert len(session.made) == 1


def changing(put, config):
    return Scripted({CONFIG: [put, *config] if isinstance(config, list) else [put, config]})


PLAN = {**WANTED, "memory": "4096"}


def test_a_change_is_one_call_with_everything_and_the_digest():
    session = Scripted({CONFIG: None})
    plan = proxmox.plan("llm01", PLAN, {**RUNNING, "dev0": "/dev/nvidia0"})
    Container(session, "pve1", 101).update(plan, "d1", lambda: plan)
    assert session.calls == [("put", CONFIG, {"memory": "4096", "delete": "dev0", "digest": "d1"})]


def test_a_change_whose_answer_was_lost_is_looked_for_before_it_is_sent_again():
    session = Scripted({CONFIG: lost("timeout", 596)})
    plan = proxmox.plan("llm01", PLAN, RUNNING)
    Container(session, "pve1", 101).update(plan, "d1", lambda: proxmox.plan("llm01", PLAN, PLAN))
    assert len(session.calls) == 1


def test_a_change_that_was_not_made_is_sent_again():
    session = Scripted({CONFIG: [lost("timeout", 596), None]})
    plan = proxmox.plan("llm01", PLAN, RUNNING)
    Container(session, "pve1", 101).update(plan, "d1", lambda: plan)
    assert len(session.calls) == 2


def test_a_changed_digest_is_never_overwritten():
    session = Scripted({CONFIG: lost("detected modified configuration - file changed by other user? Try again.")})
    plan = proxmox.plan("llm01", PLAN, RUNNING)
    with pytest.raises(ApiError) as caught:
        Container(session, "pve1", 101).update(plan, "d1", lambda: plan)
    assert caught.value.finding.code == "PVE-CHANGED-MEANWHILE"
    assert len(session.calls) == 1


STATUS, START = "nodes/pve1/lxc/101/status/current", "nodes/pve1/lxc/101/status/start"


@pytest.mark.parametrize(("now", "starts"), [("running", 1), ("stopped", 2)])
def test_a_start_whose_answer_was_lost_is_looked_for_before_it_is_sent_again(now, starts):
    session = Scripted({START: [lost("timeout", 596), "UPID:x"], STATUS: {"status": now}, **task("OK")})
    Container(session, "pve1", 101).power("start")
    assert len(posts(session)) == starts


def status(now, managed=1):
    return {"status": now, "ha": {"managed": managed}}


def test_a_start_that_high_availability_makes_later_is_waited_for():
    session = Scripted(
        {START: "UPID:x", STATUS: [status("stopped"), status("stopped"), status("running")], **task("OK")}
    )
    Container(session, "pve1", 101).power("start")
    assert [call[1] for call in session.calls].count(STATUS) == 3


def test_without_high_availability_the_task_is_the_end():
    session = Scripted({START: "UPID:x", STATUS: status("stopped", managed=0), **task("OK")})
    Container(session, "pve1", 101).power("start")
    assert [call[1] for call in session.calls].count(STATUS) == 1


def test_a_start_that_high_availability_never_makes_is_reported():
    container = Container(Scripted({START: "UPID:x", STATUS: status("stopped"), **task("OK")}), "pve1", 101)
    with pytest.raises(ApiError) as caught:
        container.power("start")
    assert caught.value.finding.code == "PVE-TIMEOUT"
    assert "high availability" in caught.value.finding.message


def test_a_shutdown_is_waited_for_as_long_as_it_was_given():
    session = Scripted({"nodes/pve1/lxc/101/status/shutdown": "UPID:x", STATUS: status("stopped"), **task("OK")})
    waited = []
    container = Container(session, "pve1", 101)
    container.wait = lambda upid, seconds: waited.append(seconds)
    container.task_seconds = 10
    container.power("shutdown", timeout=180)
    container.power("shutdown")
    assert waited == [225, 45]


def test_a_container_that_stops_late_is_watched_for_a_while(clock):
    running, stopped = status("running"), status("stopped")
    assert Container(Scripted({STATUS: [running, running, stopped]}), "pve1", 101).stops_late()
    assert clock.now < 10
    assert not Container(Scripted({STATUS: running}), "pve1", 101).stops_late()
    assert 60 < clock.now < 75


# --- proxies


def test_a_proxy_that_does_not_lead_to_the_api_is_named():
    with pytest.raises(ApiError) as caught, translated("llm01", "pve1:8006"):
        raise requests.exceptions.ProxyError("Unable to connect to proxy")
    assert caught.value.finding.message == "the proxy of this environment (https_proxy) does not lead to pve1:8006"
    assert "export no_proxy=$no_proxy,pve1" in caught.value.finding.fix


@pytest.mark.parametrize(
    ("host", "given", "then"),
    [
        ("127.0.0.1", {}, "127.0.0.1"),
        ("127.0.0.1", {"NO_PROXY": "example.org"}, "example.org,127.0.0.1"),
        ("pve1", {"no_proxy": "example.org"}, "example.org"),
    ],
)
def test_loopback_is_asked_without_a_proxy(host, given, then, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "")  # put back afterwards
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(proxmox_api, "ProxmoxAPI", lambda *_, **__: None)
    Access(host, 8006, "root@pam", None, password="made-up").connect("llm01")
    assert os.environ["no_proxy"] == then
