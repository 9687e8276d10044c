"""Checks how the what-if's evaluator, the package beside it, reads training samples. Prints what held."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from whatif.files import Failed
from whatif.sample import Sample, load_sample, match_sample


def check_samples(place: Path) -> list[str]:
    """Every packing of one sample is read as the same states."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 40, (2, 9), generator=generator)
    states = torch.randn(2, 9, 3, 16, generator=generator)
    flat, joined = tokens.flatten(), states.flatten(2)
    mixed = torch.tensor([3, 1, 4, 0, 5, 8, 2, 6, 7])
    packings: dict[str, dict[str, Any]] = {
        "side by side": {"input_ids": tokens, "x": joined},
        "states first": {"input_ids": tokens, "x": states.permute(2, 0, 1, 3)},
        "states in the middle": {"input_ids": tokens, "x": states.permute(0, 2, 1, 3)},
        "turned": {"t": tokens, "x": joined.permute(2, 0, 1)},
        "half": {"token_ids": tokens.int(), "labels": tokens + 1, "x": joined.half()},
        "nested": {"data": {"input_ids": tokens, "h": {"x": joined}}, "other": torch.randn(4)},
        "one behind the other": {"tokens": flat, "cu_seqlens": torch.tensor([0, 9, 18]), "x": joined.flatten(0, 1)},
        "lengths": {"tokens": flat, "seq_lens": torch.tensor([9, 9]), "x": joined.flatten(0, 1)},
        "positions": {"tokens": flat, "position_ids": torch.arange(9).repeat(2), "x": joined.flatten(0, 1)},
        "shuffled": {"tokens": tokens[:, mixed], "position_ids": mixed.repeat(2, 1), "x": joined[:, mixed]},
        "apart": {"in": {"input_ids": tokens}, "out": {"x": joined}},
        "lists": {"input_ids": [tokens[0, :4], tokens], "x": [joined[0, :4], joined]},
        "short numbers": {"input_ids": tokens.to(torch.uint16), "x": joined},
    }
    for name, content in packings.items():
        path = place / f"{name}.pt"
        torch.save(content, path)
        sample = Sample(path, 16)
        assert sample.sequences(2, 9) == (
            [(0, 0, 9), (1, 0, 9)] if sample.tokens.shape == (2, 9) else [(0, 0, 9), (0, 9, 18)]
        )
        (stored,) = sample.states
        for index, (row, start, stop) in enumerate(sample.sequences(2, 9)):
            views = sample.views(stored, row, start, stop)
            close = [
                torch.allclose(view, states[index], atol=2e-3) for view in views if view.shape == states[index].shape
            ]
            assert any(close), name
            assert torch.equal(sample.tokens[row, start:stop].long(), tokens[index]), name
    for name, content, words in (
        ("none", {"x": joined}, "holds no token ids"),
        ("other width", {"input_ids": tokens, "x": torch.randn(2, 9, 7)}, "no tensor of the sample holds states"),
    ):
        torch.save(content, place / f"{name}.pt")
        try:
            Sample(place / f"{name}.pt", 16)
        except Failed as error:
            assert words in str(error), error
        else:
            raise AssertionError(name)
    (place / "bad.pt").write_bytes(b"no file of torch")
    try:
        load_sample(place / "bad.pt")
    except Failed as error:
        assert "bad.pt cannot be read" in str(error)
    return list(packings)


def check_padding(place: Path) -> list[str]:
    """Padding is left out on either side, with a mask of any kind or none."""
    tokens = torch.arange(20, 29)
    masks: dict[str, Any] = {
        "numbers": lambda mask: {"attention_mask": mask.long()},
        "floats": lambda mask: {"attention_mask": mask.float()},
        "of the padding": lambda mask: {"key_padding_mask": ~mask},
        "added": lambda mask: {"attention_mask": torch.zeros(mask.shape).masked_fill(~mask, -1e9)},
        "none": lambda _mask: {},
    }
    for name, made in masks.items():
        for before, after in ((0, 12), (5, 0), (0, 0)):
            padded = torch.nn.functional.pad(tokens * 3 % 31, (before, after))
            kept = torch.nn.functional.pad(torch.ones(9), (before, after)).bool()
            torch.save({"input_ids": padded, "x": torch.randn(len(padded), 32), **made(kept)}, place / "padded.pt")
            assert Sample(place / "padded.pt", 16).sequences(2, 99) == [(0, before, before + 9)], (name, before, after)
    return list(masks)


def check_matching(place: Path) -> None:
    """A nested target's states are found, and what only has the shape of states is passed over."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 40, (9,), generator=generator)
    states = torch.randn(5, 9, 16, generator=generator)
    (place / "target").mkdir()
    (place / "target/config.json").write_text(json.dumps({"text_config": {"hidden_size": 16, "vocab_size": 160}}))
    save_file({"language_model.model.norm.weight": torch.ones(16)}, place / "target/model.safetensors")
    recorded = {"states": states, "input_ids": tokens, "positions": torch.arange(9), "lengths": torch.tensor([9])}
    about = {"schema": "2", "rank": "0", "requests": json.dumps(["pivot-replay-sample-0"])}
    save_file(recorded, place / "20261130T000000Z-1-1.safetensors", about)
    asked = {"sample": str(place / "s.pt"), "target": str(place / "target")}
    asked["tensors"] = [str(place / "20261130T000000Z-1-1.safetensors")]
    logits = torch.randn(9, 160, generator=generator)
    torch.save({"ids": tokens, "x": states[[1, 3]].bfloat16(), "logits": logits}, place / "s.pt")
    (matched,) = match_sample(asked)["tensors"]
    assert [piece["layer"] for piece in matched["pieces"]] == [1, 3]
    torch.save({"ids": tokens, "logits": logits}, place / "s.pt")
    try:
        match_sample(asked)
    except Failed as error:
        assert "holds as few states as a target of 4 layers" in str(error), error
    else:
        raise AssertionError("logits")


def main() -> None:
    """Everything; an AssertionError names what does not hold."""
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        place = Path(scratch)
        found = {"samples": check_samples(place), "masks": check_padding(place)}
        check_matching(place)
    print(json.dumps(found))


main()
