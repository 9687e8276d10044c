"""What the gatherers on nodes and in containers ask with. Travels to hosts: standard library only, Python 3.9."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SECONDS = 60
# What is printed is judged by its words, which a node of another language would translate. glibc 2.36 does so with
# C.UTF-8 too where LANGUAGE is set.
LANGUAGE = {"LC_ALL": "C.UTF-8", "LANGUAGE": ""}


def run(*argv: str) -> tuple[int, str, str]:
    """(exit status, what a command prints, what it complains of); -1 where it is not there or does not end."""
    environment = {**os.environ, **LANGUAGE}
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=SECONDS, check=False, errors="replace", env=environment
        )
    except FileNotFoundError:
        return -1, "", "is not installed"
    except subprocess.TimeoutExpired:
        return -1, "", f"did not end within {SECONDS} s"
    return done.returncode, done.stdout, done.stderr


def read(path: str) -> str:
    """A file's text; empty when there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
