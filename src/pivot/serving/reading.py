"""Files of somebody else's server, read within bounds. Travels to hosts: standard library only, Python 3.9."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

# bytes: of a safetensors header, of what a command prints
HEADER, OUTPUT = 4 << 20, 2 << 20
MOST_TENSORS, DEEPEST, MOST_LINKS = 20000, 24, 40
LONGEST_NUMBER = 40  # digits; no number of a config has more, and reading thousands of digits takes long
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


class Failed(Exception):  # noqa: N818 - it is a sentence for a person, not a programming error
    """Something that a person has to know, in one sentence."""


def inside(path: str | os.PathLike[str]) -> str:
    """A path below /proc/PID/root with its links followed there, as the process would; any other path as it is."""
    found = re.match(r"(/proc/\d+/root)/(.*)", os.fspath(path), re.DOTALL)
    if not found:
        return os.fspath(path)
    root, done, rest = found.group(1), "", found.group(2).split("/")
    links = 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            done = done.rpartition("/")[0]
        elif part not in ("", "."):
            try:
                target = os.readlink(f"{root}{done}/{part}")  # noqa: PTH115 - the link as it is, not tidied up
            except (OSError, ValueError):  # no link, or nothing
                done += f"/{part}"
                continue
            links += 1
            if links > MOST_LINKS:
                return os.fspath(path)  # opening it fails with the system's own words
            done = "" if target.startswith("/") else done
            rest = [*target.split("/"), *rest]
    return root + done


def read(path: str | os.PathLike[str], limit: int, whole: bool = True) -> bytes:
    """Bytes of a regular file, at most `limit`; Failed says why not. No pipe or device is waited for."""
    try:
        descriptor = os.open(inside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise Failed(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Failed("is no regular file")
        try:
            data = stream.read(limit + 1)
        except OSError as error:
            raise Failed(f"cannot be read: {error.strerror}") from None
    if whole and len(data) > limit:
        raise Failed(f"has more than {limit >> 20} MiB")
    return data[:limit]


def number(text: str) -> int | str:
    """An integer of JSON; one of absurd length stays a text."""
    return int(text) if len(text) <= LONGEST_NUMBER else f"a number of {len(text)} digits"


def parsed(data: bytes) -> Any:
    """JSON of bytes; Failed when it is none."""
    try:
        return json.loads(data.decode("utf-8"), parse_int=number)
    except UnicodeDecodeError:
        raise Failed("is not UTF-8") from None
    except RecursionError:
        raise Failed("is nested too deeply") from None
    except ValueError as error:
        raise Failed(f"is no JSON: {str(error)[:120]}") from None


def header(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Tensors of a safetensors file, name → dtype and shape; Failed when its header lies about the file."""
    start = read(path, 8, whole=False)
    size = Path(inside(path)).stat().st_size
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise Failed(f"has {size} bytes, but its header claims {length} alone" if len(start) == 8 else "is truncated")
    if length > HEADER:
        raise Failed(f"has a header of more than {HEADER >> 20} MiB")
    data = parsed(read(path, 8 + length, whole=False)[8:])
    if not isinstance(data, dict) or len(data) > MOST_TENSORS:
        raise Failed(f"has a header that is no JSON object of at most {MOST_TENSORS} tensors")
    data.pop("__metadata__", None)
    end = 0
    for name, entry in data.items():
        end = max(end, tensor(name[:80], entry))
    if 8 + length + end != size:
        raise Failed(f"has {size} bytes, but its header describes {8 + length + end}")
    return {name: {"dtype": entry["dtype"], "shape": entry["shape"]} for name, entry in data.items()}


def tensor(name: str, entry: object) -> int:
    """Where a tensor ends; Failed when its size is not that of its dtype and shape."""
    given: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, lists = given.get("dtype"), [given.get("shape"), given.get("data_offsets")]
    shape, offsets = (item if isinstance(item, list) else [-1] for item in lists)
    numbers = [*shape, *offsets]
    if any(type(item) is not int or item < 0 for item in numbers) or len(numbers) > DEEPEST or len(offsets) != 2:
        raise Failed(f"has a header without usable shape and offsets for {name}")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise Failed(f"has a header with an unknown dtype for {name}")
    elements = 1
    for item in shape:
        elements *= item
    if (offsets[1] - offsets[0]) * 8 != elements * BITS[dtype]:
        raise Failed(f"has a header whose bytes for {name} are not those of {dtype} and its shape")
    return int(offsets[1])


def run(*command: str) -> str:
    """A command's output, empty when it fails, does not exist or takes long."""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:OUTPUT].decode("utf-8", "replace")
