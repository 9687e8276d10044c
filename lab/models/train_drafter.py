"""Step 3: the EAGLE-3 drafter, in the layout of SGLang's LlamaForCausalLMEagle3, trained on the target's hidden states.

Reads step 1's --work and step 2's target; writes lab/models/drafter. Most of the training text is what the target
itself writes (greedy), because that is what is served; three draft steps are unrolled in training ("training-time
test").
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recipe
import torch
from optim import Optimiser
from safetensors.torch import save_file
from torch.nn import functional
from train_target import cut, load, load_tokens

PROMPT, LENGTH = 96, 192  # tokens of corpus text before the target continues; tokens of a whole sequence
BATCH = 10
RATES = (0.02, 4e-3)  # Muon, AdamW
OWN_SEQUENCES, CORPUS_SEQUENCES = 1280, 320
STEP_WEIGHT = 0.8  # loss weight of each further draft step
ALT_LAYERS = {
    "right": recipe.AUX_LAYERS,
    "key removed: SGLang's default": [2, recipe.LAYERS // 2, recipe.LAYERS - 3],
    "embedding first": [0, *recipe.AUX_LAYERS[:2]],
    "ids - 1": [layer - 1 for layer in recipe.AUX_LAYERS],
}


@dataclass
class Teacher:
    """What the target says about a set of sequences.

    tokens [n, length]; states [n, length, layers, hidden]: input of each decoder layer (0 is the embedding), kept
    in half the width; top [n, length]: greedy next token; draft [n, length, draft vocabulary]: logits in it.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    top: torch.Tensor
    draft: torch.Tensor

    def aux(self, rows: torch.Tensor | slice, positions: list[int]) -> torch.Tensor:
        """The states that stand at `positions` of the kept layers, side by side: [rows, length, n * hidden]."""
        return self.states[rows][:, :, positions].float().flatten(2)


