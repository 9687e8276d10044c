"""The lab as a whole: up, down, status."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from typing import TYPE_CHECKING, Any

import yaml

from pivot_lab import credentials, daemon, machine, network, node, template
from pivot_lab.containers import Containers
from pivot_lab.errors import LabError
from pivot_lab.layout import GUESTS, NODE, NODE_HOST, IPv4Network, Layout, choose_subnet, host
from pivot_lab.system import locked, mounts_below, read_json, remove_tree, run, say, step, write, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

_WAITING = "another pivot-lab works on this lab; waiting for it"


@contextlib.contextmanager
def _exclusively(layout: Layout) -> Iterator[None]:
    with locked(layout.dot / "lock", _WAITING):
        credentials.ensure_directories(layout)
        yield


def subnet_of(layout: Layout) -> IPv4Network:
    """The subnet this lab settled on; a LabError before its first `up`."""
    state = read_json(layout.dot / "state.json")
    if "subnet" not in state:
        raise LabError(f"the lab of {layout.root} is not up: run `pivot-lab up`")
    return ipaddress.IPv4Network(state["subnet"])


def _settle(layout: Layout) -> dict[str, Any]:
    """The lab's subnet and port: as before where that is still possible, else the first free ones."""
    path = layout.dot / "state.json"
    state = read_json(path)
    wanted = dict(state)
    standing = network.bridge_network(layout.bridge) if network.exists(layout.bridge) else None
    if standing is not None:
        wanted["subnet"] = str(standing)  # also where the clone's .lab was deleted under a running lab
    else:
        wanted["subnet"] = str(_free_subnet(layout, state.get("subnet")))
    if "port" not in state:
        wanted["port"] = network.free_port(layout.port_candidates())
    if wanted != state:
        write_json(path, wanted)
    return wanted


def _free_subnet(layout: Layout, settled: str | None) -> IPv4Network:
    """The subnet the lab had, if nothing else uses it now, or a new one if no container has an address in it."""
    used = network.used_networks(skip=layout.bridge)
    if settled is not None:
        current = ipaddress.IPv4Network(settled)
        if not any(current.overlaps(other) for other in used):
            return current
        if Containers(layout).keys():
            raise LabError(
                f"the lab's subnet {current} is now used by something else on this machine and its containers "
                "have addresses in it: run `pivot-lab down`, then `pivot-lab up`"
            )
    return choose_subnet(layout.subnet_candidates(), used)


def _base(layout: Layout) -> IPv4Network:
    """What scratch containers need: ids, template, bridge, keys. Returns the subnet."""
    machine.require_root()
    if not (network.exists(layout.bridge) and template.tree(layout).exists()):
        machine.require_tools()
        machine.require_kernel()
    layout.containers.mkdir(parents=True, exist_ok=True)
    for path in (layout.machine.parent, layout.machine, layout.containers):
        path.chmod(0o755)  # containers' own users must be able to pass
    machine.grant_ids()
    template.unpack(layout)
    state = _settle(layout)
    subnet = ipaddress.IPv4Network(state["subnet"])
    network.ensure(layout, subnet)
    credentials.ensure_ssh_key(layout)
    return subnet


def ensure_base(layout: Layout) -> IPv4Network:
    """Bring up what scratch containers need, without API and node, unless it is there."""
    with _exclusively(layout):
        return _base(layout)


