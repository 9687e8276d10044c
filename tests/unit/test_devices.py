"""B07: devices of a container as the inventory says them, before any node is asked."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pivot.inventory import check, devices
from pivot.inventory.inventory import role_specs
from pivot.serving import launch, nccl

ROOT = Path(__file__).parents[2]
B07 = yaml.safe_load((ROOT / "tests/data/field-cases/B07-vars.yml").read_text())
EIGHT = [f"/dev/nvidia{number},mode=0666" for number in range(8)]
BESIDES = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]


def found(given: Any, **changes: Any) -> list[tuple[str, str]]:
    return [(item.code, str(item.severity)) for item in devices.deployed("llm01", variables(given, **changes))]


def text(given: Any, **changes: Any) -> str:
    return " ".join(f"{item.message} | {item.fix}" for item in devices.deployed("llm01", variables(given, **changes)))


def variables(given: Any, **changes: Any) -> dict[str, Any]:
    return {
        "proxmox_container_devices": given,
        "gpu_runtime_accelerator": "cuda",
        "sglang_server_launch": {"tp-size": 8},
        **changes,
    }


def test_eight_cards_and_what_cuda_needs_are_right():
    assert found([*EIGHT, *BESIDES]) == []


def test_b07():
    """Seven of eight cards, no uvm-tools, a mode of three digits, an unknown field, a token, booleans of YAML."""
    options = f"mode={B07['ct_dev_opts'].split(',')[0].removeprefix('mode=')},gid=44,allow_cgroup_access=1"
    assert B07["ct_dev_opts"] == options
    given = [f"{path},{options}" for path in B07["ct_devices"]]
    result = found(
        given,
        sglang_server_launch={"tp-size": B07["gpu_count"]},
        proxmox_container_api_token_id=B07["pve_auth"]["token_id"],
        proxmox_container_root_via="ticket",
    )
    each = [("DEVICE-MODE", "error"), ("DEVICE-FIELD", "error")]
    assert result == [
        *(each * len(given)),
        ("DEVICE-BESIDES", "warning"),
        ("DEVICE-COUNT", "error"),
        ("DEVICE-TOKEN", "error"),
    ]
    said = text(given)
    for words in (
        "write mode=0666",
        "allow_cgroup_access is no field of a device",
        "not /dev/nvidia-uvm-tools",
        "spreads over 8 cards (tp-size), but proxmox_container_devices name 7 | add /dev/nvidia7, or lower tp-size",
    ):
        assert words in said
    assert [item.code for item in launch.check("llm01", {}, B07["sglang_env"])] == ["ENV-TYPE", "ENV-TYPE"]
    quoted = {"NCCL_IB_DISABLE": "yes"}
    assert "NCCL-VALUE" in {item.code for item in nccl.check(nccl.Settings(subject="llm01", environment=quoted))}


@pytest.mark.parametrize(
    ("device", "expected", "said"),
    [
        ("/dev/nvidia0", [], ""),
        ("path=/dev/nvidia0,mode=0660,uid=0,gid=44,deny-write=1", [], ""),
        ("/dev/dri/renderD128", [], ""),
        ("/dev/nvidia0,mode=666", ["DEVICE-MODE"], "write mode=0666"),
        ("/dev/nvidia0,mode=0o666", ["DEVICE-MODE"], "write mode=0666"),
        ("/dev/nvidia0,mode=00666", ["DEVICE-MODE"], "write mode=0666"),
        ("/dev/nvidia0,mode=0999", ["DEVICE-MODE"], "write for example mode=0666"),
        ("/dev/nvidia0,mode=rw", ["DEVICE-MODE"], "'rw' is not four octal digits"),
        ("/dev/nvidia0,mode", ["DEVICE-MODE"], "'' is not four"),
        ("/dev/nvidia0,mod=0666", ["DEVICE-FIELD"], "did you mean mode?"),
        ("/dev/nvidia0,deny_write=1", ["DEVICE-FIELD"], "did you mean deny-write?"),
        ("/dev/nvidia0,gid=video", ["DEVICE-FIELD"], "gid is 'video', no number"),
        ("nvidia0", ["DEVICE-PATH"], "no path below /dev"),
        ("", ["DEVICE-PATH"], "no path below /dev"),
        ("mode=0666", ["DEVICE-PATH"], "no path below /dev"),
        ("/etc/shadow", ["DEVICE-PATH"], "no path below /dev"),
        ("/dev/nvidia0 ,gid=4x,mode=6", ["DEVICE-FIELD", "DEVICE-MODE"], "write mode=0006"),
    ],
)
def test_the_form_of_a_device(device, expected, said):
    given = variables([device], gpu_runtime_accelerator="cpu")
    assert [item.code for item in devices.deployed("x", given)] == expected
    assert said in " ".join(f"{item.message} | {item.fix}" for item in devices.deployed("x", given))


@pytest.mark.parametrize(
    ("given", "changes", "expected"),
    [
        ([*EIGHT, EIGHT[0], *BESIDES], {}, ["DEVICE-TWICE"]),
        ([*EIGHT, "/dev/nvidia0,gid=4", *BESIDES], {}, ["DEVICE-TWICE"]),
        ([*EIGHT, *BESIDES[:1], BESIDES[2]], {}, ["DEVICE-BESIDES"]),
        ([*EIGHT, *BESIDES[1:]], {}, ["DEVICE-BESIDES"]),
        (EIGHT, {}, ["DEVICE-BESIDES"] * 3),
        ([*EIGHT[:4], *BESIDES], {}, ["DEVICE-COUNT"]),
        ([*EIGHT[:4], *BESIDES], {"sglang_server_launch": {"tp-size": "4"}}, []),
        ([*EIGHT[:4], *BESIDES], {"sglang_server_launch": {"tp": 5}}, ["DEVICE-COUNT"]),
        ([*EIGHT[:4], *BESIDES], {"sglang_server_launch": {}}, []),
        ([*EIGHT, *BESIDES], {"sglang_server_launch": {"tensor-parallel-size": 16, "nnodes": 2}}, []),
        # what is wrong elsewhere
        ([*EIGHT[:4], *BESIDES], {"sglang_server_launch": {"tp-size": "many"}}, []),
        ([*EIGHT[:4], *BESIDES], {"sglang_server_launch": 7}, []),
        ([], {}, []),
        ("all", {}, []),
        ([1], {}, []),
        (["/dev/dri/renderD128"], {}, []),
        (EIGHT, {"gpu_runtime_accelerator": "cpu"}, []),
        # a token may leave devices to pct on the node
        ([*EIGHT, *BESIDES], {"proxmox_container_api_token_id": "ci", "proxmox_container_root_via": "pct"}, []),
        ([*EIGHT, *BESIDES], {"proxmox_container_root_via": "ticket"}, []),
    ],
)
def test_variations(given, changes, expected):
    assert [code for code, _ in found(given, **changes)] == expected


def test_cards_that_are_missing_in_the_middle_are_named():
    given = [device for device in EIGHT if "nvidia3" not in device]
    assert "add /dev/nvidia3, or lower tp-size" in text([*given, *BESIDES])


@pytest.mark.parametrize("name", ["lab", "example"])
def test_the_inventories_are_clean(name):
    folder = ROOT / f"inventory/{name}/group_vars/inference"
    values: dict[str, Any] = {}
    for path in folder.glob("*.yml"):
        values.update(yaml.safe_load(path.read_text()) or {})
    assert len(values["proxmox_container_devices"]) >= 3
    assert devices.deployed("x", values) == []


def test_preflight_asks():
    wrong = check.Host(
        name="llm01",
        given=frozenset(),
        values={"pivot_pins": {}, "proxmox_container_devices": ["/dev/nvidia0,mode=666"]},
        problems={},
        place=ROOT,
    )
    whole = check.Whole({"all": ["llm01"], "inference": ["llm01"]}, {}, {}, ROOT)
    specs = role_specs(ROOT / "roles")
    report = check.run([wrong], whole, specs, ROOT, lambda *_: [], roles=())
    assert "DEVICE-MODE" in {finding.code for finding in report.findings}


# --- two containers of one node

CARDS = ["/dev/nvidia0,mode=0666", "/dev/nvidia1,mode=0666", "/dev/nvidiactl", "/dev/nvidia-uvm"]


def host(devices: Any = CARDS, node: str = "pve1", **more: Any) -> dict[str, Any]:
    return {"proxmox_container_devices": devices, "proxmox_container_node": node, **more}


def test_two_containers_of_one_node_with_the_same_card_are_one_finding_that_names_both() -> None:
    (finding,) = devices.given_twice({"llm02": host(), "llm01": host()})
    assert (finding.code, str(finding.severity), finding.subject) == ("DEVICE-TAKEN", "error", "llm01, llm02")
    assert finding.message == "llm01 and llm02 are to have /dev/nvidia0, /dev/nvidia1 of node pve1"
    assert "for both" in finding.fix
    (three,) = devices.given_twice({"a": host(), "b": host(), "c": host()})
    assert three.subject == "a, b, c"
    assert "for all" in three.fix


SHARED = {"proxmox_container_gpu_shared": True}


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (host(), host(), True),
        (host(), host(node="pve2"), False),
        (host(), host(["/dev/nvidia2", "/dev/nvidiactl"]), False),  # only cards are one container's own
        (host(["path=/dev/nvidia0"]), host(["mode=0666,path=/dev/nvidia0"]), True),
        (host(**SHARED), host(), True),
        (host(**SHARED), host(proxmox_container_gpu_shared="yes"), False),
        (host(**SHARED), host(proxmox_container_tags=["x", "gpu-shared"]), False),
        (host([], proxmox_container_lxc=[{"lxc.mount.entry": "/dev/nvidia0 dev/nvidia0 none bind"}]), host(), True),
        # two clusters whose nodes have one name
        (host(proxmox_container_node_host="a-pve1"), host(proxmox_container_node_host="b-pve1"), False),
        (host("/dev/nvidia0"), host(), False),  # a type that is found where types are
        ({"proxmox_container_devices": CARDS}, {"proxmox_container_devices": CARDS}, False),
    ],
)
def test_which_containers_take_each_others_cards(first: dict[str, Any], second: dict[str, Any], found: bool) -> None:
    assert bool(devices.given_twice({"one": first, "two": second})) is found
