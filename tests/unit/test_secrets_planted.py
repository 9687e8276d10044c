"""Thirty kinds of secrets, planted where they really turn up: none leaves a host."""

import json
from pathlib import Path
from typing import Any

import pytest

from .test_bundle import answer, request

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJwaXZvdCJ9.made-up-signature-0123"
PEM = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSj"
# kind → the secret, and the text that holds it
PLANTED = {
    "api key of SGLang's arguments": ("made-up-00-key", "server_args=ServerArgs(api_key='made-up-00-key', port=1)"),
    "admin key of SGLang's arguments": ("made-up-01-key", "server_args={'admin_api_key': 'made-up-01-key', 'x': 1}"),
    "key of a command line": ("made-up-02-key", "python -m sglang.launch_server --api-key made-up-02-key --port 1"),
    "key in launch_command of /server_info": (
        "made-up-03-key",
        json.dumps({"launch_command": "python -m x --api-key made-up-03-key", "api_key": None}),
    ),
    "key of /server_info": ("made-up-04-key", json.dumps({"internal_states": [{"api_key": "made-up-04-key"}]})),
    "key in a traceback": (
        "made-up-05-key",
        "Traceback (most recent call last):\n  File 'x.py', line 3\n    login(api_key='made-up-05-key')\nError: no",
    ),
    "header in a traceback": (
        "made-up-06-key",
        "httpx.HTTPStatusError: 401 for {'headers': {'Authorization': 'Bearer made-up-06-key'}}",
    ),
    "token of Hugging Face": ("hf_MadeUpMadeUpMadeUp07", "401 Client Error (Request ID: hf_MadeUpMadeUpMadeUp07)"),
    "token of Hugging Face in the environment": ("made-up-08-token", "HF_TOKEN=made-up-08-token"),
    "HUGGING_FACE_HUB_TOKEN": ("made-up-09-token", 'Environment="HUGGING_FACE_HUB_TOKEN=made-up-09-token"'),
    "key of OpenAI's kind": ("sk-madeUpmadeUpmadeUpmadeUp10", "using sk-madeUpmadeUpmadeUpmadeUp10 to ask"),
    "key of Weights & Biases": ("made-up-11-wandb", "WANDB_API_KEY: made-up-11-wandb"),
    "id of AWS": ("AKIAMADEUPMADEUP0123", "aws AKIAMADEUPMADEUP0123 denied"),
    "secret of AWS": ("made/up+13secret", "AWS_SECRET_ACCESS_KEY=made/up+13secret"),
    "token of GitHub": ("ghp_madeUpmadeUpmadeUp14", "git clone failed with ghp_madeUpmadeUpmadeUp14"),
    "fine token of GitHub": ("github_pat_madeUpmadeUpmadeUp15", "remote: github_pat_madeUpmadeUpmadeUp15 expired"),
    "token of GitLab": ("glpat-madeUpmadeUp16xx", "CI glpat-madeUpmadeUp16xx"),
    "token of Slack": ("xoxb-made-up-17-token", "posting with xoxb-made-up-17-token"),
    "bearer": ("made-up-18-bearer", "curl said: got Bearer made-up-18-bearer back"),
    "basic": ("bWFkZTp1cDE5cGFzcw==", "Proxy-Authorization: Basic bWFkZTp1cDE5cGFzcw=="),
    "x-api-key": ("made-up-20-key", "> X-Api-Key: made-up-20-key"),
    "cookie": ("made-up-21-session", "Set-Cookie: session=made-up-21-session; Path=/"),
    "web token": (JWT, f"claims of {JWT} are stale"),
    "token of Proxmox": ("made-up-23-uuid", "sent PVEAPIToken=root@pam!ci=made-up-23-uuid"),
    "ticket of Proxmox": ("66AABBCC::bWFkZXVwMjQ", "ticket PVE:root@pam:66AABBCC::bWFkZXVwMjQ ok"),
    "cookie of Proxmox": ("made-up-25-ticket", "sent PVEAuthCookie=made-up-25-ticket;"),
    "password in a url": ("made-up-26-pass", "redis://cache:made-up-26-pass@10.0.0.5/0"),
    "password": ("made-up-27-pass", "mysql --password=made-up-27-pass -u x"),
    "password of YAML": ("made up 28 pass", "db:\n  password: made up 28 pass\n  port: 1"),
    "private key": (PEM, f"-----BEGIN PRIVATE KEY-----\n{PEM}\n-----END PRIVATE KEY-----"),
    "passphrase": ("made-up-30-phrase", "export SSH_PASSPHRASE='made-up-30-phrase'"),
    "database": ("postgres://made:up31@h/x", "PIVOT_DSN=postgres://made:up31@h/x"),
    "key with colours": ("made-up-32-key", "\x1b[33mapi_key\x1b[0m: x, api_key=made-up-32-key\x1b[0m"),
    "key of JSON in JSON": ("made-up-33-key", json.dumps({"body": json.dumps({"api_key": "made-up-33-key"})})),
}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One file for each kind, one with all of them, collected as probe records are."""
    directory = tmp_path_factory.mktemp("planted")
    for number, (_, text) in enumerate(PLANTED.values()):
        (directory / f"{number:02d}.log").write_text(f"before\n{text}\nafter\n")
    (directory / "all.log").write_text("\n".join(text for _, text in PLANTED.values()) + "\n")
    return answer(request(directory, names=("probe",), probe_records=[str(directory / "*.log")]))


def test_there_are_thirty_kinds() -> None:
    assert len(PLANTED) >= 30
    assert all(secret in text or secret in json.dumps(text) for secret, text in PLANTED.values())


@pytest.mark.parametrize("kind", PLANTED)
def test_none_of_them_leaves(collected: dict[str, Any], kind: str) -> None:
    number, secret = list(PLANTED).index(kind), PLANTED[kind][0]
    files = [path for path in Path(collected["staging"]).rglob("*") if path.is_file()]
    assert len(files) == len(PLANTED) + 1
    assert [path.name for path in files if secret in path.read_text()] == []
    (own,) = [path.read_text() for path in files if path.name == f"{number:02d}.log"]
    assert own.startswith("before\n")
    assert own.endswith("\nafter\n")


def test_the_report_counts_each_of_them_and_holds_none(collected: dict[str, Any]) -> None:
    entries = {Path(entry["name"]).name: entry for entry in collected["entries"]}
    assert [name for name, entry in entries.items() if not entry["masked"]] == []
    assert sum(entries["all.log"]["masked_as"].values()) == entries["all.log"]["masked"] >= len(PLANTED)
    report = json.dumps(collected["entries"])
    assert [kind for kind, (secret, _) in PLANTED.items() if secret in report] == []
