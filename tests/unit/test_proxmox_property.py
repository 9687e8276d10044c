"""Any wanted configuration against any actual one: what the plan sends makes them agree, and a second plan is empty."""

import os
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pivot.pve import proxmox
from pivot.pve.proxmox_values import DEFAULTS, family, normalised, parse_properties, to_send

SOAK = bool(os.environ.get("PIVOT_SOAK"))
FLAGS = st.sampled_from(["0", "1"])


def strings(fields: dict[str, st.SearchStrategy[str]], first: st.SearchStrategy[str] | None = None) -> Any:
    """Property strings of any of these fields in any order, perhaps with a value in front."""

    def joined(parts: tuple[str | None, dict[str, str], int]) -> str:
        lead, chosen, turn = parts
        items = [f"{name}={value}" for name, value in chosen.items()]
        items = items[turn % len(items) :] + items[: turn % len(items)] if items else items
        return ",".join([*([lead] if lead else []), *items])

    return st.tuples(
        st.none() if first is None else first, st.fixed_dictionaries({}, optional=fields), st.integers(0, 5)
    ).map(joined)


DEVICE = strings(
    {"mode": st.sampled_from(["0660", "0666"]), "uid": FLAGS, "gid": st.sampled_from(["0", "44"]), "deny-write": FLAGS},
    st.sampled_from(["/dev/nvidia0", "/dev/nvidiactl"]),
)
NET = strings(
    {"firewall": FLAGS, "ip": st.sampled_from(["dhcp", "192.0.2.7/24"]), "tag": FLAGS, "link_down": FLAGS},
    st.sampled_from(["name=eth0", "name=eth0,hwaddr=BC:24:11:00:00:01"]),
)
MOUNT = strings(
    {"backup": FLAGS, "ro": FLAGS, "acl": FLAGS},
    st.sampled_from(["fast:700,mp=/models", "fast:vol-1,mp=/models,size=700G", "/srv,mp=/models"]),
)
FEATURES = strings({"nesting": FLAGS, "keyctl": FLAGS, "fuse": st.sampled_from(["on", "off"])})
TEXTS = st.sampled_from(["", "a", "a\n", "b\nc"])
WANTED = st.fixed_dictionaries(
    {"hostname": st.just("llm01")},
    optional={
        "memory": st.sampled_from(["512", "2048"]), "swap": st.sampled_from(["0", "512"]), "onboot": FLAGS,
        "cores": st.sampled_from(["", "2"]), "tags": st.sampled_from(["", "a", "b;A", "a b"]), "description": TEXTS,
        "features": FEATURES, "net0": NET, "mp0": MOUNT, "dev0": DEVICE, "dev1": DEVICE,
        "nameserver": st.sampled_from(["", "192.0.2.1", "192.0.2.1 192.0.2.2"]),
    },
)  # fmt: skip


def kept(key: str, value: str, before: str) -> str:
    """A value as the server keeps it: with what it adds by itself."""
    fields = parse_properties(key, value)
    if family(key) == "net":
        return value if "hwaddr" in fields else f"{value},hwaddr=BC:24:11:99:99:99,type=veth"
    if family(key) == "mp" and fields["volume"] == "fast:700":
        assert not before.startswith("fast:"), "a new volume in the place of another"
        return value.replace("fast:700", "fast:vol-2") + ",size=700G"
    return value + "\n" if key == "description" else value


@settings(max_examples=400, deadline=None, derandomize=not SOAK, database=None)
@given(wanted=WANTED, actual=WANTED)
def test_what_is_sent_makes_them_agree_and_nothing_else_is_sent(wanted: dict[str, str], actual: dict[str, str]) -> None:
    current = {key: kept(key, value, "") for key, value in actual.items() if value}
    plan = proxmox.plan("llm01", wanted, current)
    assert not plan.set.keys() & set(plan.delete)
    assert all(plan.set.values())
    assert set(plan.delete) <= current.keys()
    for key, value in plan.set.items():  # nothing that says the same already
        was = current.get(key, DEFAULTS.get(key, ""))
        assert normalised(key, value) != normalised(key, was) or family(key) not in ("dev", "features")
    after = {key: value for key, value in current.items() if key not in plan.delete}
    after |= {key: kept(key, value, current.get(key, "")) for key, value in plan.set.items()}
    again = proxmox.plan("llm01", wanted, after)
    assert (again.set, again.delete) == ({}, ())
    untouched = current.keys() - plan.set.keys() - set(plan.delete)
    assert {key: after[key] for key in untouched} == {key: current[key] for key in untouched}
    if "net0" in plan.set and "net0" in current and "hwaddr" not in wanted["net0"]:
        assert parse_properties("net0", after["net0"])["hwaddr"] == parse_properties("net0", current["net0"])["hwaddr"]


@settings(max_examples=100, deadline=None, derandomize=not SOAK, database=None)
@given(wanted=WANTED)
def test_a_container_that_was_just_made_needs_nothing(wanted: dict[str, str]) -> None:
    made = {key: kept(key, value, "") for key, value in proxmox.to_create(wanted).items()}
    plan = proxmox.plan("llm01", wanted, made)
    assert (plan.set, plan.delete) == ({}, ())
    assert all(to_send(key, value) for key, value in made.items())
