"""The drafter's vocabulary: d2t, t2d and lm_head against the config, by their shapes and, where known, their values.

d2t holds differences: draft token i stands for the target's token i + d2t[i]. t2d marks the target's tokens that have
a draft token; SGLang does not read it. A header shows neither's values, so `facts` of them are kept in the manifest.
"""

from __future__ import annotations

import array
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pivot.drafters.configs import Config, Findings
from pivot.findings import Severity

ERROR, WARNING = Severity.ERROR, Severity.WARNING
FLOATS: Final = frozenset({"BF16", "F16", "F32"})
# whole numbers by dtype, with the array's type code of that width
INTEGERS: Final = {"I8": "b", "U8": "B", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "I64": "q", "U64": "Q"}
MOST = 1 << 22  # tokens of a vocabulary whose values are looked at
FEW = 8  # so many tokens can ascend by chance
AGAIN = "fetch the pinned revision again, or pin another"
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def is_map(name: str) -> bool:
    """Whether a tensor of this name is one of the two maps."""
    return name.rpartition(".")[2] in ("d2t", "t2d")


def facts(dtype: str, values: bytes, marks: bytes | None = None) -> dict[str, int | bool] | None:
    """What a header does not show of d2t or t2d, None for a dtype that is neither of theirs.

    values: the tensor's bytes, little-endian; marks: those of t2d, when values are d2t's. Of t2d (BOOL): ``marked``,
    how many tokens it marks. Of d2t: ``least`` and ``most`` token that it leads to, how many ``distinct`` ones, whether
    they are ``ascending``; how many differences are not zero (``moved``); whether the values themselves ascend as token
    ids would (``like_ids``); and how many of the tokens t2d marks (``marked``, only with marks).
    """
    if dtype == "BOOL":
        return {"marked": len(values) - values.count(0)}
    code = INTEGERS.get(dtype)
    if code is None or not 0 < len(values) // array.array(code).itemsize <= MOST:
        return None
    differences = array.array(code, values)
    if sys.byteorder == "big":
        differences.byteswap()
    tokens = [index + difference for index, difference in enumerate(differences)]
    distinct = set(tokens)
    found: dict[str, int | bool] = {
        "least": min(tokens),
        "most": max(tokens),
        "distinct": len(distinct),
        "ascending": _ascends(tokens),
        "moved": len(differences) - differences.count(0),
        "like_ids": len(differences) >= FEW and _ascends(differences),
    }
    if marks is not None:
        found["marked"] = sum(1 for token in distinct if 0 <= token < len(marks) and marks[token])
    return found


def _ascends(values: Sequence[int]) -> bool:
    return all(first < second for first, second in itertools.pairwise(values))


def check(drafter: Config, tensors: Tensors, given: object, found: Findings, notes: list[str]) -> None:
    """All about the vocabulary.

    tensors: the header; given: the same as it stands in a manifest, where an entry may have ``values`` (`facts`).
    """
    words, small = drafter.integer("vocab_size"), drafter.integer("draft_vocab_size")
    if words is None:
        return
    maps = {name.rpartition(".")[2]: name for name in sorted(tensors) if is_map(name)}
    if "d2t" in maps:
        _d2t(tensors[maps["d2t"]], small, found)
        values = _values(given, maps["d2t"])
        if values:
            _tokens(values, tensors[maps["d2t"]][1], words, found)
        else:
            notes.append(
                "the values of d2t cannot be seen here, only its shape; a manifest that pivot manifest writes has them"
            )
    elif small and small < words:
        message = f"d2t is missing, but the draft vocabulary has {small} of {words} tokens: nearly nothing is accepted"
        found.add("D2T", ERROR, message, AGAIN)
    if "t2d" in maps:
        _t2d(tensors[maps["t2d"]], _values(given, maps["t2d"]), small, words, found)
    _head(drafter, tensors, small, words, found)


def _values(given: object, name: str) -> Mapping[str, Any]:
    """The facts of a tensor in a manifest, empty when there are none that could be used."""
    entry = given.get(name) if isinstance(given, Mapping) else None
    values = entry.get("values") if isinstance(entry, Mapping) else None
    if not isinstance(values, Mapping):
        return {}
    # whole numbers of 64 bits, as facts are
    return values if all(isinstance(value, int) and abs(value) < 1 << 65 for value in values.values()) else {}