def continue_greedily(model: Any, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """Prompts [n, p] with `count` greedy tokens of the target behind each."""
    with torch.no_grad():
        result = model(prompts, use_cache=True)
        cache, parts = result.past_key_values, [prompts]
        for _ in range(count):
            token = result.logits[:, -1:].argmax(-1)
            parts.append(token)
            result = model(token, past_key_values=cache, use_cache=True)
    return torch.cat(parts, 1)


def ask_teacher(model: Any, tokens: torch.Tensor, vocabulary: torch.Tensor, layers: list[int]) -> Teacher:
    """Run the target over `tokens` and keep what training needs of it."""
    states, top, draft = [], [], []
    with torch.no_grad():
        for part in tokens.split(16):
            result = model(part, output_hidden_states=True, use_cache=False)
            # hidden_states[i] of transformers is the input of decoder layer i
            states.append(torch.stack([result.hidden_states[layer] for layer in layers], 2).bfloat16())
            top.append(result.logits.argmax(-1))
            draft.append(result.logits[..., vocabulary].bfloat16())
    return Teacher(tokens, torch.cat(states), torch.cat(top), torch.cat(draft))


def draft_vocabulary(own: torch.Tensor, corpus: torch.Tensor) -> torch.Tensor:
    """The most frequent tokens of the target's own text (and, for the rest, of the corpus), sorted."""
    counts = torch.bincount(own[:, PROMPT:].flatten(), minlength=recipe.VOCABULARY).double()
    counts += torch.bincount(corpus, minlength=recipe.VOCABULARY).double() / len(corpus)
    return counts.topk(recipe.DRAFT_VOCABULARY).indices.sort().values


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last axis."""
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _rotate(x: torch.Tensor, offset: int) -> torch.Tensor:
    """Rotary embedding (neox style) of [..., length, head_dim], positions starting at `offset`."""
    half = x.shape[-1] // 2
    frequency = 1.0 / (10000.0 ** (torch.arange(half).float() / half))
    angle = torch.outer(torch.arange(x.shape[-2]).float() + offset, frequency)
    cosine, sine = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    return x * cosine + torch.cat([-x[..., half:], x[..., :half]], -1) * sine


class Drafter:
    """The drafter as a dictionary of named tensors, exactly the names that are published."""

    def __init__(self, target: Any, vocabulary: torch.Tensor) -> None:
        hidden, mlp = recipe.HIDDEN, recipe.DRAFTER_MLP
        queries = recipe.DRAFTER_HEADS * recipe.DRAFTER_HEAD_DIM
        keys = recipe.DRAFTER_KV_HEADS * recipe.DRAFTER_HEAD_DIM
        shapes = {
            "fc.weight": (hidden, 3 * hidden),
            "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, queries),
            "midlayer.mlp.gate_proj.weight": (mlp, hidden),
            "midlayer.mlp.up_proj.weight": (mlp, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, mlp),
        }
        norms = ["norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"]
        self.matrices = {name: torch.randn(o, i).div(i**0.5).requires_grad_() for name, (o, i) in shapes.items()}
        self.others = {f"{name}.weight": torch.ones(hidden).requires_grad_() for name in norms}
        self.others["lm_head.weight"] = target.lm_head.weight.detach()[vocabulary].clone().requires_grad_()
        self.embedding: torch.Tensor = target.model.embed_tokens.weight.detach()
        self.vocabulary = vocabulary

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """All trained tensors by published name."""
        return self.matrices | self.others

    def _heads(self, x: torch.Tensor, name: str, heads: int) -> torch.Tensor:
        """Project [b, n, 2 * hidden] to [b, heads, n, head_dim]."""
        projected = x @ self.matrices[f"midlayer.self_attn.{name}_proj.weight"].T
        return projected.view(*x.shape[:2], heads, recipe.DRAFTER_HEAD_DIM).transpose(1, 2)

    def unroll(self, aux: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the draft logits [b, n, draft vocabulary] of each draft step k.

        Row t of step k stands at position t + k: it reads token t + k + 1 and the hidden state of the step before
        (step 0: `fc` of the target's states), and predicts token t + k + 2. It attends to step 0 up to row t, then
        to its own chain of steps 1 to k, as the served drafter does.
        """
        weights = self.weights
        count = tokens.shape[1] - recipe.DRAFT_STEPS - 1
        repeat = recipe.DRAFTER_HEADS // recipe.DRAFTER_KV_HEADS
        mask = torch.ones(count, count, dtype=torch.bool).tril()
        state = (aux @ weights["fc.weight"].T)[:, :count]
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for k in range(recipe.DRAFT_STEPS):
            embedded = self.embedding[tokens[:, k + 1 : k + 1 + count]]
            both = torch.cat(
                [
                    _norm(embedded, weights["midlayer.input_layernorm.weight"]),
                    _norm(state, weights["midlayer.hidden_norm.weight"]),
                ],
                -1,
            )
            query = _rotate(self._heads(both, "q", recipe.DRAFTER_HEADS), k)
            keys.append(_rotate(self._heads(both, "k", recipe.DRAFTER_KV_HEADS), k).repeat_interleave(repeat, 1))
            values.append(self._heads(both, "v", recipe.DRAFTER_KV_HEADS).repeat_interleave(repeat, 1))
            scores = [(query @ keys[0].mT).masked_fill(~mask, -1e9)]
            scores += [(query * keys[j]).sum(-1, keepdim=True) for j in range(1, k + 1)]
            share = (torch.cat(scores, -1) * recipe.DRAFTER_HEAD_DIM**-0.5).softmax(-1)
            mixed = share[..., :count] @ values[0]
            for j in range(1, k + 1):
                mixed = mixed + share[..., count + j - 1 : count + j] * values[j]
            joined = mixed.transpose(1, 2).flatten(2)
            state = state + joined @ weights["midlayer.self_attn.o_proj.weight"].T
            normed = _norm(state, weights["midlayer.post_attention_layernorm.weight"])
            gate = functional.silu(normed @ weights["midlayer.mlp.gate_proj.weight"].T)
            state = state + (gate * (normed @ weights["midlayer.mlp.up_proj.weight"].T)) @ (
                weights["midlayer.mlp.down_proj.weight"].T
            )
            yield _norm(state, weights["norm.weight"]) @ weights["lm_head.weight"].T

    def published(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint: bf16, plus d2t (target id minus draft id) and t2d (is it in the draft)."""
        tensors = {name: value.detach().bfloat16().contiguous() for name, value in self.weights.items()}
        tensors["d2t"] = self.vocabulary - torch.arange(len(self.vocabulary))
        tensors["t2d"] = torch.zeros(recipe.VOCABULARY, dtype=torch.bool)
        tensors["t2d"][self.vocabulary] = True
        return tensors

    def round(self) -> None:
        """Round the trained tensors to what is published, so that evaluation sees the served weights."""
        for value in self.weights.values():
            value.data = value.data.bfloat16().float()


def loss_of(drafter: Drafter, teacher: Teacher, rows: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """Cross entropy with the target's distribution inside the draft vocabulary, rows outside of it left out."""
    inside = torch.zeros(recipe.VOCABULARY, dtype=torch.bool)
    inside[drafter.vocabulary] = True
    tokens, top, draft = teacher.tokens[rows], teacher.top[rows], teacher.draft[rows]
    loss = torch.zeros(())
    for k, logits in enumerate(drafter.unroll(teacher.aux(rows, positions), tokens)):
        ahead = slice(k + 1, k + 1 + logits.shape[1])
        weight = inside[top[:, ahead]].float()
        wanted = draft[:, ahead].float().softmax(-1)
        entropy = -(wanted * logits.log_softmax(-1)).sum(-1)
        loss = loss + STEP_WEIGHT**k * (entropy * weight).sum() / weight.sum()
    return loss


def evaluate(drafter: Drafter, teacher: Teacher, positions: list[int]) -> dict[str, Any]:
    """Offline estimate on greedy text: share of drafts accepted at each step given the steps before, and the length.

    Only rows behind the prompt count: there the text is the target's own, as in serving.
    """
    accepted: list[float] = []
    with torch.no_grad():
        alive: torch.Tensor | None = None
        for k, logits in enumerate(drafter.unroll(teacher.aux(slice(None), positions), teacher.tokens)):
            count = logits.shape[1]
            right = drafter.vocabulary[logits.argmax(-1)] == teacher.top[:, k + 1 : k + 1 + count]
            start = torch.arange(count) >= PROMPT
            alive = start.expand_as(right) if alive is None else alive
            accepted.append((alive & right).sum().item() / max(1, int(alive.sum())))
            alive = alive & right
    length, product = 1.0, 1.0
    for share in accepted:
        product *= share
        length += product
    return {"accepted_given_prefix": [round(share, 3) for share in accepted], "accept_length": round(length, 3)}


def train(drafter: Drafter, teacher: Teacher, steps: int, generator: torch.Generator) -> list[dict[str, float]]:
    """Train in place on the teacher's kept layers (all of recipe.AUX_LAYERS, in order); returns the log."""
    positions = list(range(len(recipe.AUX_LAYERS)))
    optimiser = Optimiser(list(drafter.matrices.values()), list(drafter.others.values()), RATES, steps, 0.7)
    log: list[dict[str, float]] = []
    started = time.monotonic()
    for step in range(steps):
        rows = torch.randint(0, len(teacher.tokens), (BATCH,), generator=generator)
        loss = loss_of(drafter, teacher, rows, positions)
        optimiser.step(step, loss)
        if step % 200 == 0 or step == steps - 1:
            log.append({"step": step, "loss": round(loss.item(), 3), "seconds": round(time.monotonic() - started)})
            print(log[-1], flush=True)
    return log


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="step 1's directory")
    parser.add_argument("--out", type=Path, default=recipe.DRAFTER)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(recipe.SEED)
    torch.set_num_threads(arguments.threads)
    target = load(recipe.TARGET)
    corpus, held = load_tokens(arguments.work, "train"), load_tokens(arguments.work, "held")
    generator = torch.Generator().manual_seed(recipe.SEED)

    print("the target writes its own text", flush=True)
    started = time.monotonic()
    prompts = cut(corpus, OWN_SEQUENCES, PROMPT, generator)
    own = torch.cat([continue_greedily(target, part, LENGTH - PROMPT) for part in prompts.split(256)])
    held_prompts = cut(held, 128, PROMPT, torch.Generator().manual_seed(5))
    own_held = continue_greedily(target, held_prompts, LENGTH - PROMPT)
    vocabulary = draft_vocabulary(own, corpus)
    tokens = torch.cat([own, cut(corpus, CORPUS_SEQUENCES, LENGTH, generator)])
    teacher = ask_teacher(target, tokens, vocabulary, recipe.AUX_LAYERS)
    held_teacher = ask_teacher(target, own_held, vocabulary, list(range(recipe.LAYERS)))
    prepared = round(time.monotonic() - started)
    print(f"{tokens.numel()} tokens with the target's states after {prepared} s", flush=True)

    drafter = Drafter(target, vocabulary)
    log = train(drafter, teacher, arguments.steps, generator)
    drafter.round()
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_file(drafter.published(), arguments.out / "model.safetensors", metadata={"format": "pt"})
    recipe.write_json(arguments.out / "config.json", recipe.DRAFTER_CONFIG)
    inside = torch.isin(own_held[:, PROMPT:], vocabulary).float().mean().item()
    figures = {
        "seed": recipe.SEED,
        "steps": arguments.steps,
        "layers": recipe.AUX_LAYERS,
        "convention": "input",
        "sequences": {"written by the target": OWN_SEQUENCES, "corpus": CORPUS_SEQUENCES, "length": LENGTH},
        "parameters": sum(value.numel() for value in drafter.weights.values()),
        "bytes": (arguments.out / "model.safetensors").stat().st_size,
        "draft_vocabulary_covers": round(inside, 4),
        "offline_on_held_out": {name: evaluate(drafter, held_teacher, ids) for name, ids in ALT_LAYERS.items()},
        "preparation_seconds": prepared,
        "torch": torch.__version__,
        "log": log,
    }
    recipe.update_figures("drafter", figures)
    print(figures, flush=True)


if __name__ == "__main__":
    main()
