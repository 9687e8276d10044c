"""What `ensure` sends, asked of a container that only remembers; the real one is in molecule/proxmox_container."""

import pytest

from pivot.findings import Finding, Severity
from pivot.pve import proxmox
from pivot.pve.proxmox_api import Access, ApiError, Container, Session
from pivot.pve.proxmox_ensure import Request, ensure

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


@pytest.mark.parametrize(("late", "sent"), [(True, ["shutdown", "start"]), (False, ["shutdown"])])
def test_a_shutdown_that_takes_too_long_leaves_no_container_stopped(late, sent):
    class Slow(Remembering):
        def power(self, action, **body):
            super().power(action, **body)
            if action == "shutdown":
                raise ApiError(Finding("PVE-TASK-FAILED", Severity.ERROR, "llm01", "it did not stop in time", ""))

        def stops_late(self):
            return late

    container = Slow(RUNNING)
    with pytest.raises(ApiError, match="did not stop in time"):
        run(container, {**WANTED, "dev0": "/dev/nvidia0"}, allow_restart=True)
    assert container.sent == sent
    stopped = Slow(RUNNING)
    with pytest.raises(ApiError, match="did not stop in time"):
        run(stopped, state="stopped", allow_restart=True)
    assert stopped.sent == ["shutdown"]


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


@pytest.mark.parametrize(
    ("state", "afterwards"),
    [
        ("present", (True, False, False)), ("started", (True, True, True)), ("restarted", (True, True, True)),
        ("stopped", (False, False, False)), ("absent", (False, False, False)),
    ],
)  # fmt: skip
def test_whether_it_runs_afterwards_is_told_and_foretold(state, afterwards):
    """Of one that runs, one that is stopped, and none: there nobody can connect in check mode, which starts nothing."""
    for before, expected in zip(((RUNNING, True), (RUNNING, False), (None, False)), afterwards, strict=True):
        for check in (True, False):
            container = Remembering(before[0], running=before[1])
            outcome = run(container, state=state, allow_restart=True, confirm="101 llm01", check=check)
            assert outcome.running is expected
            assert outcome.reachable(check=check) is (expected and (before[1] or not check))


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
    for config, code in (({**RUNNING, "protection": 1.0}, "PVE-PROTECTED"), ({"hostname": "db01"}, "PVE-VMID-TAKEN")):
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


@pytest.mark.parametrize(
    ("key", "value", "waits"),
    [
        ("memory", "4096", False), ("cores", "4", False), ("cpulimit", "2", False), ("tags", "a", False),
        ("hookscript", "local:snippets/x", False), ("net0", "name=eth0", False), ("onboot", "1", False),
        ("nameserver", "192.0.2.1", True), ("timezone", "host", True), ("cmode", "console", True), ("tty", "1", True),
        ("something-newer", "1", True),
    ],
)  # fmt: skip
def test_what_a_running_container_takes_only_at_its_next_start_is_known_beforehand(key, value, waits):
    for check in (True, False):
        outcome = run(Lasting(RUNNING) if waits else Remembering(RUNNING), {**WANTED, key: value}, check=check)
        assert [finding.code for finding in outcome.findings] == (["PVE-PENDING"] if waits else [])
        outcome = run(Remembering(RUNNING), {**WANTED, key: value}, allow_restart=True, check=check)
        assert outcome.restarted is waits


def test_a_container_that_is_stopped_in_this_run_lets_nothing_wait():
    wanted = {**WANTED, "nameserver": "192.0.2.1", "dev0": "/dev/nvidia0"}
    outcome = run(Remembering(RUNNING, pending=["features"]), wanted, state="stopped")
    assert (outcome.findings, outcome.stopped, outcome.restarted) == ([], True, False)


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


def test_a_bind_mount_for_pct_comes_before_the_protection_that_would_refuse_it():
    wanted = {**WANTED, "unprivileged": "1", "mp0": "/srv/models,mp=/models", "protection": "1"}
    container = Remembering(None)
    outcome = run(container, wanted, is_root=False, root_via="pct")
    assert "protection" not in container.config()
    assert proxmox.pct_arguments(outcome.deferred) == ["--mp0", "/srv/models,mp=/models", "--protection", "1"]
    container = Remembering(RUNNING, running=False)
    outcome = run(container, {**wanted, "memory": "4096"}, is_root=False, root_via="pct")
    assert proxmox.pct_arguments(outcome.deferred) == ["--mp0", "/srv/models,mp=/models", "--protection", "1"]
    assert container.sent[0] == ("update", {"memory": "4096"}, (), "d1")
    plain = run(Remembering(RUNNING), {**WANTED, "protection": "1"}, is_root=False, root_via="pct")
    assert plain.deferred is None
    lifted = Remembering({**RUNNING, "protection": 1}, running=False)  # that comes first, so that the mount is taken
    run(lifted, {**wanted, "protection": "0"}, is_root=False, root_via="pct")
    assert lifted.sent[0] == ("update", {"protection": "0"}, (), "d1")


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


def test_a_template_keeps_its_lines_and_no_card():
    container = Remembering(None, others={7: {"hostname": "golden", "dev0": "/dev/nvidia0", "template": 1}})
    assert not run(container, {**WANTED, "dev0": "/dev/nvidia0"}).refused


def test_a_card_is_seen_wherever_its_path_stands():
    container = Remembering(None, others={7: {"hostname": "a", "dev3": "mode=0666,/dev/nvidia1"}})
    assert run(container, {**WANTED, "dev0": "path=/dev/nvidia1"}).refused


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


def test_what_has_to_be_started_again_after_the_node_is_told_by_the_first_call():
    """The second one sees a stopped container, and by the state alone would leave a present one so."""
    container = Remembering(RUNNING)
    assert run(container, raw=(MEMLOCK,), state="present", allow_restart=True).running
    assert container.sent == ["shutdown"]
    assert not run(Remembering(RUNNING, running=False), raw=(MEMLOCK,), state="present").running
    assert run(Remembering(None), raw=(MEMLOCK,)).running


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
