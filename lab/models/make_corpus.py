"""Step 1: the corpus. Python's own standard library, split by FILE into training and held-out text.

Writes to --work: train.npy and held.npy (int16 token ids, files separated by </s>), held.json (held-out texts by
name), and the tokenizer files to lab/models/target. The list of held-out files goes to lab/models/held-out.json.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import random
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import recipe
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "lib2to3",
}
BUILD_RECORD = "_sysconfigdata"  # differs from machine to machine and holds its paths
SHORTEST = 2000  # characters; shorter files are mostly re-exports
HELD_OUT_ONE_IN = 20


def source_files(root: Path) -> dict[str, str]:
    """Python files under `root` by relative name, without tests, tables and short files."""
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.isdisjoint(name.parts[:-1]) and not name.name.startswith(BUILD_RECORD):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) >= SHORTEST:
                texts[name.as_posix()] = text
    return texts


def is_held_out(name: str) -> bool:
    """Whether a file is kept away from all training: a property of its name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of recipe.VOCABULARY tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.VOCABULARY,
        special_tokens=recipe.SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: dict[str, str]) -> np.ndarray:
    """All texts as one int16 array, in a shuffled order that depends on recipe.SEED only."""
    order = sorted(texts)
    random.Random(recipe.SEED).shuffle(order)  # noqa: S311 - an order, not a secret
    return np.concatenate([np.array([*tokenizer.encode(texts[name]).ids, recipe.EOS], np.int16) for name in order])


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="scratch directory")
    work: Path = parser.parse_args().work
    texts = source_files(Path(sysconfig.get_path("stdlib")))
    held = {name: text for name, text in texts.items() if is_held_out(name)}
    train = {name: text for name, text in texts.items() if name not in held}
    tokenizer = train_tokenizer([train[name] for name in sorted(train)])
    recipe.TARGET.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(recipe.TARGET / "tokenizer.json"))
    recipe.write_json(
        recipe.TARGET / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": recipe.CONTEXT,
            "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        },
    )
    work.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"python": platform.python_version(), "split": "by file, sha256(name) % 20 == 0"}
    for part, chosen in (("train", train), ("held", held)):
        tokens = encode(tokenizer, chosen)
        np.save(work / f"{part}.npy", tokens)
        figures[part] = {
            "files": len(chosen),
            "characters": sum(len(text) for text in chosen.values()),
            "tokens": len(tokens),
            "sha256_of_tokens": hashlib.sha256(tokens.tobytes()).hexdigest(),
        }
        print(part, figures[part], flush=True)
    recipe.write_json(work / "held.json", held)
    recipe.write_json(recipe.HERE / "held-out.json", {"python": platform.python_version(), "files": sorted(held)})
    recipe.update_figures("corpus", figures)


if __name__ == "__main__":
    main()