def _d2t(entry: tuple[str, tuple[int, ...]], small: int | None, found: Findings) -> None:
    dtype, shape = entry
    if dtype not in INTEGERS:
        found.add("D2T", ERROR, f"d2t is {dtype}, not whole numbers (I64)", AGAIN)
    elif dtype != "I64":
        found.add("D2T", WARNING, f"d2t is {dtype} instead of I64", AGAIN)
    if small and shape != (small,):
        found.add("D2T", ERROR, f"d2t has the shape {list(shape)}, not [{small}] of draft_vocab_size", AGAIN)


def _tokens(values: Mapping[str, Any], shape: tuple[int, ...], words: int, found: Findings) -> None:
    """The target's tokens that d2t leads to. Facts that a manifest lacks show nothing."""
    count = shape[0] if len(shape) == 1 else 0
    least, most, marked = values.get("least", 0), values.get("most", 0), values.get("marked")
    ids = "; its values ascend as token ids do, where differences have to stand" if values.get("like_ids") else ""
    if least < 0 or most >= words:
        wrong = least if least < 0 else most
        message = f"d2t leads to the token {wrong}, but vocab_size is {words}{ids}"
        found.add("D2T", ERROR, message, AGAIN)
    elif ids:
        found.add("D2T", WARNING, f"d2t leads to the tokens {least} to {most}{ids}", AGAIN)
    if values.get("moved") == 0 and count < words and marked != count:
        message = f"d2t is all zero, so the {count} draft tokens stand for the target's first {count}"
        message += ": nearly nothing is accepted if they do not"
        found.add("D2T", ERROR, message, f"{AGAIN}; accept it in pivot_waivers where they do")
    elif marked is not None and marked < count:
        message = f"d2t and t2d disagree: of {count} tokens that d2t leads to, t2d marks {marked}"
        found.add("D2T", WARNING, message, AGAIN)
    if values.get("distinct", count) < count:
        message = f"d2t leads {count} draft tokens to {values['distinct']} of the target's: some stand for the same"
        found.add("D2T", ERROR, message, AGAIN)
    elif values.get("ascending", True) is False:
        message = "the tokens that d2t leads to do not ascend, as they do wherever a trainer sorted them"
        found.add("D2T", WARNING, message, AGAIN)


def _t2d(
    entry: tuple[str, tuple[int, ...]], values: Mapping[str, Any], small: int | None, words: int, found: Findings
) -> None:
    dtype, shape = entry
    unread = "; SGLang does not read it"
    if shape != (words,):
        found.add("T2D", WARNING, f"t2d has the shape {list(shape)}, not [{words}] of vocab_size{unread}", AGAIN)
    if dtype != "BOOL":
        found.add("T2D", WARNING, f"t2d is {dtype} instead of BOOL{unread}", AGAIN)
    marked = values.get("marked")
    if small and marked is not None and marked != small:
        message = f"t2d marks {marked} tokens, but draft_vocab_size is {small}{unread}"
        found.add("T2D", WARNING, message, AGAIN)


def _head(drafter: Config, tensors: Tensors, small: int | None, words: int, found: Findings) -> None:
    """lm_head: needed unless the target's is used; as long as the draft vocabulary."""
    dtype, shape = tensors.get("lm_head.weight", ("", ()))
    tied = drafter.data.get("tie_word_embeddings") is True
    if not shape and small and not tied:
        message = f"lm_head.weight is missing, but draft_vocab_size is {small}, so the target's head is not used"
        fix = "pin a revision with lm_head, or write draft_vocab_size: null for the target's"
        found.add("HEAD", ERROR, message, fix)
    size = drafter.integer("hidden_size")
    expected = (small or words, size)
    if shape and size and shape != expected:
        message = f"lm_head.weight has the shape {list(shape)}, not {list(expected)}"
        found.add("HEAD", ERROR, message, AGAIN)
    if shape and dtype not in FLOATS and not drafter.mapping("quantization_config"):
        message = f"lm_head.weight is {dtype}, but the config names no quantisation"
        found.add("HEAD", ERROR, message, "pin a drafter in bfloat16")
