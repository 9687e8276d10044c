"""Headers of safetensors files: which tensors, of which type and shape, and what the maps d2t and t2d hold."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pivot.drafters import vocabulary
from pivot.findings import plain

LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
LARGEST_SIZE = 1 << 50  # bytes of a file, numbers of a tensor
LARGEST_MAP = vocabulary.MOST * 8  # bytes of d2t or t2d whose values are looked at
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class WeightsError(ValueError):
    """A model directory, manifest or setting that cannot be used; the text is one sentence for a person."""

    def __init__(self, text: str) -> None:
        super().__init__(plain(text))


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensors:
    """A header: name → dtype and shape, and the bytes of the file that each tensor takes, from and to."""

    entries: Mapping[str, dict[str, Any]]
    places: Mapping[str, tuple[int, int]]


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file, name → dtype and shape, without reading their data.

    WeightsError when the header is unreadable, or does not fit the file's size (a truncated download).
    """
    return dict(_read_tensors(path).entries)


def _read_tensors(path: Path) -> _Tensors:
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if length < 0 or length > min(LARGEST_HEADER, size - 8):
            raise WeightsError(f"{path} is not a safetensors file, or it is truncated: fetch it again")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(name, entry, path) for name, entry in sorted(header.items())}
        spans = sorted((entry["data_offsets"][0], entry["data_offsets"][1], name) for name, entry in header.items())
    except WeightsError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise WeightsError(f"{path} has an unreadable safetensors header: fetch it again") from error
    end = 0
    for first, last, name in spans:
        if first != end:
            raise WeightsError(f"{path}: tensor {name} begins at {first}, where {end} is due: fetch it again")
        end = last
    if 8 + length + end != size:
        raise WeightsError(f"{path} has {size} bytes where its header needs {8 + length + end}: fetch it again")
    begin = 8 + length
    return _Tensors(tensors, {name: (begin + first, begin + last) for first, last, name in spans})


def _tensor(name: str, entry: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """One header entry, checked: the bytes between its offsets are those of its dtype and shape."""
    if not name.isprintable():
        raise WeightsError(f"{path} has a tensor whose name cannot be printed, {name[:80]!a}: fetch it again")
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise WeightsError(f"{path}: tensor {name} has the unknown dtype {dtype!r}")
    numbers = [*shape, start, end]
    if not all(type(number) is int and 0 <= number < LARGEST_SIZE for number in numbers):
        raise WeightsError(f"{path}: tensor {name} has sizes that no tensor has: fetch it again")
    if (end - start) * 8 != bits * math.prod(shape):
        raise WeightsError(f"{path}: tensor {name} has {end - start} bytes, which {dtype} {shape} does not take")
    return {"dtype": dtype, "shape": list(shape)}


def with_values(paths: Mapping[str, Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """The headers of a model's files: file → tensor → dtype, shape, and values of d2t and t2d (`vocabulary.facts`)."""
    read = {name: _read_tensors(path) for name, path in paths.items()}
    maps = {
        tensor.rpartition(".")[2]: (file, tensor)
        for file, tensors in read.items()
        for tensor in tensors.entries
        if vocabulary.is_map(tensor)
    }
    found = {name: dict(tensors.entries) for name, tensors in read.items()}
    raw: dict[str, bytes] = {}
    for kind, (file, tensor) in maps.items():
        begin, end = read[file].places[tensor]
        if end - begin <= LARGEST_MAP:
            with paths[file].open("rb") as stream:
                stream.seek(begin)
                raw[kind] = stream.read(end - begin)
    marks = raw.get("t2d") if maps.get("t2d") and _dtype(found, maps["t2d"]) == "BOOL" else None
    for kind, values in raw.items():
        file, tensor = maps[kind]
        facts = vocabulary.facts(_dtype(found, maps[kind]), values, marks if kind == "d2t" else None)
        if facts is not None:
            found[file][tensor] = {**found[file][tensor], "values": facts}
    return found


def _dtype(headers: Mapping[str, Mapping[str, Mapping[str, Any]]], place: tuple[str, str]) -> str:
    return str(headers[place[0]][place[1]]["dtype"])