def _write_inventory(layout: Layout, subnet: IPv4Network, port: int) -> None:
    """Write the two generated inventory files where they differ."""
    addresses = {NODE: host(subnet, NODE_HOST)} | {name: host(subnet, number) for name, number in GUESTS.items()}
    data = {
        "lab_api_host": "127.0.0.1",
        "lab_api_port": port,
        "lab_api_ca": str(layout.ca),
        "lab_bridge": layout.bridge,
        "lab_subnet": str(subnet),
        "lab_gateway": host(subnet, 1),
        "lab_addresses": addresses,
        "lab_template": f"local:vztmpl/{template.VOLUME}",
        "lab_ssh_key": str(layout.ssh_key),
        "lab_ssh_public_key": credentials.ensure_ssh_key(layout),
        "lab_known_hosts": str(layout.known_hosts),
    }
    text = "---\n# Written by `pivot-lab up`; gone after `pivot-lab down`.\n" + yaml.safe_dump(data, width=200)
    target = layout.inventory_vars
    if not target.exists() or target.read_text() != text:
        write(target, text)
    credentials.write_vault(layout, credentials.ensure_secrets(layout))


def up(layout: Layout) -> None:
    """Bring the lab up, or finish an interrupted one; quick where everything stands."""
    begin = time.monotonic()
    with _exclusively(layout):
        subnet = _base(layout)
        port = read_json(layout.dot / "state.json")["port"]
        credentials.ensure_secrets(layout)
        renewed = credentials.ensure_certificates(layout)
        fresh = False
        # one that is only busy must not lose the tasks it is at
        if daemon.running(layout) is None or renewed or not daemon.answers(layout, port, seconds=60):
            daemon.stop(layout)
            port = _free_port_again(layout, port)
            node.prepare(layout)
            daemon.start(layout, port)
            fresh = True
        node.ensure(layout, subnet, say)
        _write_inventory(layout, subnet, port)
    what = "the lab is up" if fresh else "the lab was already up"
    say(f"{what}: API https://127.0.0.1:{port}, node {NODE} at {host(subnet, NODE_HOST)}, network {subnet} on "
        f"{layout.bridge} ({time.monotonic() - begin:.1f} s)")  # fmt: skip


def _free_port_again(layout: Layout, port: int) -> int:
    """The lab's port, or another one if a stranger has taken it in the meantime."""
    try:
        return network.free_port([port])
    except LabError:
        chosen = network.free_port(layout.port_candidates())
        say(f"port {port} is in use by another program; the API moves to {chosen}")
        state = read_json(layout.dot / "state.json")
        write_json(layout.dot / "state.json", state | {"port": chosen})
        return chosen


def down(layout: Layout) -> None:
    """Remove every trace of this clone's lab, complete or half made, and nothing else."""
    machine.require_root()
    traces = (layout.dot, layout.machine, layout.inventory_vars, layout.inventory_vault)
    if not any(path.exists() for path in traces) and not network.exists(layout.bridge):
        say(f"there is no lab of {layout.root}")
        return
    with _exclusively(layout), step("taking the lab down"):
        daemon.stop(layout)
        containers = Containers(layout)
        for key in containers.keys():  # noqa: SIM118  # a method, not a mapping
            containers.kill(key)
        for point in mounts_below(layout.machine):
            run(["umount", "-l", point])
        network.remove(layout)
        remove_tree(layout.machine)
        layout.inventory_vars.unlink(missing_ok=True)
        layout.inventory_vault.unlink(missing_ok=True)
        machine.revoke_ids_if_last()
        remove_tree(layout.dot)


def status(layout: Layout) -> str:
    """A short table of what the lab consists of now."""
    state = read_json(layout.dot / "state.json")
    rows = [("clone", str(layout.root)), ("id", layout.lab_id)]
    if not state:
        return _table([*rows, ("lab", "not up")])
    port = state.get("port", 0)
    containers = Containers(layout)
    rows += [
        (
            "network",
            f"{state.get('subnet')} on {layout.bridge}" + ("" if network.exists(layout.bridge) else " (missing)"),
        ),
        ("API", f"https://127.0.0.1:{port} " + ("answers" if daemon.answers(layout, port) else "does not answer")),
        ("log", str(layout.api_log)),
    ]
    for key in containers.keys():  # noqa: SIM118  # a method, not a mapping
        pid = containers.pid(key)
        rows.append((key, f"running (pid {pid})" if pid else "stopped"))
    return _table(rows)


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _value in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)
