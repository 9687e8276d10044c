"""What a pinned engine is: a description, read from the source inside an SGLang wheel, never imported or installed.

One small JSON a version stands in ``data/engines``. What the source does not say plainly is null or named under
``unknown``; how layer ids become layers is looked up by the shape of the code (`shape`) in tables that a person has
verified, so that an unknown shape is a finding and never a guess.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

FORMAT = 1
DATA = Path(__file__).parent / "data"
SRT = "sglang/srt"
SETTER = "set_eagle3_layers_to_capture"
LARGEST = 32 << 20  # bytes of one source file; the largest of 0.5.23 has 0.4 MiB

# --- what a person has verified, by the shape of the code

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
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_params", "annotation", "returns"})
# a name in quotes; one that ends in _ is the beginning of names that are put together
_VARIABLE = re.compile(r"""["']((?:SGLANG|SGL)_[A-Z0-9_]+)["'{]""")
_COMPILED_VARIABLE = re.compile(rb"\b(?:SGLANG|SGL)_[A-Z0-9_]+")
_SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h")


class DescriptionError(ValueError):
    """A wheel or description that cannot be used; the text is one sentence for a person."""


# --- shapes of code


def shape(*nodes: ast.AST) -> str:
    """sha256 of the syntax trees: equal for equal code, whatever its comments, docstrings, layout and annotations.

    Written out here instead of `ast.dump`, whose text differs between versions of Python.
    """
    return hashlib.sha256("\n".join(map(_spell, nodes)).encode()).hexdigest()


def _spell(value: object) -> str:
    if isinstance(value, ast.AST):
        fields = []
        for name, item in ast.iter_fields(value):
            if name == "body" and isinstance(item, list) and item and _is_docstring(item[0]):
                item = item[1:]  # noqa: PLW2901 - the same field without its docstring
            if name not in _IGNORED and item is not None and item != []:
                fields.append(f"{name}={_spell(item)}")
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(map(_spell, value))}]"
    return repr(value)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# --- the wheel


class Source:
    """The Python files of a wheel, parsed when asked for. DescriptionError when it is no wheel of SGLang."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self._trees: dict[str, ast.Module | None] = {}
        try:
            self._archive = zipfile.ZipFile(wheel)
        except (OSError, zipfile.BadZipFile) as error:
            raise DescriptionError(f"{wheel} cannot be read as a wheel: {error}") from error
        self.names = frozenset(self._archive.namelist())

    @functools.cached_property
    def version(self) -> str:
        """The version its metadata states."""
        for name in sorted(self.names):
            if re.fullmatch(r"sglang-[^/]+\.dist-info/METADATA", name):
                found = re.search(r"^Version: *(\S+)", self.text(name), re.MULTILINE)
                if found:
                    return found[1]
        raise DescriptionError(f"{self.wheel} is no wheel of sglang: it has no sglang-*.dist-info/METADATA")

    def text(self, name: str) -> str:
        """One file as text, empty when the wheel has none of that name."""
        if name not in self.names:
            return ""
        if self._archive.getinfo(name).file_size > LARGEST:
            raise DescriptionError(f"{name} in {self.wheel} is larger than any source file")
        return self.data(name).decode("utf-8-sig", errors="replace")

    def data(self, name: str) -> bytes:
        """One file's bytes; DescriptionError when it cannot be read or is larger than anything compiled is."""
        if self._archive.getinfo(name).file_size > 8 * LARGEST:
            raise DescriptionError(f"{name} in {self.wheel} is larger than any compiled file")
        try:
            return self._archive.read(name)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise DescriptionError(f"{name} in {self.wheel} cannot be read: {error}") from error

    def tree(self, name: str) -> ast.Module | None:
        """One file as a syntax tree, None when there is none or it is no Python."""
        if name not in self._trees:
            text = self.text(name)
            try:
                self._trees[name] = ast.parse(text) if text else None
            except (SyntaxError, ValueError, RecursionError):
                self._trees[name] = None
        return self._trees[name]

    def under(self, folder: str) -> list[str]:
        """The Python files of a folder and below, sorted."""
        return sorted(name for name in self.names if name.startswith(f"{folder}/") and name.endswith(".py"))


def _classes(tree: ast.Module | None) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)} if tree else {}


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def _walk[T: ast.AST](node: ast.AST | None, kind: type[T]) -> Iterator[T]:
    return (item for item in ast.walk(node) if isinstance(item, kind)) if node else iter(())


