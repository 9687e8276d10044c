"""How the wheels of a release reach a host: for itself, or for all hosts that see one directory of wheels."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pivot.transfer import rsync_to

OPTIONS = ("--recursive", "--times", "--partial", "--chmod=D755,F644")


def commands(source: str, incoming: str, shared: str, pip: str, connection: Mapping[str, Any]) -> dict[str, list[str]]:
    """The rsync calls that send a wheelhouse: `shared` first, which may be empty, then `own`.

    An interrupted one goes on where it stopped.

    source: the wheelhouse on the controller; incoming: the host's own directory; shared: a directory that other hosts
    see too, or empty; pip: the file name of pip's wheel; connection: as `pivot.transfer.rsync_to` takes it.

    A shared directory gets all wheels, from one sender at a time, so that the others find them there. What is run or
    believed unseen, pip itself and the hashes, each host gets for its own.
    """
    if not shared:
        return {"shared": [], "own": rsync_to(source, incoming, connection, [*OPTIONS, "--delete"])}
    one_at_a_time = f"--rsync-path=flock {shlex.quote(shared)} rsync"
    own = ["--include=/requirements.txt", "--include=/wheels/", f"--include=/wheels/{pip}", "--exclude=*"]
    return {
        "shared": rsync_to(f"{source}/wheels", shared, connection, [*OPTIONS, "--delete", one_at_a_time]),
        "own": rsync_to(source, incoming, connection, [*OPTIONS, *own]),
    }
