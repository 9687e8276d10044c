"""Who can reach what."""

from __future__ import annotations

import socket
import urllib.parse
from typing import TYPE_CHECKING

import pytest
from testinfra.host import Host

from pivot.machines.host import Listener, addresses_of, parse_listeners

if TYPE_CHECKING:
    from conftest import Api, Settings


@pytest.fixture
def listeners(host: Host, settings: Settings) -> list[Listener]:
    """Listening TCP sockets of the service's user."""
    uid = host.user(settings["sglang_server_user"]).uid
    found = parse_listeners(host.check_output("ss -H -l -t -n -e"))
    return [listener for listener in found if listener.uid == uid]


def test_the_api_listens_on_its_own_address_alone(listeners: list[Listener], settings: Settings) -> None:
    addresses = {listener.address for listener in listeners if listener.port == settings["sglang_server_port"]}
    assert addresses
    assert addresses <= addresses_of(settings["sglang_server_host"])


def test_its_other_ports_cannot_be_reached_from_here(listeners: list[Listener], settings: Settings, api: Api) -> None:
    assert api.get("/health")[0] == 200  # what is not reachable below is so for its own reason
    address = urllib.parse.urlsplit(api.base).hostname
    reached = []
    for listener in listeners:
        if listener.port == settings["sglang_server_port"]:
            continue
        try:
            socket.create_connection((address, listener.port), timeout=2).close()
        except OSError:
            continue
        reached.append(listener)
    assert reached == []


def test_the_lab_has_no_way_out(host: Host, settings: Settings) -> None:
    if "lab_bridge" not in settings:
        pytest.skip("lab only: a real container's network is its owner's business")
    assert host.check_output("ip route show default") == ""
    assert host.check_output("ip -6 route show default") == ""
    attempt = "timeout 3 python3 -I -c 'import socket; socket.create_connection((\"192.0.2.1\", 443), 2)'"
    assert host.run(attempt).rc != 0
