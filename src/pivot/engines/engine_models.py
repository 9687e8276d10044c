"""Models and drafters that an SGLang serves, and how its code turns layer ids into layers.

How is looked up by the shape of the code, in tables that a person has verified: an unknown shape stays null.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, Final

from pivot.engines.engine_source import SRT, Source, _is_docstring, classes_of, method_of, shape, walk

SETTER = "set_eagle3_layers_to_capture"
# how the setter turns ids into `layers_to_capture`; all of them read [2, n//2, n-3] without ids, which is not shifted
SETTERS: Final = {
    # llama.py of all four; deepseek_v2.py of 0.5.9 and 0.5.12
    "e68ad2b2e75baad1df987a25e464a160b05c8f3487635aaeae9da5e6d440be0e": "always_plus_one",
    # qwen2.py, qwen3.py, bailing_moe.py
    "48bf03bc577852f4983216f312002c9f6ea68d0ee04c990cb911e4c53e4dafee": "always_plus_one",
    # exaone_moe.py, minimax_m2.py up to 0.5.13
    "020e03bcd3596ad418aa86a0d3e260da875a1ae511d0e76b23bb507e98935a59": "always_plus_one",
    # the same of 0.5.23
    "ce191edf1f28503ab0fa1e2f4e0dac59413c0fed96108b55ccb386d5b6d198ac": "always_plus_one",
    # longcat_flash.py, gemma3_causal.py, gemma4_causal.py
    "1433be694e33f4d25f9832de66226b53debc975442f8b2f078c65d3197da5ff7": "always_plus_one",
    # deepseek_v2.py and glm4_moe_lite.py of 0.5.13 and 0.5.23
    "13b4ec03cb9875fb221847c0a50637bd66b445bcced9f067b9cf495d1792bfb5": "plus_one_if_first_is_1",
    # kimi_k25.py: asks its language model
    "076973abfa5ef9e8bfbe660198e98a04fb92367d7aa8b98cacc748d2fa49086e": "delegates",
    # gemma3_mm.py, mllama4.py: the same, and nothing where that has no setter
    "dbf762ac39b0c3ce2b2a3d4697c90b1f9948d10fb2a9e581bdf9ded18f2bc979": "delegates",
}
# what the loop over the layers keeps for an i in `layers_to_capture`, and what happens for layer 0
CAPTURES: Final = {
    # deepseek_v2.py of 0.5.9: hidden_states + residual, which is None before layer 0
    "314f3912e1425836d9c1e452ff3e3c49f6a0f7d6bc81db963d0208b6b5d7219c": {"keeps": "input", "embedding": "fails"},
    # deepseek_v2.py of 0.5.12 and 0.5.13: the same
    "42760afa3693752f28eb7e5cf8893569c5a5b92ca99d7c58b439101961e57f86": {"keeps": "input", "embedding": "fails"},
    # llama.py up to 0.5.13: the same
    "d6c86822ab53adde55ae703f7ba4cbdee0752c89f3bcc73d0f33aeb86ff41f50": {"keeps": "input", "embedding": "fails"},
    # deepseek_v2.py of 0.5.23: the residual after the input norm's addition, the embedding before layer 0
    "dacaffc6505bff6d716bd298d5c365f0bca5d8ebb82612d6dec23df6af90b9e5": {"keeps": "input", "embedding": "kept"},
    # llama.py and qwen2.py of 0.5.23: the same state, kept before the norm for layer 0
    "737edfac10a94938187d0be65033748416491eaab367cd677ed36d527c819ee6": {"keeps": "input", "embedding": "kept"},
}
# where the ids are read: eagle_config.eagle_aux_hidden_state_layer_ids, and nowhere else
READERS: Final = {
    # model_runner.py up to 0.5.13: any error leaves no ids, so the default
    "a88e3094f1145deda594eafdca8bc339aa1ff5b775c60aacc9f00243e4fc4627": "nested",
    # spec_aux_hidden_state.py of 0.5.23: the same
    "b92c99c348c5cbe593e461a0e676d8c9979871b20b83be16ea49bb4a1c6dea0b": "nested",
}
# the input width of a drafter's fc
FC_WIDTHS: Final = {
    "self.hidden_size_in * 3": "three",
    "self.hidden_size_in * self.num_aux_hidden_states": "ids",
    "target_hidden_size * num_fc_input": "ids",
    "target_hidden_size * self.num_aux_hidden_states": "ids",
}
# which names of tensors a drafter's load_weights takes
LOADERS: Final = {
    # llama_eagle3.py of 0.5.9: the layer is called midlayer and nothing else
    "4626fe93af2cc7f30612decda887ab05618ec529a5f88171a14e8e166c429213": "llama-midlayer",
    # llama_eagle3.py from 0.5.12: midlayer or layers.N, aux_norm_* as fc_norm.N
    "cb87b508a2900bfd5cb27a1def479db38943d533e599c50bdc66b32def518eef": "llama",
    # kimi_k25_eagle3.py: midlayer or layers.0, every name without model. before it
    "29d469fbe4e3d1e0a1ecafd1798f5f287fc8688adc539d5316d89ab3e90fea74": "mla",
}
DRAFTERS = {
    "LlamaForCausalLMEagle3": f"{SRT}/models/llama_eagle3.py",
    "Eagle3DeepseekV2ForCausalLM": f"{SRT}/models/kimi_k25_eagle3.py",
}
# what the debug probe hooks into (probe/src/pivot_probe/targets.py), and what registers its hooks
HOOKS = (
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.models.deepseek_v2.DeepseekV2Model.__init__",
    "sglang.srt.models.deepseek_v2.DeepseekV2Model.forward",
    "sglang.srt.models.llama.LlamaModel.__init__",
    "sglang.srt.models.llama.LlamaModel.forward",
    "sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store",
    "sglang.srt.models.llama_eagle3.LlamaModel.__init__",
    "sglang.srt.models.kimi_k25_eagle3.Eagle3MLAModel.__init__",
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
    "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify",
)


def read_models(source: Source) -> dict[str, Any]:
    """``architectures``: the classes the engine serves; ``eagle3``: of those with a setter, how ids become layers.

    An entry of eagle3 holds setter (where it is defined) and its shape, rule, keeps and embedding (see SETTERS and
    CAPTURES), the shape of the capture loop; rule and keeps are null where the shape is not in the tables.
    """
    index = _Index(source)
    found = {name: index.eagle3(name) for name in sorted(index.architectures)}
    return {
        "architectures": sorted(index.architectures),
        "eagle3": {name: entry for name, entry in found.items() if entry is not None},
    }


class _Index:
    """Classes of the model files, across their imports of each other."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.modules = {
            Path(name).stem: classes_of(source.tree(name))
            for name in source.under(f"{SRT}/models")
            if name.count("/") == 3
        }
        self.architectures: dict[str, str] = {}
        for name in source.under(f"{SRT}/models"):
            for node in getattr(source.tree(name), "body", ()):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                    items = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                    for item in items:
                        if isinstance(item, ast.Name):
                            self.architectures[item.id] = Path(name).stem

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """A class as a module sees it: its own, or imported from another model file."""
        if name in self.modules.get(module, {}):
            return module, self.modules[module][name]
        for node in walk(self.source.tree(f"{SRT}/models/{module}.py"), ast.ImportFrom):
            for alias in node.names:
                origin = (node.module or "").removeprefix("sglang.srt.models.")
                if (alias.asname or alias.name) == name and origin in self.modules and origin != module:
                    return self.find(origin, alias.name)
        return None

    def with_method(self, module: str, name: str, method: str) -> tuple[str, ast.ClassDef, ast.FunctionDef] | None:
        """Where a class or the nearest of its bases defines a method."""
        place = self.find(module, name)
        if place is None:
            return None
        own = method_of(place[1], method)
        if own is not None:
            return place[0], place[1], own
        for base in place[1].bases:
            if isinstance(base, ast.Name) and base.id != name:
                found = self.with_method(place[0], base.id, method)
                if found:
                    return found
        return None

    def eagle3(self, architecture: str, depth: int = 0) -> dict[str, Any] | None:
        """How one architecture turns ids into layers, None when it has no setter."""
        module = self.architectures.get(architecture, "")
        found = self.with_method(module, architecture, SETTER)
        return self._entry(*found, depth) if found else None

    def _entry(self, module: str, owner: ast.ClassDef, setter: ast.FunctionDef, depth: int) -> dict[str, Any]:
        digest = shape(*setter.body[1:]) if _is_docstring(setter.body[0]) else shape(*setter.body)
        rule = SETTERS.get(digest)
        entry: dict[str, Any] = {"setter": f"{module}.{owner.name}", "setter_shape": digest, "rule": rule}
        if rule == "delegates":
            inner = self._member(module, owner, "language_model") if depth < 2 else None
            place = self.with_method(module, inner, SETTER) if inner else None
            if place:
                entry = {**self._entry(*place, depth + 1), "through": entry["setter"], "through_shape": digest}
            else:
                entry["rule"] = None
            return entry
        capture = self._capture(module, owner)
        entry["capture_shape"] = capture
        entry.update(CAPTURES.get(capture or "", {"keeps": None, "embedding": None}))
        return entry

    def _member(self, module: str, owner: ast.ClassDef, attribute: str) -> str | None:
        """The class that a member is made from, None unless it is one and the same everywhere."""
        made = {
            ast.unparse(node.value.func)
            for node in walk(owner, ast.Assign)
            if ast.unparse(node.targets[0]) == f"self.{attribute}" and isinstance(node.value, ast.Call)
        }
        return made.pop() if len(made) == 1 else None

    def _capture(self, module: str, owner: ast.ClassDef) -> str | None:
        """The shape of the loop that keeps the states, and of what it hands the keeping to."""
        # what another file's class does with the states is not looked for: its loop is in another model
        loops = [
            loop
            for node in self.modules[module].values()
            if (forward := method_of(node, "forward"))
            for loop in walk(forward, ast.For)
            if "layers_to_capture" in ast.unparse(loop)
        ]
        model = self._member(module, owner, "model") or self._initialised(module, owner)
        if model and (place := self.find(module, model)) and (forward := method_of(place[1], "forward")):
            module = place[0]
            loops = [loop for loop in walk(forward, ast.For) if "layers_to_capture" in ast.unparse(loop)]
        if len(loops) != 1:
            return None
        return shape(loops[0], *self._handed(module, loops[0]))

    def _initialised(self, module: str, owner: ast.ClassDef) -> str | None:
        """``self.model = self._init_model(...)`` by the class that `_init_model` returns."""
        method = method_of(owner, "_init_model")
        made = {ast.unparse(node.value.func) for node in walk(method, ast.Return) if isinstance(node.value, ast.Call)}
        return made.pop() if len(made) == 1 else None

    def _handed(self, module: str, loop: ast.For) -> list[ast.AST]:
        """The code that keeps the state when the loop hands a collector to the layer instead."""
        words = {word.arg for call in walk(loop, ast.Call) for word in call.keywords if "layers_to_capture" in _(word)}
        if not words:
            return []
        parts: list[ast.AST] = []
        for node in self.modules[module].values():
            forward = method_of(node, "forward")
            if forward and words & {arg.arg for arg in [*forward.args.args, *forward.args.kwonlyargs]}:
                parts += [call for call in walk(forward, ast.Call) if any(_hands(call, word) for word in words)]
        for name, node in classes_of(self.source.tree(f"{SRT}/layers/layer_boundary/stage.py")).items():
            prepare = method_of(node, "_prepare_attention")
            if name == "StageBoundary" and prepare:
                parts.append(prepare)
        return parts


