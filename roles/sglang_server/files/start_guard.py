"""Around the start of an SGLang server: record what it reads, wait until it generates. Standard library only.

record OUTPUT FILE...    the sha256 of every file, and the target of every link, as JSON
wait URL SECONDS         until the URL answers 200, or the main process ($MAINPID) is gone
"""

import hashlib
import json
import os
import pathlib
import sys
import time
import urllib.error
import urllib.request


def digest(path):
    """Content of a file, or for a directory: of its links' targets and its files. None when it is missing."""
    path = pathlib.Path(path)
    if path.is_dir():
        parts = [
            f"{entry.name} -> {os.readlink(entry)}" if entry.is_symlink() else f"{entry.name} {digest(entry)}"
            for entry in sorted(path.iterdir())
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record(output, files):
    """Write path → digest, in one rename."""
    temporary = pathlib.Path(output + ".new")
    temporary.write_text(json.dumps({name: digest(name) for name in files}, sort_keys=True))
    temporary.rename(output)


def gone(pid):
    """Whether the process is no more. Signal 0, because ProtectProc= hides /proc/PID from the service."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def wait(url, seconds):
    """Return when the URL answers 200; exit with a sentence otherwise. Each 200 of /health is a generated token."""
    pid = int(os.environ.get("MAINPID", "0"))
    begin = time.monotonic()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() - begin < seconds:
        if pid and gone(pid):
            sys.exit("the main process is gone: the lines above say why")
        try:
            with opener.open(url, timeout=25) as response:
                if response.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass  # not listening yet, or 503 while it loads
        time.sleep(0.25)
    sys.exit(f"no token was generated within {seconds:.0f} s")


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(sys.argv[2], sys.argv[3:])
    else:
        wait(sys.argv[2], float(sys.argv[3]))
