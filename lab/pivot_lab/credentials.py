"""What a lab makes up for itself: secrets, the controller's ssh key, a certificate authority, the vault."""

from __future__ import annotations

import datetime
import ipaddress
import json
import secrets
import ssl
import uuid
from typing import TYPE_CHECKING

from pivot_lab.layout import NODE
from pivot_lab.system import read_json, run, write, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pivot_lab.layout import Layout

TOKEN = "deploy@pve!pivot"  # noqa: S105  # the token's id, not its value
_RENEW_BEFORE = datetime.timedelta(days=30)
_VALID = datetime.timedelta(days=730)


def ensure_directories(layout: Layout) -> None:
    """Make the clone's state directory, closed to others."""
    for path in (layout.dot, layout.ca.parent, layout.ssh_key.parent):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)


def ensure_secrets(layout: Layout) -> dict[str, str]:
    """Return the lab's secrets by the names they have in vault.yml, made up on the first call."""
    values: dict[str, str] = read_json(layout.secrets)
    wanted: dict[str, Callable[[], str]] = {
        "vault_proxmox_password": lambda: secrets.token_urlsafe(24),
        "vault_proxmox_token_value": lambda: str(uuid.uuid4()),
        # an option of SGLang: one that began with - would be taken for the next option
        "vault_sglang_api_key": lambda: secrets.token_hex(32),
    }
    missing = {name: make() for name, make in wanted.items() if name not in values}
    if missing:
        values |= missing
        write_json(layout.secrets, values, 0o600)
    if not layout.vault_password.exists():
        write(layout.vault_password, secrets.token_urlsafe(32) + "\n", 0o600)
    return values


def ensure_ssh_key(layout: Layout) -> str:
    """Return the controller's public key line, made on the first call."""
    public = layout.ssh_key.with_suffix(".pub")
    if not (layout.ssh_key.exists() and public.exists()):
        layout.ssh_key.unlink(missing_ok=True)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"pivot-lab-{layout.lab_id}", "-f", layout.ssh_key])
    return public.read_text().strip()


def _expires_soon(path: Path) -> bool:
    from cryptography import x509  # noqa: PLC0415  # slow to import; `up` on a running lab does without

    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC) < _RENEW_BEFORE


def ensure_certificates(layout: Layout) -> bool:
    """Make the authority and the API's certificate unless they stand and are good for 30 days; whether new.

    The authority's private key is never written: it signs one certificate and is gone.
    """
    files = (layout.ca, layout.certificate, layout.certificate_key)
    if all(path.exists() for path in files) and not _expires_soon(layout.certificate):
        return False
    for path, text in zip(files, _make_certificates(), strict=True):
        write(path, text, 0o600 if path == layout.certificate_key else 0o644)
    return True


def _make_certificates() -> tuple[str, str, str]:
    """PEM texts of a new authority, a server certificate for this machine's loopback, and the server's key.

    As `pvecm updatecerts` makes them: the authority by `openssl req -new -x509`, so that neither has a keyUsage.
    """
    from cryptography import x509  # noqa: PLC0415  # see above
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415

    now = datetime.datetime.now(datetime.UTC)
    ca_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pivot-lab {secrets.token_hex(4)}")])

    def builder(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + _VALID)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )

    ca = (
        builder(ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"), x509.DNSName(NODE), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    ]  # fmt: skip
    server = (
        builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NODE)]), server_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key_text = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return ca.public_bytes(pem).decode(), server.public_bytes(pem).decode(), key_text.decode()


def trusting(layout: Layout) -> ssl.SSLContext:
    """What a client of the lab's API verifies with; from Python 3.13 on one that is not told asks for a keyUsage."""
    context = ssl.create_default_context(cafile=str(layout.ca))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def write_vault(layout: Layout, values: dict[str, str]) -> None:
    """Write vault.yml, encrypted with the lab's vault password, unless it is newer than what it is made from."""
    target = layout.inventory_vault
    sources = (layout.secrets, layout.vault_password)
    if target.exists() and all(target.stat().st_mtime_ns > source.stat().st_mtime_ns for source in sources):
        return
    from ansible.parsing.vault import VaultLib, VaultSecret  # noqa: PLC0415  # half a second to import

    password = layout.vault_password.read_text().strip().encode()
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in sorted(values.items()))
    secret = VaultSecret(password)
    encrypted = VaultLib([("default", secret)]).encrypt("---\n" + text, secret=secret)
    write(target, encrypted.decode(), 0o600)