# --- values written in the source


class _Unknown(Exception):  # noqa: N818 - no error: what cannot be read is reported as unknown
    """A value that only running the code would tell."""


class Constants:
    """Names that modules assign plain values to."""

    def __init__(self, trees: Iterable[ast.Module | None]) -> None:
        self._nodes: dict[str, ast.expr] = {}
        for tree in trees:
            for node in tree.body if tree else ():
                if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                    self._nodes[node.targets[0].id] = node.value
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                    self._nodes[node.target.id] = node.value

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """What an expression is: literals, names of such, their sums, list() and set() of them. `_Unknown` else."""
        if depth > 8:
            raise _Unknown
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Dict) and not node.keys:
            return {}
        if isinstance(node, ast.Name) and node.id in self._nodes:
            return self.value(self._nodes[node.id], depth + 1)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self.value(node.operand, depth + 1)
            if isinstance(number, int | float):
                return -number
        return self._items(node, depth + 1)

    def _items(self, node: ast.expr, depth: int) -> list[Any]:
        """A list, a sum of two, or one made from another."""
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item, depth) for item in node.elts]
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "set", "frozenset", "tuple", "sorted"):
            parts = node.args
        lists = [self.value(part, depth) for part in parts]
        if not lists or not all(isinstance(items, list) for items in lists):
            raise _Unknown
        return [item for items in lists for item in items]


# --- flags


def read_flags(source: Source) -> dict[str, dict[str, Any]]:
    """Every flag the server takes, by its name without dashes.

    An entry holds: type (int, float, str, bool for a switch, on-off for a --x/--no-x pair, json, else the parser's
    name, null when not readable), and where the source has them default, choices, nargs, aliases, deprecated;
    ``unknown`` lists those of them that it states in a way only running it would tell, which are null here.
    """
    fields = source.under(f"{SRT}/arg_groups/fields")
    server = source.tree(f"{SRT}/server_args.py")
    if server is None:
        raise DescriptionError(f"{source.wheel} has no {SRT}/server_args.py that could be read")
    names = [f"{SRT}/arg_groups/choices.py", f"{SRT}/utils/common.py", f"{SRT}/lora/lora_registry.py", *fields]
    constants = Constants([*map(source.tree, names), server])
    classes = [node for name in fields for node in _classes(source.tree(name)).values()]
    classes += [node for name, node in _classes(server).items() if name == "ServerArgs"]
    declared = {field.target.id: field for node in classes for field in _fields(node)}
    flags = {}
    for name, field in declared.items():
        if flag := _annotated_flag(name, field, constants):
            flags[flag.pop("name")] = flag
    for call in _walk(server, ast.Call):
        adds = isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        if adds and (flag := _argument_flag(call, declared, constants)):
            flags[flag.pop("name")] = flag
    return flags


class _Field(ast.AnnAssign):
    """A field of a class, declared as ``name: annotation``."""

    target: ast.Name


def _fields(node: ast.ClassDef) -> Iterator[_Field]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item  # type: ignore[misc]  # its target was looked at


def _annotated_flag(name: str, field: _Field, constants: Constants) -> dict[str, Any] | None:
    """A field ``name: A[type, "help" or Arg(...)] = default`` as a flag, None when it makes none."""
    note = field.annotation
    if not isinstance(note, ast.Subscript) or ast.unparse(note.value) not in ("A", "Annotated", "typing.Annotated"):
        return None
    parts = note.slice.elts if isinstance(note.slice, ast.Tuple) else [note.slice]
    words: dict[str, ast.expr] = {}
    for part in parts[1:]:
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "Arg":
            words = {word.arg: word.value for word in part.keywords if word.arg}
    if "no_cli" in words and ast.unparse(words["no_cli"]) == "True":
        return None
    flag: dict[str, Any] = {"name": _text(words.get("cli_name"), name.replace("_", "-")).removeprefix("--")}
    _set(flag, "default", field.value, constants)
    _set(flag, "choices", words.get("choices"), constants)
    _set(flag, "nargs", words.get("nargs"), constants)
    aliases: dict[str, Any] = {}
    _set(aliases, "aliases", words.get("aliases"), constants)
    if aliases.get("aliases"):
        flag["aliases"] = [alias.removeprefix("--") for alias in aliases["aliases"]]
    if "action" in words:
        return _with_action(flag, words["action"])
    kind = _unwrapped(parts[0])
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Literal":
        values = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        flag.setdefault("choices", [item.value for item in values if isinstance(item, ast.Constant)])
        first = type(flag["choices"][0]).__name__ if flag["choices"] else "str"
        flag["type"] = _parser(words["type_parser"]) if "type_parser" in words else first
    elif "type_parser" in words:
        flag["type"] = _parser(words["type_parser"])
    elif isinstance(kind, ast.Subscript) and ast.unparse(kind.value) in ("list", "List"):
        flag.setdefault("nargs", "+")
        flag["type"] = _scalar(kind.slice)
    else:
        flag["type"] = _scalar(kind)
    return flag


