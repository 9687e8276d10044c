"""`pivot-lab`: the lab's commands. Progress goes to stderr, results to stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pivot_lab import lab, machine
from pivot_lab.errors import LabError
from pivot_lab.layout import Layout
from pivot_lab.system import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pivot_lab.scratch import Scratch


def _clone() -> Path:
    """The clone this package was installed from, where it was installed editable."""
    candidate = Path(__file__).resolve().parents[2]
    if (candidate / "lab" / "pyproject.toml").exists():
        return candidate
    raise LabError("this pivot-lab was not installed from a clone: name one with --root or PIVOT_LAB_ROOT")


def _layout(args: argparse.Namespace) -> Layout:
    root = args.root or os.environ.get("PIVOT_LAB_ROOT")
    cache = args.cache or os.environ.get("PIVOT_LAB_CACHE")
    path = Path(root) if root else _clone()
    if not path.is_dir():
        raise LabError(f"--root names {path}, which is no directory: give the path of a clone")
    return Layout.of(path, Path(cache) if cache else None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pivot-lab", description=__doc__)
    parser.add_argument(
        "--root", metavar="DIR", help="the clone whose lab is meant (or PIVOT_LAB_ROOT; default: this one)"
    )
    parser.add_argument(
        "--cache", metavar="DIR", help="where templates are kept (or PIVOT_LAB_CACHE; default: ROOT/.cache)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="bring the lab up; does nothing where it is up")
    commands.add_parser("down", help="remove every trace of the lab, except the cache")
    commands.add_parser("status", help="show what the lab consists of")
    commands.add_parser("daemon", help="run the API in the foreground (`up` does this in the background)")
    scratch = commands.add_parser("scratch", help="containers for tests, unknown to the API").add_subparsers(
        dest="verb", required=True
    )
    make = scratch.add_parser("up", help="make one and print how to reach it, as JSON")
    make.add_argument("name")
    make.add_argument("--layer", help="clone this saved layer instead of the bare template")
    make.add_argument("--memory", type=int, metavar="MIB", help="memory limit in MiB")
    scratch.add_parser("down", help="remove one").add_argument("name")
    scratch.add_parser("list", help="print all of them, as JSON")
    layer = commands.add_parser("layer", help="what a scratch container added, kept for further clones").add_subparsers(
        dest="verb", required=True
    )
    save = layer.add_parser("save", help="stop a scratch container and keep its changes; the container is gone then")
    save.add_argument("name")
    save.add_argument("layer")
    copy = layer.add_parser("copy", help="keep a directory that a container added, as `pivot-lab status` names it")
    copy.add_argument("name")
    copy.add_argument("directory")
    copy.add_argument("layer")
    layer.add_parser("list", help="print the names of saved layers")
    layer.add_parser("show", help="print where one lies").add_argument("layer")
    layer.add_parser("drop", help="remove one").add_argument("layer")
    return parser


def _scratch(layout: Layout, *, make: bool) -> Scratch:
    from pivot_lab.scratch import Scratch  # noqa: PLC0415  # not needed by the other commands

    return Scratch(layout, lab.ensure_base(layout) if make else lab.subnet_of(layout))


def _run_scratch(layout: Layout, args: argparse.Namespace) -> None:
    if args.verb == "up":
        print(json.dumps(_scratch(layout, make=True).up(args.name, args.layer, args.memory), indent=1))
    elif not (layout.dot / "state.json").exists():
        if args.verb == "list":
            print("[]")
    elif args.verb == "down":
        _scratch(layout, make=False).down(args.name)
    else:
        print(json.dumps(_scratch(layout, make=False).list(), indent=1))


def _run_layer(layout: Layout, args: argparse.Namespace) -> None:
    scratch = _scratch(layout, make=False)
    if args.verb == "save":
        say(f"saved in {scratch.save(args.name, args.layer)}")
    elif args.verb == "copy":
        say(f"copied to {scratch.copy(args.name, args.directory, args.layer)}")
    elif args.verb == "show":
        print(scratch.tree(args.layer))
    elif args.verb == "drop":
        scratch.drop(args.layer)
    else:
        print("".join(f"{name}\n" for name in sorted(scratch.layers())), end="")


def _dispatch(args: argparse.Namespace) -> int:
    layout = _layout(args)
    machine.require_root()
    if args.command == "status":
        print(lab.status(layout))
    elif args.command == "up":
        lab.up(layout)
    elif args.command == "down":
        lab.down(layout)
    elif args.command == "scratch":
        _run_scratch(layout, args)
    elif args.command == "layer":
        _run_layer(layout, args)
    else:
        from pivot_lab import daemon  # noqa: PLC0415  # pulls in the web server

        return daemon.main(layout)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a LabError is printed as its sentence, with status 1."""
    args = _parser().parse_args(argv)
    os.umask(0o022)  # containers' ids are others here, and have to reach what is made for them
    try:
        return _dispatch(args)
    except LabError as error:
        print(f"pivot-lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pivot-lab: interrupted; run the command again, or `pivot-lab down`", file=sys.stderr)
        return 130
