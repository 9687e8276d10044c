"""The API's certificate as a cluster's own authority signs it, over real TLS: believed, and what is none is refused."""

import dataclasses
import http.server
import json
import socket
import ssl
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from pivot_lab import credentials
from pivot_lab.layout import Layout
from urllib3.util import ssl_

from pivot.pve.proxmox_api import Access, ApiError, Session


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """urllib3 as it is on Python 3.13, whatever this one is."""
    monkeypatch.setattr(ssl_, "sys", SimpleNamespace(version_info=(3, 13)))
    monkeypatch.setattr(ssl_, "VERIFY_X509_STRICT", ssl.VERIFY_X509_STRICT)


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    """The lab's authority, which is made as PVE makes one, and a certificate of it."""
    return made(tmp_path_factory.mktemp("tls"))


def made(directory):
    found = Layout.of(directory)
    credentials.ensure_directories(found)
    credentials.ensure_certificates(found)
    return found


class Answers(http.server.BaseHTTPRequestHandler):
    """Whatever is asked: a ticket and a release."""

    def do_GET(self):
        body = json.dumps({"data": {"version": "9.2.11", "ticket": "t", "CSRFPreventionToken": "c"}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *given):
        pass


@contextmanager
def answering(layout, address):
    """Where an API answers with the lab's certificate, which is made for 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(layout.certificate, layout.certificate_key)
    server = http.server.ThreadingHTTPServer((address, 0), Answers)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Access(address, server.server_port, "root@pam", str(layout.ca), password="made-up")
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def access(layout):
    with answering(layout, "127.0.0.1") as found:
        yield found


def refused(access):
    with pytest.raises(ApiError) as caught:
        Session(access, "llm01").get("version")
    assert caught.value.finding.code == "PVE-CERTIFICATE"
    return caught.value.finding.message


def test_the_labs_authority_is_one_that_a_strict_client_refuses(layout, access):
    """As PVE's own is: otherwise nothing here would show anything."""
    context = ssl.create_default_context(cafile=layout.ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with (
        socket.create_connection((access.host, access.port)) as plain,
        pytest.raises(ssl.SSLCertVerificationError) as said,
    ):
        context.wrap_socket(plain, server_hostname=access.host)
    assert "key usage" in str(said.value)


@pytest.mark.parametrize(
    "login", [{"password": "made-up"}, {"password": None, "token_id": "pivot", "token_secret": "made-up"}]
)
def test_a_clusters_own_authority_is_believed(access, login):
    """With a password proxmoxer logs in outside its session, with a token it only has that one."""
    assert Session(dataclasses.replace(access, **login), "llm01").get("version")["version"] == "9.2.11"


def test_chain_and_name_are_verified_all_the_same(access, layout, tmp_path):
    assert "not signed by the authority" in refused(dataclasses.replace(access, ca_path=str(made(tmp_path).ca)))
    with answering(layout, "127.0.0.2") as elsewhere:
        assert "made for other names" in refused(elsewhere)