def _argument_flag(call: ast.Call, declared: Mapping[str, _Field], constants: Constants) -> dict[str, Any] | None:
    """A call ``parser.add_argument("--x", ...)`` as a flag, None when its names cannot be read."""
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if not names or len(names) != len(call.args) or not names[0].startswith("--"):
        return None
    words = {word.arg: word.value for word in call.keywords if word.arg}
    flag: dict[str, Any] = {"name": names[0].removeprefix("--")}
    if len(names) > 1:
        flag["aliases"] = [name.lstrip("-") for name in names[1:]]
    default = words.get("default")
    if isinstance(default, ast.Attribute) and ast.unparse(default.value) == "ServerArgs":
        default = declared[default.attr].value if default.attr in declared else default
    elif isinstance(default, ast.Call) and ast.unparse(default.func) == "_declared_default" and default.args:
        name = default.args[0]
        if isinstance(name, ast.Constant) and name.value in declared:
            default = declared[str(name.value)].value
    _set(flag, "default", default, constants)
    _set(flag, "choices", words.get("choices"), constants)
    _set(flag, "nargs", words.get("nargs"), constants)
    if "action" in words:
        return _with_action(flag, words["action"])
    flag["type"] = _parser(words["type"]) if "type" in words else "str"
    return flag


def _with_action(flag: dict[str, Any], action: ast.expr) -> dict[str, Any]:
    """A flag whose argparse action decides what it takes."""
    text = str(action.value) if isinstance(action, ast.Constant) else ast.unparse(action)
    kinds = {"store_true": "bool", "DeprecatedStoreTrueAction": "bool", "argparse.BooleanOptionalAction": "on-off"}
    flag["type"] = kinds.get(text)
    if "Deprecated" in text:
        flag["deprecated"] = True
    return flag


def _set(flag: dict[str, Any], key: str, node: ast.expr | None, constants: Constants) -> None:
    """Put a value of the source under a key, or null and the key under ``unknown``; nothing when there is none."""
    if node is None:
        return
    try:
        flag[key] = constants.value(node)
        json.dumps(flag[key])
    except (_Unknown, TypeError):
        flag[key] = None
        flag.setdefault("unknown", []).append(key)


def _text(node: ast.expr | None, default: str) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else default


