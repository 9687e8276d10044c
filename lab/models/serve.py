"""Start a local SGLang server on the CPU for one wiring of the drafter, run prompts through it, stop it again.

Standard library only: it runs with any Python from 3.11 on and takes the engine's interpreter as an argument.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY = "fired up and ready to roll"
# the server then waits a minute for core dumps that a CPU never writes
LOST = "Scheduler hit an exception"
START_SECONDS = 600
STOP_SECONDS = 20
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
FLAGS = [
    "--trust-remote-code",
    *("--device", "cpu"),
    *("--dtype", "float32"),
    *("--grammar-backend", "none"),
    *("--max-total-tokens", "4096"),
    *("--max-running-requests", "4"),
    *("--context-length", "1024"),
    "--disable-overlap-schedule",
]


class ServeError(Exception):
    """The server did not start, or a request failed; the text names the log."""


@dataclass(frozen=True)
class Wiring:
    """How the drafter is connected: `layers` None leaves the key out; `drafter` False serves without speculation."""

    name: str
    layers: tuple[int, ...] | None = None
    drafter: bool = True


@dataclass(frozen=True)
class Outcome:
    """What one wiring did with the prompts; `histogram[k]` counts verifications that accepted k drafts."""

    wiring: Wiring
    outputs: list[list[int]]
    texts: list[str]
    verifications: int
    histogram: list[int]
    start_seconds: float
    generate_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the wall time of all requests, one after another."""
        return sum(len(output) for output in self.outputs) / self.generate_seconds

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification over all prompts; None without speculation."""
        if not self.verifications:
            return None
        return sum(len(output) for output in self.outputs) / self.verifications

    @property
    def per_position(self) -> list[float]:
        """Share of verifications that accepted at least 1, 2, ... drafts."""
        total = sum(self.histogram)
        return [sum(self.histogram[k:]) / total for k in range(1, len(self.histogram))] if total else []


def drafter_view(drafter: Path, layers: Sequence[int] | None, view: Path) -> Path:
    """Make `view`: links to the drafter's files, and a config whose layer ids are `layers` (None: key left out)."""
    view.mkdir(parents=True)
    for path in sorted(drafter.iterdir()):
        if path.name != "config.json":
            (view / path.name).symlink_to(path.resolve())
    config = copy.deepcopy(json.loads((drafter / "config.json").read_text(encoding="utf-8")))
    config.setdefault("eagle_config", {}).pop(IDS_KEY, None)
    if layers is not None:
        config["eagle_config"][IDS_KEY] = list(layers)
    (view / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return view


def free_port() -> int:
    """A TCP port on the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def command(python: str, target: Path, drafter: Path | None, port: int) -> list[str]:
    """The server's command line; `drafter` None serves without speculation."""
    line = [python, "-m", "sglang.launch_server", "--model-path", str(target), *FLAGS]
    line += ["--host", "127.0.0.1", "--port", str(port)]
    if drafter is not None:
        line += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter)]
        line += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
        line += ["--speculative-num-draft-tokens", "4"]
    return line


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log, for an error message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines[-count:])


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the log says that the server is ready; raise when it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while READY not in (text := log.read_text(encoding="utf-8", errors="replace")):
        if LOST in text:
            time.sleep(1)  # its traceback is still being written
            raise ServeError(f"the scheduler ended; {log} says why, and ends:\n{last_lines(log)}")
        if process.poll() is not None:
            raise ServeError(f"the server ended with status {process.returncode}; {log} ends:\n{last_lines(log)}")
        if time.monotonic() > deadline:
            raise ServeError(f"the server was not ready within {START_SECONDS} s; {log} ends:\n{last_lines(log)}")
        time.sleep(0.3)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and, whatever happened to it, every process of the group that it leads."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_on_terminate() -> None:
    """Let SIGTERM and SIGINT end this program as an exception, so that `serving` stops its server."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


@contextlib.contextmanager
def serving(line: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[float]:
    """Run the command until the block ends; yields the seconds it took to become ready."""
    started = time.monotonic()
    variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
    try:
        _wait_until_ready(process, log)
        yield time.monotonic() - started
    finally:
        _stop(process)


def generate(port: int, prompt: str | Sequence[int], new_tokens: int, **fields: str) -> dict[str, Any]:
    """One greedy request, end of text ignored; the reply of /generate. prompt: a text or token ids; fields: others
    of the request, such as rid."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    body = json.dumps({**given, "sampling_params": sampling, **fields}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:  # noqa: S310 - as above
            answer: dict[str, Any] = json.load(reply)
    except urllib.error.URLError as error:
        raise ServeError(f"the request to port {port} failed: {error}") from error
    return answer


def server_info(port: int) -> dict[str, Any]:
    """What the server says about its settings."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
    except urllib.error.URLError as error:
        raise ServeError(f"the settings of the server on port {port} cannot be read: {error}") from error
    return answer


@dataclass
class Bench:
    """Where the engine and the models are; `scratch` receives drafter views, `logs` the servers' logs."""

    python: str
    target: Path
    drafter: Path
    scratch: Path
    logs: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, wiring: Wiring, prompts: Sequence[str], new_tokens: int) -> Outcome:
        """Serve one wiring and run the prompts through it, one after another."""
        slug = "".join(letter if letter.isalnum() else "-" for letter in wiring.name)
        view = drafter_view(self.drafter, wiring.layers, self.scratch / f"view-{slug}") if wiring.drafter else None
        port = free_port()
        line = command(self.python, self.target, view, port)
        with serving(line, self.logs / f"server-{slug}.log", self.environment) as start_seconds:
            began = time.monotonic()
            replies = [generate(port, prompt, new_tokens) for prompt in prompts]
            seconds = time.monotonic() - began
        histogram: list[int] = []
        for reply in replies:
            for accepted, count in enumerate(reply["meta_info"].get("spec_correct_drafts_histogram", [])):
                histogram += [0] * (accepted + 1 - len(histogram))
                histogram[accepted] += count
        return Outcome(
            wiring=wiring,
            outputs=[reply["output_ids"] for reply in replies],
            texts=[reply["text"] for reply in replies],
            verifications=sum(reply["meta_info"].get("spec_verify_ct", 0) for reply in replies),
            histogram=histogram,
            start_seconds=start_seconds,
            generate_seconds=seconds,
        )
