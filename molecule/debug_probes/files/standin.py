"""Stands in for SGLang where only the switch is of interest: starts at once, answers, and records with the probe's own
recorder, a full line a request. Argument: the port."""

import http.server
import os
import sys

recorder = None
if "PIVOT_PROBE_DIR" in os.environ:
    from pivot_probe.record import Recorder
    from pivot_probe.settings import Settings

    recorder = Recorder(Settings.from_environment())
    recorder.write("header", schema=2, hooks={})


class Handler(http.server.BaseHTTPRequestHandler):
    """Every GET is a request that is served, and observed where the probe is in."""

    def do_GET(self) -> None:
        if recorder is not None:
            recorder.write("target", filling="x" * 20_000)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Nothing: the journal is for what the recorder says."""


server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("The server is fired up and ready to roll!", flush=True)
server.serve_forever()
