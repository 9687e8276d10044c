"""What `ensure` sends, asked of a container that only remembers; the real one is in molecule/proxmox_container."""

import io

import pytest
import requests
from proxmoxer.backends.https import AuthenticationError
from proxmoxer.core import ResourceException

from pivot import proxmox, proxmox_api
from pivot.findings import Finding, Severity
from pivot.proxmox_api import Access, ApiError, Container, Session, UnclearError, translated
from pivot.proxmox_ensure import Request, ensure

ACCESS = Access("pve1", 8006, "root@pam", None, password="made-up")
WANTED = {"hostname": "llm01", "ostemplate": "local:vztmpl/x", "rootfs": "ct:8", "memory": "2048", "cores": "2"}
RUNNING = {"hostname": "llm01", "memory": 2048, "cores": 2, "unprivileged": 1, "digest": "d1"}


class Remembering(Container):
    """A container whose state is a dictionary and whose calls are a list."""

    def __init__(self, config, *, running=True, pending=(), taken=False, others=None):
        super().__init__(Session(ACCESS, "llm01"), "pve1", 101)
        self._others = others or {}
        self._config, self._running, self._pending, self._taken = config, running, list(pending), taken
        self.sent = []
        self.used = {"192.0.2.7"}

    def release(self):
        return "9.2.11"

    def config(self):
        return self._config

    def id_taken(self):
        return self._taken

    def in_use(self, address):
        return address in self.used

    def running(self):
        return self._running

    def others(self):
        return self._others

    def pending(self):
        return self._pending

    def create(self, wanted):
        self.sent.append("create")
        self._config = dict(wanted)

    def update(self, plan, digest, left):
        self.sent.append(("update", plan.set, plan.delete, digest))

    def power(self, action, **body):
        self.sent.append(action)
        self._running = action == "start"

    def destroy(self):
        self.sent.append("destroy")


def run(container, wanted=WANTED, *, check=False, **request):
    return ensure(container, Request(wanted=wanted, **request), check=check)


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
    assert Container.in_use("192.0.2.7") is used


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
        def update(self, plan, digest, left):
            raise ApiError(Finding("PVE-DEVICE-MISSING", Severity.ERROR, "llm01", "no such device", ""))

    container = Refusing(RUNNING)
    with pytest.raises(ApiError, match="no such device"):
        run(container, {**WANTED, "dev0": "/dev/nvidia7"}, allow_restart=True)
    assert container.sent == ["shutdown", "start"]


def test_what_waits_for_a_restart_is_named_and_waits_on_without_consent():
    container = Remembering(RUNNING, pending=["features"])
    outcome = run(container)
    assert [(finding.code, finding.severity) for finding in outcome.findings] == [("PVE-PENDING", Severity.WARNING)]
    assert "features" in outcome.findings[0].message
    assert not outcome.changed
    assert container.sent == []
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


def test_an_endless_task_is_named_and_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(proxmox_api, "POLL_SECONDS", 0.01)
    container = Container(Scripted({f"{TASK}/status": {"status": "running"}}), "pve1", 101)
    container.task_seconds = 0.05
    with pytest.raises(ApiError) as caught:
        container.wait("UPID:x")
    assert caught.value.finding.code == "PVE-TIMEOUT"
    assert "UPID:x" in caught.value.finding.message


