"""STAND-IN for the Hugging Face hub: what `huggingface_hub` asks of it for one file of one revision, over plain HTTP.

Files with their ETag, commit, size and ranges; errors with the hub's own codes; a token where one is wanted. `cut` ends
each answer's body after so many bytes, as a lost connection does.
"""

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATH = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


class Hub:
    """Repositories: name → revision → file → contents; and what was asked."""

    def __init__(self, repositories: dict[str, dict[str, dict[str, bytes]]]) -> None:
        self.repositories = repositories
        self.endpoint = ""
        self.token = ""
        self.gated = False
        self.cut = 0
        self.slow: threading.Event | None = None  # bodies wait for it after their first half
        self.sent: list[tuple[str, int, int]] = []  # file, from byte, bytes

    def find(self, path: str, token: str | None) -> tuple[int, str, bytes]:
        """Status, error code, contents."""
        found = PATH.fullmatch(path)
        if not found or found["repository"] not in self.repositories:
            return 404, "RepoNotFound", b""
        if self.token and token != f"Bearer {self.token}":
            return (403, "GatedRepo", b"") if self.gated else (401, "RepoNotFound", b"")
        revisions = self.repositories[found["repository"]]
        if found["revision"] not in revisions:
            return 404, "RevisionNotFound", b""
        if found["name"] not in revisions[found["revision"]]:
            return 404, "EntryNotFound", b""
        return 200, "", revisions[found["revision"]][found["name"]]


@contextlib.contextmanager
def serve(hub: Hub, address: str = "127.0.0.1") -> Iterator[Hub]:
    """Let the hub answer; `hub.endpoint` is its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            status, code, contents = hub.find(self.path, self.headers.get("Authorization"))
            begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0]) if body else 0
            rest = contents[begin:]
            self.send_response(206 if status == 200 and begin else status)
            if code:
                self.send_header("X-Error-Code", code)
                self.send_header("X-Error-Message", code)
            else:
                self.send_header("ETag", f'"{hashlib.sha256(contents).hexdigest()}"')
                self.send_header("X-Repo-Commit", PATH.fullmatch(self.path)["revision"])  # type: ignore[index]  # found
                self.send_header("Accept-Ranges", "bytes")
                if begin:
                    self.send_header("Content-Range", f"bytes {begin}-{len(contents) - 1}/{len(contents)}")
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            if body and status == 200:
                self.send(rest, begin)

        def send(self, rest: bytes, begin: int) -> None:
            part = rest[: hub.cut] if 0 < hub.cut < len(rest) else rest
            name = self.path.rsplit("/", 1)[1]
            with contextlib.suppress(OSError):  # the client is gone
                half = len(part) // 2
                self.wfile.write(part[:half])
                if hub.slow and half:
                    hub.slow.wait(30)
                self.wfile.write(part[half:])
                hub.sent.append((name, begin, len(part)))
            self.close_connection = len(part) < len(rest)

    server = ThreadingHTTPServer((address, 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
