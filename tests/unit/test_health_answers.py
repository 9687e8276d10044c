"""What asks a server when something else answers, or an answer breaks off: one sentence from each of the actions."""

import http.server
import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
PROCESS = {"argv": ["python"], "environment": {}, "started": {}}
WANTED = {"files": {}, "argv": ["python"], "environment": {}, "settings": {}}
ARGUMENTS = {
    "sglang_health": {},
    "sglang_drift": {"wanted": WANTED, "state": {"running": PROCESS, "drop_ins": []}},
    "probe_ask": {},
}
HTTP = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"
ANSWERS = [
    (b"SSH-2.0-OpenSSH_9.2\r\n", "breaks off or is no HTTP (BadStatusLine("),
    (HTTP % (900, b'{"text": '), "breaks off or is no HTTP (IncompleteRead("),
    (HTTP % (6, b"<html>"), "is no JSON"),
    (HTTP % (2, b"[]"), "is no JSON object"),
    (HTTP % (0, b""), "is no JSON"),
]


@pytest.fixture
def listening(monkeypatch):
    """Starts a server that answers everything with these bytes, and gives its URL."""
    monkeypatch.setattr("ansible.plugins.action.ActionBase.run", lambda *_: {})
    begun = []

    def listen(answer):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.wfile.write(answer)

            do_POST = do_GET  # noqa: N815 - as the class wants it

            def log_message(self, *_):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        begun.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield listen
    for server in begun:
        server.shutdown()
        server.server_close()


def run(action, url, **arguments):
    spec = importlib.util.spec_from_file_location(action, ROOT / f"plugins/action/{action}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = object.__new__(module.ActionModule)
    made._task = SimpleNamespace(args={"url": url, **ARGUMENTS[action], **arguments})
    return made.run(None, {"inventory_hostname": "llm01"})


@pytest.mark.parametrize("action", sorted(ARGUMENTS))
@pytest.mark.parametrize(("answer", "said"), ANSWERS)
def test_what_is_no_answer_of_sglang_is_one_finding(listening, action, answer, said):
    url = listening(answer)
    result = run(action, url)
    assert result["failed"]
    assert f"HEALTH-UNREACHABLE  llm01: {url} does not answer: what comes from /" in result["msg"]
    assert said in result["msg"]


@pytest.mark.parametrize("action", ["sglang_health", "sglang_drift"])
def test_a_further_machine_of_a_server_is_not_asked_what_it_cannot_know(listening, action):
    url = listening(HTTP % (0, b""))  # all that SGLang answers there, to /health
    result = run(action, url, answers=False)
    assert not result["failed"], result["msg"]


def test_a_further_machine_that_is_gone_is_found(listening):
    url = listening(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
    result = run("sglang_health", url, answers=False, summary={"endpoint": url, "target": "/models/t"})
    assert "HEALTH-UNREACHABLE  llm01: " in result["msg"]
    assert result["pivot_summary"] == {"endpoint": "none, as the machine of rank 0 answers", "target": "/models/t"}
    process = {"drop_ins": [], "running": {**PROCESS, "argv": ["python3"]}}
    assert "SERVER-DRIFT" in run("sglang_drift", url, answers=False, state=process)["msg"]


@pytest.mark.parametrize("action", ["sglang_health", "probe_ask"])
def test_an_answer_without_what_is_needed_is_named(listening, action):
    result = run(action, listening(HTTP % (15, b'{"text": "abc"}')))
    assert "what comes from /generate has no meta_info" in result["msg"]
