"""The values of d2t and t2d, as a manifest keeps them."""

import struct

import pytest

from pivot.drafters import vocabulary
from pivot.drafters.vocabulary import facts


def longs(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def marks(*tokens: int, words: int = 20) -> bytes:
    return bytes(int(token in tokens) for token in range(words))


def test_differences_lead_to_tokens():
    # 0 → 0, 1 → 3, 2 → 4, 3 → 9
    assert facts("I64", longs(0, 2, 2, 6)) == {
        "least": 0, "most": 9, "distinct": 4, "ascending": True, "moved": 3, "like_ids": False,
    }  # fmt: skip
    assert (facts("I64", longs(0, 2, 2, 6), marks(0, 3, 4, 9)) or {})["marked"] == 4
    assert (facts("I64", longs(0, 2, 2, 6), marks(0, 3, 4)) or {})["marked"] == 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (longs(0, 0, 0), {"moved": 0, "least": 0, "most": 2, "ascending": True, "distinct": 3}),
        # 2, 1, 4: another order; 5, 5: twice the same; below the first
        (longs(2, 0, 2), {"ascending": False, "distinct": 3}),
        (longs(5, 4), {"ascending": False, "distinct": 1}),
        (longs(-3), {"least": -3}),
        # token ids where differences have to stand
        (longs(3, 5, 6, 9, 11, 12, 17, 19), {"like_ids": True, "most": 26}),
        (longs(3, 5, 6), {"like_ids": False}),
        (longs(2**63 - 1, 2**63 - 1), {"most": 2**63}),
    ],
)
def test_what_values_show(values, expected):
    found = facts("I64", values) or {}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(("dtype", "form"), [("I32", "<3i"), ("I16", "<3h"), ("U8", "<3B"), ("U64", "<3Q")])
def test_other_widths(dtype, form):
    assert (facts(dtype, struct.pack(form, 1, 2, 4)) or {})["most"] == 6


def test_tokens_that_t2d_does_not_have_are_not_marked():
    found = facts("I64", longs(-1, 30, 1), marks(3)) or {}
    assert found["marked"] == 1


def test_t2d_is_counted():
    assert facts("BOOL", marks(1, 2, 19)) == {"marked": 3}
    assert facts("BOOL", b"") == {"marked": 0}


def test_what_is_no_map_has_no_facts(monkeypatch):
    assert facts("BF16", longs(1)) is None
    assert facts("I64", b"") is None
    monkeypatch.setattr(vocabulary, "MOST", 2)
    assert facts("I64", longs(1, 2)) is not None
    assert facts("I64", longs(1, 2, 3)) is None


@pytest.mark.parametrize(
    ("name", "expected"), [("d2t", True), ("model.t2d", True), ("d2t.weight", False), ("xd2t", False), ("", False)]
)
def test_names_of_maps(name, expected):
    assert vocabulary.is_map(name) is expected