def _unwrapped(node: ast.expr) -> ast.expr:
    """``Optional[X]`` and ``X | None`` as X."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Optional", "typing.Optional"):
        return node.slice
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and ast.unparse(node.right) == "None":
        return node.left
    return node


def _scalar(node: ast.expr) -> str | None:
    """A type as argparse is given it: what is neither a number nor a switch is text."""
    name = ast.unparse(node)
    return name if name in ("str", "int", "float", "bool") else "str" if name.isidentifier() else None


def _parser(node: ast.expr) -> str:
    name = ast.unparse(node)
    return "json" if name == "json.loads" else name


# --- environment


def read_environment(source: Source) -> dict[str, Any]:
    """``variables``: name → kind (bool, int, float, str, json, tuple; null: read somewhere, not through the
    registry); ``booleans``: what its parser of booleans takes after lower-casing, which strips nothing;
    ``deprecated``: the names it only warns about; ``families``: beginnings of names that are put together.
    """
    tree = source.tree(f"{SRT}/environ.py")
    if tree is None:
        raise DescriptionError(f"{source.wheel} has no {SRT}/environ.py that could be read")
    classes = _classes(tree)
    mentioned = _mentioned(source)
    families = sorted(name for name in mentioned if name.endswith("_"))
    variables: dict[str, str | None] = dict.fromkeys(mentioned)
    deprecated: list[str] = []
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and "_DEPRECATED_ENVS" in ast.unparse(node).split("=")[0]:
            deprecated = [str(key.value) for key in _walk(value, ast.Constant) if _is_key(key, value)]
    for item in classes["Envs"].body if "Envs" in classes else ():
        if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(item.value, ast.Call):
            target = item.targets[0] if isinstance(item, ast.Assign) else item.target
            kind = re.fullmatch(r"Env(\w+?)(WithAlias)?", ast.unparse(item.value.func))
            if isinstance(target, ast.Name) and kind:
                variables[target.id] = kind[1].lower()
    parser = _method(classes["EnvBool"], "parse") if "EnvBool" in classes else None
    words = [
        [str(item.value) for item in node.elts if isinstance(item, ast.Constant)] for node in _walk(parser, ast.List)
    ]
    return {
        "booleans": {"true": words[0], "false": words[1]} if len(words) == 2 else None,
        "deprecated": sorted(deprecated),
        "families": families,
        "variables": {name: variables[name] for name in sorted(variables) if not name.endswith("_")},
    }


def _mentioned(source: Source) -> set[str]:
    """Every name of a variable that stands somewhere in the wheel, in source or compiled."""
    found: set[str] = set()
    for name in source.names:
        if name.startswith("sglang/") and name.endswith(_SOURCES):
            found.update(_VARIABLE.findall(source.text(name)))
        elif name.startswith("sglang/") and name.endswith(".so"):
            found.update(item.decode() for item in _COMPILED_VARIABLE.findall(source.data(name)))
    return found


def _is_key(node: ast.Constant, table: ast.AST | None) -> bool:
    return isinstance(table, ast.Dict) and any(node is key for key in table.keys)


# --- models


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
            Path(name).stem: _classes(source.tree(name))
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
        for node in _walk(self.source.tree(f"{SRT}/models/{module}.py"), ast.ImportFrom):
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
        own = _method(place[1], method)
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
            for node in _walk(owner, ast.Assign)
            if ast.unparse(node.targets[0]) == f"self.{attribute}" and isinstance(node.value, ast.Call)
        }
        return made.pop() if len(made) == 1 else None

    def _capture(self, module: str, owner: ast.ClassDef) -> str | None:
        """The shape of the loop that keeps the states, and of what it hands the keeping to."""
        # what another file's class does with the states is not looked for: its loop is in another model
        loops = [
            loop
            for node in self.modules[module].values()
            if (forward := _method(node, "forward"))
            for loop in _walk(forward, ast.For)
            if "layers_to_capture" in ast.unparse(loop)
        ]
        model = self._member(module, owner, "model") or self._initialised(module, owner)
        if model and (place := self.find(module, model)) and (forward := _method(place[1], "forward")):
            module = place[0]
            loops = [loop for loop in _walk(forward, ast.For) if "layers_to_capture" in ast.unparse(loop)]
        if len(loops) != 1:
            return None
        return shape(loops[0], *self._handed(module, loops[0]))

    def _initialised(self, module: str, owner: ast.ClassDef) -> str | None:
        """``self.model = self._init_model(...)`` by the class that `_init_model` returns."""
        method = _method(owner, "_init_model")
        made = {ast.unparse(node.value.func) for node in _walk(method, ast.Return) if isinstance(node.value, ast.Call)}
        return made.pop() if len(made) == 1 else None

    def _handed(self, module: str, loop: ast.For) -> list[ast.AST]:
        """The code that keeps the state when the loop hands a collector to the layer instead."""
        words = {word.arg for call in _walk(loop, ast.Call) for word in call.keywords if "layers_to_capture" in _(word)}
        if not words:
            return []
        parts: list[ast.AST] = []
        for node in self.modules[module].values():
            forward = _method(node, "forward")
            if forward and words & {arg.arg for arg in [*forward.args.args, *forward.args.kwonlyargs]}:
                parts += [call for call in _walk(forward, ast.Call) if any(_hands(call, word) for word in words)]
        for name, node in _classes(self.source.tree(f"{SRT}/layers/layer_boundary/stage.py")).items():
            prepare = _method(node, "_prepare_attention")
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
        for node in _walk(source.tree(name), ast.Try):
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
        if name not in _classes(tree):
            continue
        loader = _method(_classes(tree)[name], "load_weights")
        digest = shape(loader) if loader else ""
        refused = [ast.unparse(node.test) for node in _walk(tree, ast.If) if isinstance(node.body[-1], ast.Raise)]
        widths = {
            FC_WIDTHS.get(ast.unparse(node.value.args[0]))
            for node in _walk(tree, ast.Assign)
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
    names = {node.attr for node in _walk(tree, ast.Attribute) if "config" in ast.unparse(node.value).lower()}
    for call in _walk(tree, ast.Call):
        if ast.unparse(call.func).rpartition(".")[2] in ("getattr", "hasattr", "get"):
            names |= {arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return sorted(names)


def read_config_types(source: Source) -> list[str]:
    """The values of model_type that the engine's own config classes declare; transformers knows others."""
    files = source.under(f"{SRT}/configs")
    files += [name for name in source.under(f"{SRT}/utils") if "hf_transformers" in name]
    found = set()
    for name in files:
        for node in _walk(source.tree(name), ast.Assign):
            if ast.unparse(node.targets[0]) == "model_type" and isinstance(node.value, ast.Constant):
                found.add(str(node.value.value))
    return sorted(found)


