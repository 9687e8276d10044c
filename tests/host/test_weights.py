"""Weights: every file of each manifest is there, readable, and nobody's to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from testinfra.host import Host

if TYPE_CHECKING:
    from conftest import Settings


def test_every_model_is_complete_and_read_only(host: Host, settings: Settings) -> None:
    assert settings["model_weights_models"], "the inventory names no model"
    for model in settings["model_weights_models"]:
        path = f"{settings['model_weights_root']}/{model['repository']}/{model['revision']}"
        wanted = {name: file["size"] for name, file in json.loads(Path(model["manifest"]).read_text())["files"].items()}
        listing = host.check_output("find -L %s -mindepth 1 -printf '%%y %%m %%U %%s %%P\\n'", path)
        found = [line.split(" ", 4) for line in listing.splitlines()]
        sizes = {name: int(size) for kind, _, _, size, name in found if kind == "f"}
        assert {name: sizes.get(name) for name in wanted} == wanted, path
        odd = [(name, kind, mode, owner) for kind, mode, owner, _, name in found if (kind, mode) not in MODES]
        assert odd == [], path
        assert {owner for _, _, owner, _, _ in found} == {"0"}, path


MODES = {("f", "644"), ("d", "755")}
