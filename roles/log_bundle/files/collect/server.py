"""What a server answers to a collector."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from collect.text import MissingError
from pivot.bundles.redact import Redactor

PATHS = ("/health", "/model_info", "/server_info", "/metrics")
ASK_SECONDS = 22  # SGLang's own limit for /health is 20
ANSWER_LIMIT = 4 << 20


class Server:
    """The server of this host. settings: host, port and api-key of its configuration; url: "" for what they say."""

    def __init__(self, settings: Mapping[str, str], redactor: Redactor) -> None:
        self.settings = settings
        self.redactor = redactor
        self.answers: dict[str, dict[str, Any]] = {}

    def ask(self, url: str) -> None:
        """Ask for every path at once: a server that hangs answers none of them."""
        if self.answers:
            return
        url = url or self.base_url()
        threads = [threading.Thread(target=self._ask, args=(url, path), daemon=True) for path in PATHS]
        self.answers = {
            path: {"path": path, "status": None, "seconds": ASK_SECONDS, "error": "no answer"} for path in PATHS
        }
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ASK_SECONDS + 5)

    def _ask(self, url: str, path: str) -> None:
        request = urllib.request.Request(url + path)  # noqa: S310 - http, and from the service's own settings
        if self.settings.get("api-key"):
            request.add_header("Authorization", "Bearer " + self.settings["api-key"])
        begin = time.monotonic()
        answer: dict[str, Any] = {"path": path, "status": None, "error": "", "body": b""}
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=ASK_SECONDS
            ) as reply:
                answer.update(status=reply.status, body=reply.read(ANSWER_LIMIT))
        except urllib.error.HTTPError as error:
            answer.update(status=error.code, error=str(error.reason))
        except (OSError, ValueError, http.client.HTTPException) as error:
            answer["error"] = self.redactor.text(str(getattr(error, "reason", error)))
        answer["seconds"] = round(time.monotonic() - begin, 1)
        self.answers[path] = answer

    def base_url(self) -> str:
        """Where the server listens, from its configuration."""
        host, port = self.settings.get("host", "127.0.0.1"), self.settings.get("port")
        if not port:
            raise MissingError("the server's port is in none of the configuration files, and no url was given")
        host = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104 - compared, not bound
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
