"""Import what a server needs. Run by a release's own interpreter, as an unprivileged user, from standard input.

Prints one JSON object: versions of the imported packages, names of SGLang's plugins that load, the architectures that
torch has code for and those of the cards here. Any failure ends with the traceback that a server would show.
"""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile

MODULES = ("torch", "transformers", "sglang", "sglang.srt.server_args", "sglang.srt.entrypoints.http_server")


def main():
    """Import the modules, then load every plugin that the installed distributions declare."""
    for name in MODULES:
        importlib.import_module(name)
    plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
    for plugin in plugins:
        plugin.load()
    packages = sorted({name.partition(".")[0] for name in MODULES})
    versions = {name: importlib.metadata.version(name) for name in packages}
    told = {"versions": versions, "plugins": sorted(plugin.name for plugin in plugins)}
    print(json.dumps({**told, "architectures": sys.modules["torch"].cuda.get_arch_list(), "cards": cards()}))


def cards():
    """Compute capabilities of the cards, as "12.0"; none without NVIDIA's driver. No context is made on a card."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(re.findall(r"(?m)^\d+\.\d+$", done.stdout)))  # a failing one says sentences


if __name__ == "__main__":
    # torch creates a cache directory below HOME when it is imported
    with tempfile.TemporaryDirectory(prefix="pivot-imports-") as scratch:
        os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = scratch
        main()
