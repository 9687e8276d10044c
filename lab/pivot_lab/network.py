"""The lab's bridge: containers reach the controller's answers and each other, nothing else."""

from __future__ import annotations

import ipaddress
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from pivot_lab.errors import LabError
from pivot_lab.layout import IPv4Network, Layout, host
from pivot_lab.system import run

if TYPE_CHECKING:
    from collections.abc import Iterable


def rules(layout: Layout) -> str:
    """The nftables table of a lab: nothing is forwarded out or in, and containers open no connection to this machine.

    Containers have no default route either; the table holds where a container's root gives itself one.
    """
    bridge = layout.bridge
    return f"""table inet {layout.table} {{
  chain forward {{
    type filter hook forward priority -10; policy accept;
    iifname "{bridge}" oifname != "{bridge}" reject
    oifname "{bridge}" iifname != "{bridge}" drop
  }}
  chain input {{
    type filter hook input priority -10; policy accept;
    iifname "{bridge}" ct state established,related accept
    iifname "{bridge}" reject
  }}
}}
"""


def exists(interface: str) -> bool:
    """Whether a network interface exists."""
    return Path("/sys/class/net", interface).exists()


def used_networks(skip: str) -> list[IPv4Network]:
    """IPv4 networks that this machine's addresses and routes use, except on the interface `skip`."""
    networks: list[IPv4Network] = []
    for interface in json.loads(run(["ip", "-json", "-4", "address"])):
        if interface.get("ifname") == skip:
            continue
        networks += [
            ipaddress.IPv4Network(f"{item['local']}/{item['prefixlen']}", strict=False)
            for item in interface.get("addr_info", [])
            if "local" in item
        ]
    for route in json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]"):
        if route.get("dev") != skip and route.get("dst", "default") != "default":
            networks.append(ipaddress.IPv4Network(route["dst"], strict=False))
    return [network for network in networks if network.prefixlen > 0]


def bridge_network(bridge: str) -> IPv4Network | None:
    """The network of an existing bridge's address, or None where it has no address."""
    for interface in json.loads(run(["ip", "-json", "-4", "address", "show", "dev", bridge])):
        for item in interface.get("addr_info", []):
            return ipaddress.IPv4Network(f"{item['local']}/{item['prefixlen']}", strict=False)
    return None


def free_port(candidates: Iterable[int]) -> int:
    """Return the first candidate that can be bound on 127.0.0.1, or raise a LabError."""
    for port in candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LabError("no free port was found for the API between 20000 and 29999 on 127.0.0.1")


def rules_stand(layout: Layout) -> bool:
    """Whether the lab's nftables table exists."""
    return run(["nft", "list", "table", "inet", layout.table], ok=(0, 1)) != ""


def ensure(layout: Layout, subnet: IPv4Network) -> None:
    """Make the bridge and its rules; does nothing where they already stand."""
    bridge = layout.bridge
    made = not exists(bridge)
    if made:
        run(["ip", "link", "add", "name", bridge, "type", "bridge"])
    run(["ip", "address", "replace", f"{host(subnet, 1)}/{subnet.prefixlen}", "dev", bridge])
    Path(f"/proc/sys/net/ipv4/conf/{bridge}/forwarding").write_text("0")
    ipv6 = Path(f"/proc/sys/net/ipv6/conf/{bridge}/disable_ipv6")
    if ipv6.exists():
        ipv6.write_text("1")  # no second way from a container to this machine's services
    run(["ip", "link", "set", bridge, "up"])
    if made:  # containers may have outlived an earlier one; otherwise LXC is attaching what has no master, or it goes
        for path in Path("/sys/class/net").glob(f"v{layout.lab_id}*"):
            run(["ip", "link", "set", path.name, "master", bridge], ok=(0, 1))
    if not rules_stand(layout):
        run(["nft", "-f", "-"], stdin=rules(layout))


def remove(layout: Layout) -> None:
    """Remove the bridge, left-over container interfaces and the rules of this lab, whatever of them exists."""
    for path in Path("/sys/class/net").glob(f"v{layout.lab_id}*"):
        run(["ip", "link", "del", path.name], ok=(0, 1))
    if exists(layout.bridge):
        run(["ip", "link", "del", layout.bridge])
    if rules_stand(layout):
        run(["nft", "delete", "table", "inet", layout.table])
