"""One key changed, of a container that runs with the full set: what is sent, and that check mode foretold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .faults import WANTED, Faults, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .standin import Server

NET, MP0, MP1 = WANTED["net0"], WANTED["mp0"], WANTED["mp1"]
FULL = {**WANTED, "net1": "name=eth1,bridge=vmbr1,firewall=1,tag=5", "cpulimit": "2", "searchdomain": "a.example"}
# key → values that differ from FULL's in one thing each; an empty one means that the key shall go
CHANGES: dict[str, list[str]] = {
    "memory": ["4096"],
    "swap": ["256", "512"],
    "cores": ["3"],
    "cpulimit": ["1.5", ""],
    "onboot": ["0"],
    "protection": ["1"],
    "tags": ["pivot", "pivot;gpu;more", ""],
    "description": ["Other\nlines", "50 %: ä", ""],
    "startup": ["order=3,up=5", "order=2", "order=2,up=5,down=9", ""],
    "nameserver": ["192.0.2.9", "192.0.2.2 192.0.2.1", ""],
    "searchdomain": ["b.example", ""],
    "hookscript": [""],
    "features": ["nesting=1", "keyctl=1", "nesting=1,keyctl=1,fuse=1", "nesting=1,keyctl=1,mount=nfs", ""],
    "net0": [
        *(f"{NET},{more}" for more in ("firewall=1", "tag=7", "mtu=9000", "rate=5", "link_down=1", "ip6=auto")),
        *("name=eth0,bridge=vmbr0", "name=eth0,bridge=vmbr1,ip=dhcp", "name=eth9,bridge=vmbr0,ip=dhcp"),
        f"{NET},hwaddr=BC:24:11:00:00:09",
    ],
    "net1": ["name=eth1,bridge=vmbr1,firewall=1", "name=eth1,bridge=vmbr1,tag=5"],
    "mp0": ["ct:4,mp=/models,backup=1", "ct:4,mp=/models,ro=1,backup=0", "ct:4,mp=/other,backup=0"],
    "mp1": ["/srv/other,mp=/data,ro=1", "/srv/data,mp=/data", "/srv/data,mp=/elsewhere,ro=1"],
    "dev0": [
        *("/dev/nvidia0,mode=0660", "/dev/nvidia0", "/dev/nvidia0,mode=0666,gid=44", "/dev/nvidia0,mode=0666,uid=1000"),
        *("/dev/nvidia0,mode=0666,deny-write=1", "/dev/null,mode=0666", ""),
    ],
    "dev1": ["/dev/nvidiactl", "/dev/nvidiactl,gid=45"],
    "dev2": ["/dev/nvidia-uvm"],
}
ROWS = [(key, value) for key, values in CHANGES.items() for value in values]
# the same as FULL says, in other words
SAME = {
    "memory": "2048.0", "net0": "bridge=vmbr0,ip=dhcp,name=eth0,firewall=0", "features": "keyctl=on,nesting=yes,fuse=0",
    "mp0": "volume=ct:4,backup=0,mp=/models", "mp1": "/srv/data,ro=1,mp=/data,replicate=1", "tags": "gpu,Pivot gpu",
    "dev0": "mode=0666,path=/dev/nvidia0,uid=0,gid=0,deny-write=0", "startup": "up=5,order=2",
    "nameserver": "192.0.2.1,192.0.2.2", "description": "Managed by Pivot\n\n", "protection": "0", "cpulimit": "2.0",
}  # fmt: skip
COLD = ("features", "mp0", "mp1", "dev0", "dev1", "dev2", "nameserver", "searchdomain")
# of these only the node knows whether it can make the change while the container runs; the stand-in cannot
ONLY_THE_NODE_KNOWS = ("net0", "net1")
ROOT = ("dev0", "dev1", "dev2", "mp1", "hookscript")


@pytest.fixture(scope="module")
def full(server: Server) -> Iterator[None]:
    """A container of ours with the full set; the neighbour is as it was in the end."""
    before = server.call("ticket", "GET", "/nodes/pve1/lxc/107/config")
    assert run(server, FULL).created
    yield
    assert server.call("ticket", "GET", "/nodes/pve1/lxc/107/config") == before


@pytest.fixture
def calls(server: Server, hasty: None, full: None) -> Faults:
    """What is sent, from the full set on."""
    run(server, {**FULL, "protection": "0"})
    run(server, FULL)
    assert not run(server, FULL).changed
    server.faults.clear()
    found: Faults = server.faults
    return found


def test_the_full_set_is_settled(server: Server, calls: Faults) -> None:
    assert not run(server, FULL).changed
    assert calls.changing() == []


@pytest.mark.parametrize("key", SAME)
def test_the_same_in_other_words_is_no_change(server: Server, calls: Faults, key: str) -> None:
    assert not run(server, {**FULL, key: SAME[key]}).changed
    assert calls.changing() == []


@pytest.mark.parametrize(("key", "value"), ROWS, ids=[f"{key}={value}" for key, value in ROWS])
def test_a_single_change_is_one_put_with_that_key_alone_and_check_mode_foretells_it(
    server: Server, calls: Faults, key: str, value: str
) -> None:
    wanted = {**FULL, key: value} if value or key != "dev0" else {**FULL, "dev0": FULL["dev1"], "dev1": ""}
    keys = {key} if wanted[key] == value else {"dev0", "dev1"}  # devices have no gaps: the last one goes
    foretold = run(server, wanted, check=True)
    assert calls.changing() == []
    done = run(server, wanted)
    (put,) = [body for method, _, body in calls.calls if method == "PUT"]
    removed = {name for name in put.pop("delete", "").split(",") if name}
    assert put.pop("digest")
    assert put.keys() | removed == keys
    assert removed == {name for name in keys if not wanted[name]}
    for name in ("changed", "created", "started", "stopped", "removed", "before", "after", "deferred", "raw"):
        assert getattr(foretold, name) == getattr(done, name), name
    assert foretold.restarted is (key in COLD)
    assert done.restarted is (key in COLD + ONLY_THE_NODE_KNOWS)
    assert not run(server, wanted).changed


@pytest.mark.parametrize("key", CHANGES)
def test_with_a_token_the_key_goes_one_way_only(server: Server, calls: Faults, key: str) -> None:
    """To the API, or to pct where only root may set it."""
    outcome = run(server, {**FULL, key: CHANGES[key][0]}, check=True, is_root=False, root_via="pct")
    deferred = outcome.deferred.keys if outcome.deferred else ()
    of_root = key in ROOT or key == "features"  # keyctl goes
    assert set(deferred) == ({key} if of_root else set())
    assert set(outcome.before) | set(outcome.after) == {key}


def put_of(calls: Faults) -> dict[str, Any]:
    (body,) = [body for method, _, body in calls.calls if method == "PUT"]
    return body


def test_a_key_by_name_is_removed_alone(server: Server, calls: Faults) -> None:
    for key in ("net1", "mp0", "cpulimit"):
        wanted = {name: value for name, value in FULL.items() if name != key}
        foretold = run(server, wanted, check=True, remove=(key,))
        server.faults.clear()
        done = run(server, wanted, remove=(key,))
        assert put_of(calls).keys() - {"digest"} == {"delete"}
        assert put_of(calls)["delete"] == key
        assert (foretold.changed, foretold.before, foretold.after) == (done.changed, done.before, done.after)
        run(server, FULL)


def test_a_change_keeps_the_volume_and_the_hardware_address(server: Server, calls: Faults) -> None:
    before = dict(server.pve.ct(101).config)
    run(server, {**FULL, "mp0": "ct:4,mp=/models,backup=1", "net0": f"{NET},firewall=1"})
    after = server.pve.ct(101).config
    assert after["mp0"].split(",")[0] == before["mp0"].split(",")[0]
    assert next(part for part in after["net0"].split(",") if part.startswith("hwaddr")) in before["net0"]
    assert after.keys() == before.keys()  # no unused0


STATES = [
    ("started", "started"), ("started", "stopped"), ("stopped", "stopped"), ("stopped", "started"),
    ("started", "restarted"), ("stopped", "restarted"), ("stopped", "present"), ("started", "present"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), STATES)
def test_every_state_is_foretold(server: Server, calls: Faults, before: str, after: str) -> None:
    run(server, FULL, state=before)
    foretold = run(server, FULL, state=after, check=True)
    done = run(server, FULL, state=after)
    assert foretold == done
    assert server.pve.ct(101).status == {"present": before, "restarted": "started"}.get(after, after).replace(
        "started", "running"
    )


def test_creation_and_removal_are_foretold(server: Server, calls: Faults) -> None:
    for request in ({"state": "absent", "confirm": "101 llm01"}, {"state": "started"}):
        foretold = run(server, FULL, check=True, **request)
        done = run(server, FULL, **request)
        assert foretold == done
        assert done.changed
