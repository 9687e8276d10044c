"""Flags and environment variables that an SGLang knows, from its source."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pivot.engines.engine_source import SRT, Constants, DescriptionError, Source, Unknown, classes_of, method_of, walk

# a name in quotes; one that ends in _ is the beginning of names that are put together
_VARIABLE = re.compile(r"""["']((?:SGLANG|SGL)_[A-Z0-9_]+)["'{]""")
_COMPILED_VARIABLE = re.compile(rb"\b(?:SGLANG|SGL)_[A-Z0-9_]+")
_SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h")


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
    classes = [node for name in fields for node in classes_of(source.tree(name)).values()]
    classes += [node for name, node in classes_of(server).items() if name == "ServerArgs"]
    declared = {field.target.id: field for node in classes for field in _fields(node)}
    flags = {}
    for name, field in declared.items():
        if flag := _annotated_flag(name, field, constants):
            flags[flag.pop("name")] = flag
    for call in walk(server, ast.Call):
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
    except (Unknown, TypeError):
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


def read_environment(source: Source) -> dict[str, Any]:
    """``variables``: name → kind (bool, int, float, str, json, tuple; null: read somewhere, not through the
    registry); ``booleans``: what its parser of booleans takes after lower-casing, which strips nothing;
    ``deprecated``: the names it only warns about; ``families``: beginnings of names that are put together.
    """
    tree = source.tree(f"{SRT}/environ.py")
    if tree is None:
        raise DescriptionError(f"{source.wheel} has no {SRT}/environ.py that could be read")
    classes = classes_of(tree)
    mentioned = _mentioned(source)
    families = sorted(name for name in mentioned if name.endswith("_"))
    variables: dict[str, str | None] = dict.fromkeys(mentioned)
    deprecated: list[str] = []
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and "_DEPRECATED_ENVS" in ast.unparse(node).split("=")[0]:
            deprecated = [str(key.value) for key in walk(value, ast.Constant) if _is_key(key, value)]
    for item in classes["Envs"].body if "Envs" in classes else ():
        if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(item.value, ast.Call):
            target = item.targets[0] if isinstance(item, ast.Assign) else item.target
            kind = re.fullmatch(r"Env(\w+?)(WithAlias)?", ast.unparse(item.value.func))
            if isinstance(target, ast.Name) and kind:
                variables[target.id] = kind[1].lower()
    parser = method_of(classes["EnvBool"], "parse") if "EnvBool" in classes else None
    words = [
        [str(item.value) for item in node.elts if isinstance(item, ast.Constant)] for node in walk(parser, ast.List)
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