def _(word: ast.keyword) -> str:
    return ast.unparse(word.value)


def _hands(call: ast.Call, name: str | None) -> bool:
    return any(isinstance(word.value, ast.Name) and word.value.id == name for word in call.keywords)


def read_reader(source: Source) -> dict[str, str | None]:
    """Where the drafter's ids are read: ``keys`` is ``nested`` (see READERS) or null, with the code's shape."""
    for name in source.under(f"{SRT}/model_executor"):
        if "eagle_aux_hidden_state_layer_ids" not in source.text(name):
            continue
        for node in walk(source.tree(name), ast.Try):
            text = ast.unparse(node)
            if "'eagle_aux_hidden_state_layer_ids'" in text and len(text) < 2000:
                digest = shape(*node.body, *node.handlers[0].body)
                return {"keys": READERS.get(digest), "shape": digest}
    return {"keys": None, "shape": None}


def read_drafters(source: Source) -> dict[str, Any]:
    """The drafter classes: what their code reads of the config, the width of fc, the loader, and two rules.

    one_layer: refuses num_hidden_layers other than 1; needs_q_lora: refuses a config without q_lora_rank; float_only:
    refuses weights of another dtype than bfloat16, float16 and float32.
    """
    found = {}
    for name, path in DRAFTERS.items():
        tree = source.tree(path)
        if name not in classes_of(tree):
            continue
        loader = method_of(classes_of(tree)[name], "load_weights")
        digest = shape(loader) if loader else ""
        refused = [ast.unparse(node.test) for node in walk(tree, ast.If) if isinstance(node.body[-1], ast.Raise)]
        widths = {
            FC_WIDTHS.get(ast.unparse(node.value.args[0]))
            for node in walk(tree, ast.Assign)
            if ast.unparse(node.targets[0]) == "self.fc" and isinstance(node.value, ast.Call) and node.value.args
        }
        found[name] = {
            "reads": _config_names(tree),
            "fc": widths.pop() if len(widths) == 1 else None,
            "loader": LOADERS.get(digest),
            "loader_shape": digest,
            "one_layer": any("num_hidden_layers != 1" in test for test in refused),
            "needs_q_lora": any("q_lora_rank is None" in test for test in refused),
            "float_only": any("dtype not in" in test for test in refused),
        }
    return found


