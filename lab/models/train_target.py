"""Step 2: the target. A small DeepSeek-V3 text model (MLA, MoE) trained with transformers, published as Kimi-K2.5.

Reads step 1's --work; writes model.safetensors, config.json and the processor files to lab/models/target.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import recipe
import torch
from optim import Optimiser
from safetensors.torch import save_file
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

LENGTH, BATCH = 192, 6
RATES = (0.02, 4e-3)  # Muon, AdamW
BALANCE_RATE = 1e-3
NOT_FOR_TRANSFORMERS = ("architectures", "model_type", "torch_dtype")
PROCESSOR_FILES = ("kimi_processor.py", "processor_config.json", "preprocessor_config.json")


def build() -> Any:
    """The untrained model, from recipe.TEXT_CONFIG."""
    config = {key: value for key, value in recipe.TEXT_CONFIG.items() if key not in NOT_FOR_TRANSFORMERS}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config))


def _balance(gate: Any, _inputs: object, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Balance the experts without an extra loss, as DeepSeek does: nudge the selection bias of rare ones up."""
    if gate.training:
        counts = torch.bincount(output[2].flatten(), minlength=recipe.TEXT_CONFIG["n_routed_experts"]).float()
        gate.e_score_correction_bias += BALANCE_RATE * torch.sign(counts.mean() - counts)


def add_balancing(model: Any) -> None:
    """Hook `_balance` to every router."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(_balance)


def cut(tokens: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`count` random pieces of `tokens` as [count, length]."""
    starts = torch.randint(0, len(tokens) - length, (count,), generator=generator).tolist()
    return torch.stack([tokens[start : start + length] for start in starts])


def load_tokens(work: Path, part: str) -> torch.Tensor:
    """Step 1's tokens ("train" or "held") as int64."""
    return torch.from_numpy(np.load(work / f"{part}.npy").astype(np.int64))


def held_out_loss(model: Any, held: torch.Tensor) -> tuple[float, float]:
    """Cross entropy (nats per token) and top-1 accuracy on 64 fixed held-out pieces."""
    pieces = cut(held, 64, LENGTH + 1, torch.Generator().manual_seed(7))
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(part[:, :-1], use_cache=False).logits for part in pieces.split(16)])
    model.train()
    wanted = pieces[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).item()
    return loss, (logits.argmax(-1) == wanted).float().mean().item()


def train(model: Any, work: Path, steps: int) -> list[dict[str, float]]:
    """Train in place; returns the log: step, loss, seconds and (sometimes) held-out loss and accuracy."""
    tokens, held = load_tokens(work, "train"), load_tokens(work, "held")
    generator = torch.Generator().manual_seed(recipe.SEED)
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    inner = [p for name, p in named if p.ndim >= 2 and "embed" not in name and "lm_head" not in name]
    inner_ids = {id(p) for p in inner}
    optimiser = Optimiser(inner, [p for _, p in named if id(p) not in inner_ids], RATES, steps)
    log: list[dict[str, float]] = []
    started = time.monotonic()
    model.train()
    for step in range(steps):
        pieces = cut(tokens, BATCH, LENGTH + 1, generator)
        logits = model(pieces[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimiser.step(step, loss)
        if step % 100 == 0 or step == steps - 1:
            entry = {"step": step, "loss": round(loss.item(), 3), "seconds": round(time.monotonic() - started)}
            if step % 500 == 0 or step == steps - 1:
                held_loss, accuracy = held_out_loss(model, held)
                entry |= {"held_loss": round(held_loss, 3), "held_accuracy": round(accuracy, 3)}
            log.append(entry)
            print(entry, flush=True)
    return log


def checkpoint(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The published tensors: experts unfused, `language_model.` in front, bf16 (router biases stay fp32)."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, fused in enumerate(value):
                gate, up = fused.chunk(2)
                base = name.removesuffix("gate_up_proj") + str(expert)
                tensors[f"{base}.gate_proj.weight"], tensors[f"{base}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                tensors[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            tensors[name] = value
    return {
        f"language_model.{name}": value.detach()
        .to(torch.float32 if "e_score_correction_bias" in name else torch.bfloat16)
        .contiguous()
        .clone()
        for name, value in tensors.items()
    }


def load(directory: Path) -> Any:
    """The published target as a transformers model in fp32, evaluation mode (the inverse of `checkpoint`)."""
    from safetensors.torch import load_file  # noqa: PLC0415 - kept beside its only use

    tensors = {
        name.removeprefix("language_model."): value.float()
        for name, value in load_file(directory / "model.safetensors").items()
    }
    model = build()
    state = {}
    for name in model.state_dict():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            state[name] = torch.stack(
                [
                    torch.cat([tensors[f"{base}{e}.{part}_proj.weight"] for part in ("gate", "up")])
                    for e in range(recipe.TEXT_CONFIG["n_routed_experts"])
                ]
            )
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            state[name] = torch.stack(
                [tensors[f"{base}{e}.down_proj.weight"] for e in range(recipe.TEXT_CONFIG["n_routed_experts"])]
            )
        else:
            state[name] = tensors[name]
    model.load_state_dict(state)
    return model.eval()


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="step 1's directory")
    parser.add_argument("--out", type=Path, default=recipe.TARGET)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(recipe.SEED)
    torch.set_num_threads(arguments.threads)
    model = build()
    add_balancing(model)
    log = train(model, arguments.work, arguments.steps)
    tensors = checkpoint(model.state_dict())
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, arguments.out / "model.safetensors", metadata={"format": "pt"})
    recipe.write_json(arguments.out / "config.json", recipe.TARGET_CONFIG)
    for name in PROCESSOR_FILES:
        shutil.copyfile(recipe.HERE / "processor" / name, arguments.out / name)
    figures = {
        "seed": recipe.SEED,
        "steps": arguments.steps,
        "tokens_seen": arguments.steps * BATCH * LENGTH,
        "parameters": sum(value.numel() for value in tensors.values()),
        "bytes": (arguments.out / "model.safetensors").stat().st_size,
        "torch": torch.__version__,
        "log": [entry for entry in log if "held_loss" in entry],
    }
    recipe.write_json(arguments.work / "target-log.json", log)
    recipe.update_figures("target", figures)
    print(figures, flush=True)


if __name__ == "__main__":
    main()
