"""Layers that hand the residual to each other, as engines before 0.5.23 have them: what the probe records of those.

    <engine's python> probe/tests/older_engines.py

No server and no SGLang: a small model under the name of SGLang's, run by hand through the probe's hooks.
"""

from __future__ import annotations

import json
import sys
import tempfile
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from pivot_probe import prints
from pivot_probe.record import Recorder
from pivot_probe.settings import Settings
from pivot_probe.target import TargetWatch

ROWS, WIDTH, LAYERS = 5, 12, 4


class Mode(Enum):
    """SGLang's forward modes, as far as they are needed."""

    EXTEND = 1


class Layer(torch.nn.Module):
    """A decoder layer of the older signature; writes into what it was given, as fused kernels do."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual) from the same."""
        residual = hidden_states.clone() if residual is None else residual.add_(hidden_states)
        hidden_states.fill_(float("nan"))
        return torch.tanh(residual * self.factor), residual


class Norm(torch.nn.Module):
    """A final norm that takes the residual along."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, sum)."""
        total = hidden + residual
        return total / total.norm(), total


class LlamaModel(torch.nn.Module):
    """SGLang's of 0.5.13, in short."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(20, WIDTH)
        self.layers = torch.nn.ModuleList(Layer(0.5 + number) for number in range(LAYERS))
        self.norm = Norm()
        self.layers_to_capture = [1, 3]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        """The normed state and what was captured."""
        hidden, residual, captured = self.embed_tokens(input_ids), None, []
        for number, layer in enumerate(self.layers):
            if number in self.layers_to_capture:
                captured.append(hidden + residual)
            hidden, residual = layer(positions, hidden, forward_batch, residual)
        return self.norm(hidden, residual)[0], captured


LlamaModel.__module__ = "sglang.srt.models.llama"


def expected(model: LlamaModel, tokens: torch.Tensor) -> torch.Tensor:
    """Every layer's input and the last one's output, computed without the model: [LAYERS + 1, rows, WIDTH]."""
    states = [model.embed_tokens.weight[tokens]]
    for number in range(LAYERS):
        states.append(torch.tanh(states[-1] * (0.5 + number)) + states[-1])
    return torch.stack(states)


def main() -> int:
    """Run a replay through the hooks and compare."""
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        directory = Path(name)
        recorder = Recorder(Settings(directory, rows=3))
        watch, model = TargetWatch(recorder), LlamaModel()
        watch.after_target_init(None, model)
        tokens, positions = torch.tensor([3, 7, 7, 1, 19]), torch.arange(ROWS)
        batch = SimpleNamespace(
            forward_mode=Mode.EXTEND, input_ids=tokens, positions=positions, rids=["pivot-replay-x"]
        )
        states = expected(model, tokens)
        watch.before_target_forward(model, tokens, positions, batch)
        watch.after_target_forward(model(tokens, positions, batch), model, tokens, positions, batch)
        recorder.close()
        (record,) = [json.loads(line) for line in recorder.path.read_text(encoding="utf-8").splitlines()]
        assert record["point"] == "target", record
        texts = prints.Prints([state[:3] for state in states]).texts()
        assert record["embedding"] == texts[0]
        assert [record["inputs"][str(layer)] for layer in range(LAYERS)] == texts[:-1]
        assert [record["outputs"][str(layer)] for layer in range(LAYERS)] == texts[1:]
        assert record["captured"]["prints"] == [texts[1], texts[3]]
        assert (record["positions"], record["tokens"], record["lengths"]) == ([0, 1, 2], [3, 7, 7], [ROWS])
        kept = load_file(directory / record["tensors"])
        assert torch.equal(kept["states"], states)
        assert kept["input_ids"].tolist() == tokens.tolist()
        assert kept["positions"].tolist() == positions.tolist()
        assert kept["lengths"].tolist() == [ROWS]
    print(json.dumps({"layers": LAYERS, "states": LAYERS + 1}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
