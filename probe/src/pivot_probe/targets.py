"""Which functions of SGLang the probe hooks: known beforehand, and told by `python -m pivot_probe.targets`."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping

MODELS = "sglang.srt.models"
# the classes that run a target's decoder layers; Kimi-K2.5 wraps the first
TARGETS = (f"{MODELS}.deepseek_v2.DeepseekV2Model", f"{MODELS}.llama.LlamaModel")
# the classes that hold a drafter's `fc`
DRAFTERS = (f"{MODELS}.llama_eagle3.LlamaModel", f"{MODELS}.kimi_k25_eagle3.Eagle3MLAModel")
PACKING = "sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
DRAFTING = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"
VERIFYING = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify"
# what registers the hooks: without it there is no plugin framework
FRAMEWORK = "sglang.srt.plugins.hook_registry.HookRegistry.register"
HOOKED = (
    *(f"{name}.{method}" for name in TARGETS for method in ("__init__", "forward")),
    PACKING,
    *(f"{name}.__init__" for name in DRAFTERS),
    RUNNER,
    DRAFTING,
    VERIFYING,
)
PRESENT = "registered"


def resolve() -> Mapping[str, str]:
    """Each hooked function → ``registered`` when this engine has it, else ``missing: why``. Imports the engine."""
    return {target: _state(target) for target in HOOKED}


def _state(target: str) -> str:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        return f"missing: {type(error).__name__}: {error}"[:200]
    return PRESENT


def main() -> int:
    """Print a line for each target; status 1 when one is missing."""
    found = {FRAMEWORK: _state(FRAMEWORK), **resolve()}
    for target, state in found.items():
        print(f"{'found' if state == PRESENT else state:<8} {target}")
    return int(any(state != PRESENT for state in found.values()))


if __name__ == "__main__":
    sys.exit(main())