def read_hooks(source: Source) -> dict[str, bool]:
    """Which of the probe's targets exist."""
    found = {}
    for target in HOOKS:
        module, owner, method = target.rsplit(".", 2)
        node = _classes(source.tree(f"{module.replace('.', '/')}.py")).get(owner)
        found[target] = bool(node and _method(node, method))
    return found


# --- descriptions


def describe(wheel: Path) -> dict[str, Any]:
    """The description of the SGLang in a wheel. DescriptionError says what could not be read."""
    source = Source(wheel)
    try:
        return _describe(source)
    except RecursionError as error:
        raise DescriptionError(f"{wheel} has source that is nested deeper than any program") from error


def _describe(source: Source) -> dict[str, Any]:
    version = source.version
    return {
        "format": FORMAT,
        "engine": "sglang",
        "version": version,
        "flags": read_flags(source),
        "environment": read_environment(source),
        **read_models(source),
        "ids": read_reader(source),
        "drafters": read_drafters(source),
        "config_types": read_config_types(source),
        "hooks": read_hooks(source),
    }


def render(description: Mapping[str, Any]) -> str:
    """A description as it is kept: sorted, one line a top-level key."""
    lines = [
        f"{json.dumps(key)}:{json.dumps(description[key], sort_keys=True, separators=(',', ':'))}"
        for key in sorted(description)
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load(version: str, folder: Path = DATA / "engines") -> dict[str, Any] | None:
    """The kept description of a version, None when there is none. DescriptionError when it is damaged."""
    if not re.fullmatch(r"[0-9A-Za-z.+-]+", version):
        return None
    path = folder / f"sglang-{version}.json"
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DescriptionError(f"{path.name} cannot be read: {error}; describe the wheel again") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise DescriptionError(f"{path.name} is no description of format {FORMAT}; describe the wheel again")
    return description


def faults(version: str, facts: Iterable[str], path: Path = DATA / "engine_faults.yml") -> list[dict[str, str]]:
    """The known faults of a version that the facts of a deployment meet.

    facts: words of the data file's ``when`` lists. An entry without ``when`` holds for every deployment.
    """
    try:
        wanted = Version(version)
    except InvalidVersion:
        return []
    given = set(facts)
    return [
        entry
        for entry in _known_faults(path)
        if SpecifierSet(entry["versions"]).contains(wanted, prereleases=True) and set(entry.get("when", [])) <= given
    ]


@functools.cache
def _known_faults(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(yaml.safe_load(path.read_text(encoding="utf-8"))["faults"])


def main(arguments: Sequence[str] | None = None) -> int:
    """``pivot engine describe WHEEL [--out FILE]``."""
    parser = argparse.ArgumentParser(prog="pivot engine", description="What a pinned engine is.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("describe", help="read an SGLang wheel, without importing or installing it")
    command.add_argument("wheel", type=Path)
    command.add_argument("--out", type=Path, help="file to write (default: standard output)")
    parsed = parser.parse_args(arguments)
    try:
        text = render(describe(parsed.wheel))
        if parsed.out is None:
            sys.stdout.write(text)
        else:
            parsed.out.write_text(text, encoding="utf-8")
    except (DescriptionError, OSError) as error:
        print(f"pivot engine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