CREATE, CONFIG, TASKS = "nodes/pve1/lxc", "nodes/pve1/lxc/101/config", "nodes/pve1/tasks"


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(proxmox_api, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(proxmox_api, "SHOW_SECONDS", 0.02)
    monkeypatch.setattr(proxmox_api, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(proxmox_api, "PATIENCE_SECONDS", 0.1)


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


def test_patience_ends_with_the_last_refusal():
    session = creating(lost("No route to host", 595), absent())
    with pytest.raises(ApiError) as caught:
        Container(session, "pve1", 101).create(WANTED)
    assert caught.value.finding.code == "PVE-NODE-OFFLINE"
    assert len(posts(session)) > 1


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
                    raise ResourceException(refusals.pop(), "permission denied - invalid PVE ticket", "")
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


def test_a_container_that_stays_locked_is_reported():
    container = Remembering({**RUNNING, "lock": "create"})
    container.task_seconds = 0.05
    with pytest.raises(ApiError) as caught:
        run(container)
    assert caught.value.finding == Finding(
        "PVE-TIMEOUT",
        Severity.ERROR,
        "llm01",
        "container 101 is still locked by another task within 0 s",
        "look at the task on the node, then run the play again",
    )


# --- states


@pytest.mark.parametrize(
    ("state", "running", "sent"),
    [
        ("present", True, []),
        ("present", False, []),
        ("started", False, ["start"]),
        ("stopped", True, ["shutdown"]),
        ("stopped", False, []),
        ("restarted", True, ["shutdown", "start"]),
        ("restarted", False, ["start"]),
    ],
)
def test_each_state_sends_only_what_it_needs(state, running, sent):
    container = Remembering(RUNNING, running=running)
    outcome = run(container, state=state, allow_restart=True)
    assert container.sent == sent
    assert outcome.changed is bool(sent)


def test_a_restart_that_is_asked_for_needs_consent_too():
    container = Remembering(RUNNING)
    assert [finding.code for finding in run(container, state="restarted").findings] == ["PVE-RESTART-NEEDED"]
    assert container.sent == []


def test_present_and_stopped_make_a_missing_container_without_starting_it():
    for state in ("present", "stopped"):
        container = Remembering(None)
        run(container, state=state)
        assert container.sent == ["create"]


def test_absent_needs_vmid_and_hostname_by_name():
    for confirm in ("", "101", "101 db01", "102 llm01"):
        container = Remembering(RUNNING)
        outcome = run(container, state="absent", confirm=confirm)
        assert [finding.code for finding in outcome.findings] == ["PVE-UNCONFIRMED"]
        assert '"101 llm01"' in outcome.findings[0].fix
        assert container.sent == []


def test_absent_stops_and_destroys_what_is_ours():
    container = Remembering(RUNNING)
    assert run(container, state="absent", confirm="101 llm01").removed
    assert container.sent == ["shutdown", "destroy"]


def test_absent_never_touches_a_protected_or_a_foreign_container():
    for config, code in (({**RUNNING, "protection": 1}, "PVE-PROTECTED"), ({"hostname": "db01"}, "PVE-VMID-TAKEN")):
        container = Remembering(config)
        outcome = run(container, state="absent", confirm="101 llm01")
        assert [finding.code for finding in outcome.findings] == [code]
        assert container.sent == []


def test_absent_in_check_mode_sends_nothing_and_where_there_is_none_nothing_changes():
    container = Remembering(RUNNING)
    assert run(container, state="absent", confirm="101 llm01", check=True).changed
    assert container.sent == []
    assert not run(Remembering(None), state="absent").changed


class Lasting(Remembering):
    """A container whose node takes a change only at the next start."""

    def update(self, plan, digest, left):
        super().update(plan, digest, left)
        self._pending = list(plan.set)


def test_a_change_that_the_node_could_not_make_at_once_needs_a_restart_in_the_same_run():
    container = Lasting(RUNNING)
    assert run(container, {**WANTED, "memory": "4096"}, allow_restart=True).restarted
    assert container.sent[1:] == ["shutdown", "start"]
    container = Lasting(RUNNING)
    outcome = run(container, {**WANTED, "memory": "4096"})
    assert [finding.code for finding in outcome.findings] == ["PVE-PENDING"]
    assert not outcome.restarted


# --- what only root@pam may set

FOR_ROOT = {
    **WANTED,
    "dev0": "/dev/nvidia0,mode=0666",
    "features": "nesting=1,keyctl=1",
    "mp0": "/srv/models,mp=/models",
    "mp1": "fast:700,mp=/data",
    "hookscript": "local:snippets/gpu.sh",
}


def test_a_token_alone_is_refused_before_the_first_call_with_all_keys_in_one_finding():
    container = Remembering(None)
    outcome = run(container, FOR_ROOT, is_root=False, root_via="ticket")
    (finding,) = outcome.findings
    assert finding.code == "PVE-ROOT-ONLY"
    assert "dev0, features, mp0, hookscript" in finding.message
    assert container.sent == []


def test_pct_gets_what_only_root_may_set_and_the_start_comes_after_it():
    container = Remembering(None)
    outcome = run(container, FOR_ROOT, is_root=False, root_via="pct")
    assert proxmox.pct_arguments(outcome.deferred) == [
        "--dev0", "/dev/nvidia0,mode=0666", "--features", "nesting=1,keyctl=1", "--mp0", "/srv/models,mp=/models",
        "--hookscript", "local:snippets/gpu.sh",
    ]  # fmt: skip
    assert container.sent == ["create"]
    assert "mp1" in container.config()
    assert "dev0" not in container.config()
    run(container, FOR_ROOT, is_root=False, root_via="pct", power_only=True)
    assert container.sent == ["create"]  # it counts as running here: see the next test for one that does not


def test_a_running_container_is_stopped_for_pct_and_started_by_the_second_call():
    container = Remembering({**RUNNING, "dev0": "/dev/nvidia0"})
    wanted = {**WANTED, "memory": "4096", "dev0": "/dev/nvidia0,mode=0666"}
    outcome = run(container, wanted, is_root=False, root_via="pct", allow_restart=True)
    assert proxmox.pct_arguments(outcome.deferred) == ["--dev0", "/dev/nvidia0,mode=0666"]
    assert container.sent == ["shutdown", ("update", {"memory": "4096"}, (), "d1")]
    run(container, wanted, is_root=False, root_via="pct", power_only=True)
    assert container.sent[2:] == ["start"]


def test_a_removed_device_is_for_root_too():
    container = Remembering({**RUNNING, "dev0": "/dev/nvidia0"}, running=False)
    outcome = run(container, is_root=False, root_via="pct")
    assert proxmox.pct_arguments(outcome.deferred) == ["--delete", "dev0"]


def test_root_itself_and_a_token_with_nothing_special_send_everything_themselves():
    assert run(Remembering(None), FOR_ROOT).deferred is None
    plain = {**WANTED, "features": "nesting=1", "unprivileged": "1"}
    assert run(Remembering(None), plain, is_root=False, root_via="ticket").created


# --- cards


def test_a_card_of_another_container_is_never_given():
    others = {7: {"hostname": "a", "dev3": "/dev/nvidia1"}, 8: {"hostname": "b", "dev0": "/dev/nvidiactl"}}
    container = Remembering(None, others=others)
    outcome = run(container, {**WANTED, "dev0": "/dev/nvidia1,mode=0666", "dev1": "/dev/nvidiactl"})
    (finding,) = outcome.findings
    assert finding.code == "PVE-GPU-TAKEN"
    assert "/dev/nvidia1 belong to container 7 (a)" in finding.message
    assert container.sent == []


@pytest.mark.parametrize(
    ("ours", "theirs", "refused"),
    [("gpu-shared", "x;gpu-shared", False), ("gpu-shared", "x", True), ("x", "gpu-shared", True)],
)
def test_cards_are_shared_only_where_both_say_so(ours, theirs, refused):
    container = Remembering(None, others={7: {"hostname": "a", "dev3": "/dev/nvidia1", "tags": theirs}})
    outcome = run(container, {**WANTED, "dev0": "/dev/nvidia1", "tags": ours})
    assert outcome.refused is refused


def test_a_card_in_raw_lines_counts():
    raw = [["lxc.mount.entry", "/dev/nvidia0 dev/nvidia0 none bind,optional,create=file"]]
    container = Remembering(None, others={7: {"hostname": "a", "lxc": raw}})
    assert run(container, {**WANTED, "dev0": "/dev/nvidia0"}).refused


# --- raw lines, which only the node's file takes

MEMLOCK = ("lxc.prlimit.memlock", "unlimited")
OLD = ["lxc.prlimit.memlock", "65536"]


def test_a_new_container_waits_for_its_raw_lines_before_it_is_started():
    container = Remembering(None)
    outcome = run(container, raw=(MEMLOCK,))
    assert outcome.raw.as_dict() == {"remove": [], "add": [list(MEMLOCK)]}
    assert (outcome.started, container.sent) == (True, ["create"])
    assert outcome.after["lxc"] == "lxc.prlimit.memlock: unlimited"


def test_raw_lines_need_consent_to_a_restart_and_the_start_comes_after_them():
    container = Remembering({**RUNNING, "lxc": [OLD]})
    outcome = run(container, raw=(MEMLOCK,))
    assert [finding.code for finding in outcome.findings] == ["PVE-RESTART-NEEDED"]
    assert "lxc.prlimit.memlock" in outcome.findings[0].message
    assert container.sent == []
    for check in (True, False):
        outcome = run(container, raw=(MEMLOCK,), allow_restart=True, check=check)
        assert (outcome.changed, outcome.restarted) == (True, True)
        assert outcome.raw.as_dict() == {"remove": [OLD], "add": [list(MEMLOCK)]}
        assert (outcome.before, outcome.after) == (
            {"lxc": "lxc.prlimit.memlock: 65536"},
            {"lxc": "lxc.prlimit.memlock: unlimited"},
        )
    assert container.sent == ["shutdown"]
    run(container, raw=(MEMLOCK,), power_only=True)
    assert container.sent == ["shutdown", "start"]


def test_raw_lines_that_stand_there_change_nothing_and_others_are_kept():
    container = Remembering({**RUNNING, "lxc": [list(MEMLOCK), ["lxc.tty.max", "4"]]})
    assert not run(container, raw=(MEMLOCK,)).changed
    assert run(container, remove=("lxc.tty.max",), allow_restart=True).raw.remove == (("lxc.tty.max", "4"),)


def test_raw_lines_that_proxmox_would_drop_are_refused_before_anything_is_sent():
    container = Remembering(None)
    outcome = run(container, raw=(("lxc.prlimits.memlock", "1"),))
    assert [finding.code for finding in outcome.findings] == ["PVE-RAW-LINE"]
    assert container.sent == []


def test_a_token_with_nobody_on_the_node_is_refused_raw_lines_too():
    (finding,) = run(Remembering(None), raw=(MEMLOCK,), is_root=False, root_via="ticket").findings
    assert finding.code == "PVE-ROOT-ONLY"
    assert "lxc.prlimit.memlock" in finding.message


def test_a_card_in_wanted_raw_lines_is_nobody_elses():
    container = Remembering(RUNNING, others={7: {"hostname": "a", "dev3": "/dev/nvidia1"}})
    line = ("lxc.mount.entry", "/dev/nvidia1 dev/nvidia1 none bind,optional,create=file")
    outcome = run(container, raw=(line,), allow_restart=True)
    assert [finding.code for finding in outcome.findings] == ["PVE-GPU-TAKEN"]


# --- what pct finds, and what high availability does later


def test_pct_has_to_find_the_configuration_that_it_was_made_for():
    container = Remembering(None)
    outcome = run(container, {**FOR_ROOT, "digest": "d7"}, is_root=False, root_via="pct")
    assert outcome.digest == "d7"
    assert proxmox.pct_arguments(outcome.deferred, outcome.digest)[-2:] == ["--digest", "d7"]
    assert run(Remembering(None), FOR_ROOT, is_root=False, root_via="pct", check=True).digest == ""


def test_an_unknown_release_is_said_once():
    class Old(Remembering):
        def release(self):
            return "8.1.4"

    assert [finding.code for finding in run(Old(RUNNING)).findings] == ["PVE-RELEASE"]
    assert run(Old(RUNNING), power_only=True).findings == []
    assert run(Remembering(RUNNING)).findings == []


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
    container.task_seconds = 0.02
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
    assert waited == [180.1, 10]
