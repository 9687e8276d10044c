"""Machines that serve together: what fits is silent, every fault has its name."""

import pytest

from pivot.inventory import nodes

MEETING = "192.0.2.11:25000"


def machine(number, **changes):
    flags = {"nnodes": 2, "node-rank": number, "dist-init-addr": MEETING, "tp-size": 16, **changes.pop("flags", {})}
    values = {
        "ansible_host": f"192.0.2.{11 + number}",
        "sglang_server_launch": {name: value for name, value in flags.items() if value is not None},
        "sglang_engine_version": "0.5.23",
        "sglang_server_model_path": "/models/t",
        **changes,
    }
    return nodes.node(f"llm0{number + 1}", values)


def pair(first=None, second=None):
    return [machine(0, **(first or {})), machine(1, **(second or {}))]


def found(machines):
    return [f"{item.code} {item.severity} {item.subject}: {item.message}" for item in nodes.check(machines)]


def test_two_that_fit_are_silent():
    assert found(pair()) == []
    assert found(pair({"flags": {"node-rank": None}})) == []  # 0 where nothing is said
    named = {"flags": {"dist-init-addr": None, "nccl-init-addr": "llm01:25000"}}
    assert found(pair(named, named)) == []
    assert (
        found(
            [
                machine(0, flags={"nnodes": None, "dist-init-addr": None}),
                machine(1, flags={"nnodes": "1", "node-rank": "0"}),
            ]
        )
        == []
    )


def test_two_groups_in_one_inventory():
    other = {"dist-init-addr": "192.0.2.13:25000"}
    four = [*pair(), machine(2, flags={**other, "node-rank": 0}), machine(3, flags={**other, "node-rank": 1})]
    assert found(four) == []


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {"node-rank": 0}, "LAUNCH-NODES-RANK error llm01, llm02: node-rank 0 is that of llm01 and llm02 (0 whe"),
        ({}, {"node-rank": 2}, "LAUNCH-NODES-RANK error llm02: sglang_server_launch.node-rank is '2' of 2"),
        ({}, {"node-rank": "one"}, "LAUNCH-NODES-RANK error llm02: sglang_server_launch.node-rank is 'one' of 2"),
        ({}, {"nnodes": 3}, "LAUNCH-NODES-COUNT error llm01, llm02: nnodes differs among the machines that meet at"),
        ({"nnodes": 4}, {"nnodes": 4}, "LAUNCH-NODES-COUNT error llm01, llm02: nnodes is 4, but 2 of this inventory"),
        ({"nnodes": "two"}, {"nnodes": None, "node-rank": 0}, "LAUNCH-NODES-COUNT error llm01: sglang_server_launch"),
        ({}, {"nnodes": None}, "LAUNCH-NODES-RANK error llm02: sglang_server_launch.node-rank is '1' of 1"),
        ({}, {"dist-init-addr": None}, "LAUNCH-NODES-ADDRESS error llm02: sglang_server_launch.nnodes is 2, but dis"),
        ({}, {"dist-init-addr": "192.0.2.11:25001"}, "LAUNCH-NODES-COUNT error llm01: nnodes is 2, but 1 of this in"),
        ({"tp-size": 15}, {"tp-size": 15}, "LAUNCH-NODES-SIZE error llm01: tp-size 15 times pp-size 1 is not a mult"),
        ({}, {"tp-size": 8}, "LAUNCH-NODES-DIFFER error llm01, llm02: tp-size differs: 16 at llm01, 8 at llm02"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(first, second, said):
    assert any(line.startswith(said) for line in found(pair({"flags": first}, {"flags": second})))


@pytest.mark.parametrize(
    ("meeting", "said"),
    [
        ("192.0.2.12:25000", "LAUNCH-NODES-ADDRESS error llm01, llm02: dist-init-addr 192.0.2.12:25000 is llm02, bu"),
        ("10.0.0.1:25000", "LAUNCH-NODES-ADDRESS warning llm01, llm02: dist-init-addr 10.0.0.1:25000 is no address"),
        ("127.0.0.1:25000", "LAUNCH-NODES-ADDRESS error llm01, llm02: dist-init-addr 127.0.0.1:25000 is every machi"),
        ("localhost:25000", "LAUNCH-NODES-ADDRESS error llm01, llm02: dist-init-addr localhost:25000 is every machi"),
        ("[::1]:25000", "LAUNCH-NODES-ADDRESS error llm01, llm02: dist-init-addr [::1]:25000 is every machine's own"),
        ("192.0.2.11", "LAUNCH-NODES-ADDRESS error llm01, llm02: dist-init-addr is '192.0.2.11', not an address wit"),
        ("192.0.2.11:99999", "LAUNCH-NODES-ADDRESS error llm01, llm02: dist-init-addr is '192.0.2.11:99999', not an"),
        ("192.0.2.11:30001", "LAUNCH-NODES-ADDRESS error llm01, llm02: dist-init-addr 192.0.2.11:30001 names the po"),
    ],
)  # fmt: skip
def test_where_they_meet(meeting, said):
    (line,) = found(pair({"flags": {"dist-init-addr": meeting}}, {"flags": {"dist-init-addr": meeting}}))
    assert line.startswith(said)


def test_what_has_to_be_the_same():
    lines = found(pair({"sglang_engine_version": "0.5.12"}, {"sglang_server_model_path": "/models/u"}))
    assert [line.split(": ")[1] for line in lines] == [
        "sglang_engine_version differs",
        "sglang_server_model_path differs",
    ]


def test_several_faults_are_one_list():
    machines = pair(
        {"flags": {"tp-size": 8, "dist-init-addr": "localhost:1"}},
        {"flags": {"node-rank": 0, "dist-init-addr": "localhost:1"}},
    )
    assert {line.split(" ")[0] for line in found(machines)} == {
        "LAUNCH-NODES-RANK",
        "LAUNCH-NODES-DIFFER",
        "LAUNCH-NODES-ADDRESS",
    }


def test_other_types_give_findings_and_no_traceback():
    for junk in (True, [], {}, -1, 10**30, "x" * 5000, None):
        for name in ("nnodes", "node-rank", "dist-init-addr", "tp-size"):
            nodes.check(pair({"flags": {name: junk}}))
    assert nodes.check([nodes.node("h", {"sglang_server_launch": "text"})]) == []
