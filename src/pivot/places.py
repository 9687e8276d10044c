"""Files and directories that settings name: there, or not. A name that can be none is not there, and no error."""

from __future__ import annotations

from pathlib import Path


def file_at(path: str | Path) -> Path | None:
    """The regular file of that name (also behind links; ~ is a home directory), None when there is none.

    Pipes, devices and directories are none, nor is what has an impossible name, lies behind a link in a circle or in
    the home of an unknown user.
    """
    place = _expanded(path)
    try:
        return place if place and place.is_file() else None
    except (OSError, ValueError):
        return None


def directory_at(path: str | Path) -> Path | None:
    """The directory of that name, None when there is none."""
    place = _expanded(path)
    try:
        return place if place and place.is_dir() else None
    except (OSError, ValueError):
        return None


def _expanded(path: str | Path) -> Path | None:
    try:
        return Path(path).expanduser() if str(path) else None
    except RuntimeError:  # a user that this machine does not know
        return None
