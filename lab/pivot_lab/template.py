"""The containers' template: built once per recipe with mmdebstrap, kept in the cache, unpacked once per lab."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import time
from pathlib import Path

from pivot_lab.errors import LabError
from pivot_lab.layout import ID_BASE, ID_COUNT, Layout
from pivot_lab.system import locked, mounts_below, remove_tree, run, step

SUITE = "bookworm"
VOLUME = "debian-12-pivot-lab_amd64.tar.zst"  # its name on the storage `local`
PACKAGES = (
    "systemd", "systemd-sysv", "dbus",  # what makes it a machine
    "openssh-server", "rsync",  # how the controller reaches it
    "python3", "python3-venv",  # Ansible's modules and the engine
    "iproute2", "nftables", "procps",  # what roles and people look with
    "libnuma1", "libgomp1",  # shared libraries that the engine's wheels expect on the system
)  # fmt: skip
# Units that make no sense in a container without its own kernel, consoles or network, and only cost time.
MASKED = (
    "sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-kernel-config.mount", "dev-hugepages.mount",
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer",
    "getty@.service", "console-getty.service", "container-getty@.service", "systemd-firstboot.service",
)  # fmt: skip
OPTIONS = (
    "--variant=minbase",
    "--include=" + ",".join(PACKAGES),
    '--aptopt=Acquire::Languages "none"',
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    '--customize-hook=chroot "$1" systemctl mask ' + " ".join(MASKED),
    '--customize-hook=printf "PasswordAuthentication no\\nUseDNS no\\n" > "$1/etc/ssh/sshd_config.d/pivot-lab.conf"',
    '--customize-hook=rm -f "$1"/etc/ssh/ssh_host_* "$1/etc/machine-id" "$1/etc/hostname" "$1/etc/resolv.conf"',
    '--customize-hook=: > "$1/etc/machine-id"',
)


# The build and everything it starts end with this process, however it ends, and its mounts are its own.
CONTAINED = (
    "setpriv", "--pdeathsig", "KILL",
    "unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--",
)  # fmt: skip


def recipe_id() -> str:
    """12 hex digits that change whenever the template would."""
    return hashlib.sha256(json.dumps([SUITE, OPTIONS]).encode()).hexdigest()[:12]


def archive(layout: Layout) -> Path:
    """Where the cache holds the template of the current recipe."""
    return layout.cache / f"template-{SUITE}-{recipe_id()}.tar.zst"


def tree(layout: Layout) -> Path:
    """Where the lab holds the unpacked template of the current recipe."""
    return layout.trees / recipe_id()


def build(layout: Layout) -> None:
    """Build the template into the cache unless it is there; minutes at most, one builder at a time."""
    target = archive(layout)
    if target.exists():
        return
    if platform.machine() != "x86_64":
        raise LabError(f"the lab's template is built for amd64 machines; this one is {platform.machine()}")
    if shutil.which("mmdebstrap") is None:
        raise LabError("the program mmdebstrap is missing: install the Debian package mmdebstrap with apt-get")
    layout.cache.mkdir(parents=True, exist_ok=True)
    with locked(layout.cache / "template.lock", "another pivot-lab is building the template; waiting for it"):
        if target.exists():
            return
        log = layout.cache / "template.log"
        log.unlink(missing_ok=True)
        for leftover in layout.cache.glob("template-*.building.tar.zst"):
            leftover.unlink()  # of a build that was killed
        temporary = layout.cache / f"template-{secrets.token_hex(4)}.building.tar.zst"
        room = layout.machine / "build"  # below the lab, so that `down` removes what a killed build leaves
        _clear(room)
        room.mkdir(parents=True)
        room.chmod(0o755)  # apt's own user works in it
        mirror = [given] if (given := os.environ.get("PIVOT_LAB_MIRROR")) else []  # else mmdebstrap's own default
        proxy = {k: v for k, v in os.environ.items() if k.lower() in ("http_proxy", "https_proxy", "no_proxy")}
        try:
            with step(f"building the template (Debian {SUITE})", log):
                run(
                    [*CONTAINED, "mmdebstrap", *OPTIONS, SUITE, temporary, *mirror],
                    log=log,
                    timeout=1800,
                    env=proxy | {"TMPDIR": str(room)},
                )
            temporary.rename(target)
        except LabError as error:
            raise LabError(
                f"the template could not be built ({error}); is Debian's mirror reachable? Another: PIVOT_LAB_MIRROR"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)
            _clear(room)


def _clear(room: Path) -> None:
    """Remove a build's directory; what a killed build left mounted in it is taken off first, never emptied."""
    for point in mounts_below(room):
        run(["umount", "-l", point])
    for attempt in range(50):
        try:
            remove_tree(room)
        except LabError:  # a killed build's last processes may still be going
            if attempt == 49:
                raise
            time.sleep(0.1)
        else:
            return


def unpack(layout: Layout) -> Path:
    """Unpack the template for this lab, owned by the containers' ids, and return the tree (about 2 s, once)."""
    target = tree(layout)
    if target.exists():
        return target
    build(layout)
    temporary = layout.trees / f"{target.name}.{secrets.token_hex(4)}.tmp"
    for leftover in layout.trees.glob("*.tmp"):
        remove_tree(leftover)
    temporary.mkdir(parents=True)
    temporary.chmod(0o755)
    os.chown(temporary, ID_BASE, ID_BASE)
    with step("unpacking the template"):
        run(
            ["lxc-usernsexec", "-m", f"u:0:{ID_BASE}:{ID_COUNT}", "-m", f"g:0:{ID_BASE}:{ID_COUNT}", "--",
             "tar", "--zstd", "-xpf", "-", "-C", temporary, "--numeric-owner", "--exclude=./dev/*"],
            stdin_file=archive(layout),
        )  # fmt: skip
        temporary.rename(target)
    return target