def _config_names(tree: ast.Module | None) -> list[str]:
    """Every name that could be a key of a config: attributes, and texts handed to getattr, hasattr and get."""
    names = {node.attr for node in walk(tree, ast.Attribute) if "config" in ast.unparse(node.value).lower()}
    for call in walk(tree, ast.Call):
        if ast.unparse(call.func).rpartition(".")[2] in ("getattr", "hasattr", "get"):
            names |= {arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return sorted(names)


def read_config_types(source: Source) -> list[str]:
    """The values of model_type that the engine's own config classes declare; transformers knows others."""
    files = source.under(f"{SRT}/configs")
    files += [name for name in source.under(f"{SRT}/utils") if "hf_transformers" in name]
    found = set()
    for name in files:
        for node in walk(source.tree(name), ast.Assign):
            if ast.unparse(node.targets[0]) == "model_type" and isinstance(node.value, ast.Constant):
                found.add(str(node.value.value))
    return sorted(found)


def read_hooks(source: Source) -> dict[str, bool]:
    """Which of the probe's targets exist."""
    found = {}
    for target in HOOKS:
        module, owner, method = target.rsplit(".", 2)
        node = classes_of(source.tree(f"{module.replace('.', '/')}.py")).get(owner)
        found[target] = bool(node and method_of(node, method))
    return found
