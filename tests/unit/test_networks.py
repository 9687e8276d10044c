"""Network interfaces of a container as the inventory says them, before any node is asked."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pivot.inventory import networks

ROOT = Path(__file__).parents[2]
RIGHT = "name=eth0,bridge=vmbr0,ip=192.0.2.31/24,gw=192.0.2.1"


def found(first: Any, more: Any = (), host: Any = "192.0.2.31") -> list[tuple[str, str, str, str]]:
    values = {"proxmox_container_net0": first, "proxmox_container_nets": list(more), "ansible_host": host}
    return [(item.code, str(item.severity), item.message, item.fix) for item in networks.check("llm01", values)]


@pytest.mark.parametrize(
    "text",
    [
        RIGHT,
        "name=eth0",
        "bridge=vmbr0, name=eth0",
        "name=eth0,ip=dhcp,ip6=auto",
        "name=eth0,ip=manual,ip6=2001:db8::2/64,gw6=2001:db8::1",
        "name=eth0,hwaddr=BC:24:11:00:00:01,mtu=9000,rate=12.5,tag=4094,trunks=10;20-30,type=veth",
        "name=eth0,firewall=1,link_down=0,host-managed=yes",
    ],
)
def test_what_proxmox_takes_is_right(text):
    assert found(text, host="llm01.example.org") == []


@pytest.mark.parametrize(
    ("text", "code", "message", "fix"),
    [
        ("nam=eth0,name=eth0", "NET-FIELD", "nam is no field of an interface", "did you mean name?"),
        ("name=eth0,brigde=vmbr0", "NET-FIELD", "brigde is no field of an interface", "did you mean bridge?"),
        ("name=eth0,vlan=7", "NET-FIELD", "vlan is no field of an interface", "Proxmox has name, bridge, firewall"),
        ("name=eth0,vmbr0", "NET-FIELD", "vmbr0 is no field of an interface", "Proxmox has name"),
        ("bridge=vmbr0,ip=dhcp", "NET-FIELD", "the interface has no name", "add name=eth0"),
        ("", "NET-FIELD", "the interface has no name", "add name=eth0"),
        ("name=an-interface-name", "NET-VALUE", "name is 'an-interface-name'", "write name=eth0"),
        ("name=eth0,bridge=vm br0", "NET-VALUE", "bridge is 'vm br0'", "write bridge=vmbr0"),
        ("name=eth0,ip=192.0.2.31", "NET-VALUE", "ip is '192.0.2.31'", "ip=192.0.2.10/24"),
        ("name=eth0,ip=192.0.2.31/33", "NET-VALUE", "ip is '192.0.2.31/33'", "with its prefix"),
        ("name=eth0,ip=192.0.2.31/255.255.255.0", "NET-VALUE", "ip is", "with its prefix"),
        ("name=eth0,ip=auto", "NET-VALUE", "ip is 'auto'", "or ip=dhcp"),
        ("name=eth0,ip6=192.0.2.31/24", "NET-VALUE", "ip6 is '192.0.2.31/24'", "ip6=2001:db8::2/64"),
        ("name=eth0,gw=192.0.2.1/24", "NET-VALUE", "gw is '192.0.2.1/24'", "an address alone"),
        ("name=eth0,gw6=fe80", "NET-VALUE", "gw6 is 'fe80'", "an address alone"),
        ("name=eth0,hwaddr=BC:24:11:00:01", "NET-VALUE", "hwaddr is", "six pairs"),
        ("name=eth0,hwaddr=BD:24:11:00:00:01", "NET-VALUE", "hwaddr is", "the first even"),
        ("name=eth0,mtu=63", "NET-VALUE", "mtu is '63'", "mtu=1500"),
        ("name=eth0,tag=0", "NET-VALUE", "tag is '0'", "1 to 4094"),
        ("name=eth0,trunks=10,20", "NET-FIELD", "20 is no field", "Proxmox has"),
        ("name=eth0,trunks=a", "NET-VALUE", "trunks is 'a'", "trunks=10;20-30"),
        ("name=eth0,rate=fast", "NET-VALUE", "rate is 'fast'", "megabytes a second"),
        ("name=eth0,firewall=2", "NET-VALUE", "firewall is '2'", "firewall=1 or"),
        ("name=eth0,type=e1000", "NET-VALUE", "type is 'e1000'", "type=veth"),
    ],
)
def test_what_proxmox_would_refuse_is_said(text, code, message, fix):
    (finding,) = found(text, host="llm01.example.org")
    assert finding[:2] == (code, "error")
    assert finding[2].startswith(f"proxmox_container_net0, {text!r}: ")
    assert message in finding[2]
    assert fix in finding[3]


def test_further_interfaces_are_looked_at_too_and_all_at_once():
    result = found("name=eth0,ip=192.0.2.31/24,tag=x", ["name=eth1,bridgee=vmbr1", "name=eth0"])
    assert [code for code, *_ in result] == ["NET-VALUE", "NET-FIELD", "NET-TWICE"]
    assert result[1][2].startswith("proxmox_container_nets, 'name=eth1,bridgee=vmbr1': ")
    assert result[2][2] == "proxmox_container_net0 and proxmox_container_nets name eth0 more than once"


def test_a_container_that_gets_another_address_than_it_is_looked_for_at():
    assert found("name=eth0,bridge=vmbr0,ip=192.0.2.32/24") == [
        (
            "NET-HOST",
            "warning",
            "ansible_host is 192.0.2.31, and the container gets 192.0.2.32",
            "write the address of ansible_host in proxmox_container_net0,"
            " or waive this where addresses are translated on the way",
        )
    ]


@pytest.mark.parametrize(
    ("first", "more", "host"),
    [
        (RIGHT, [], "192.0.2.31"),
        ("name=eth0,ip=198.51.100.7/24", ["name=eth1,ip=192.0.2.31/24"], "192.0.2.31"),
        ("name=eth0,ip=dhcp", [], "192.0.2.31"),
        ("name=eth0,ip6=auto", [], "192.0.2.31"),
        ("name=eth0,ip=192.0.2.32/24", [], "llm01.example.org"),
        ("name=eth0,ip=192.0.2.32/24", [], None),
        # of a wrong type, which is found where types are
        (7, [], "192.0.2.31"),
        (None, [3], "192.0.2.31"),
    ],
)
def test_no_other_address_is_to_be_seen(first, more, host):
    assert found(first, more, host) == []


@pytest.mark.parametrize("name", ["lab", "example"])
def test_the_inventories_are_right(name):
    values = yaml.safe_load((ROOT / f"inventory/{name}/group_vars/inference/container.yml").read_text())
    net0 = values["proxmox_container_net0"].replace("{{ ansible_host }}", "192.0.2.31")
    assert found(net0.replace("{{ lab_bridge }}", "vmbr9")) == []
