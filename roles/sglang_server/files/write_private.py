"""Write a file that holds a secret, in one rename, so that no copy of it lies in a temporary directory on either side.

Standard library only. The role appends `write(**json.loads(...))` to this text and sends both on standard input.
"""

import grp
import json  # noqa: F401 - what the role appends reads its arguments with it
import os


def write(path, text, group, mode):
    """Replace a file, owned by root; mode is octal, as in "0640". A file that an interrupted run left goes first."""
    fresh = path + ".new"
    if os.path.lexists(fresh):
        os.unlink(fresh)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
        os.fchown(stream.fileno(), 0, grp.getgrnam(group).gr_gid)
        os.fchmod(stream.fileno(), int(mode, 8))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, path)
