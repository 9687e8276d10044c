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
        listing = host.check_output("find %s -mindepth 1 -printf '%%y %%m %%U %%P\\n'", path)
        found = [line.split(" ", 3) for line in listing.splitlines()]
        odd = [(name, kind, mode) for kind, mode, _, name in found if kind != "l" and (kind, mode) not in MODES]
        assert odd == [], path
        assert {owner for _, _, owner, _ in found} == {"0"}, path
        # what a link leads to is somebody else's: modes and owners there are his
        listing = host.check_output("find -L %s -type f -printf '%%s %%P\\n'", path)
        sizes = {name: int(size) for size, name in (line.split(" ", 1) for line in listing.splitlines())}
        assert {name: sizes.get(name) for name in wanted} == wanted, path
        user = settings["sglang_server_user"]
        assert host.check_output("cd / && runuser -u %s -- find -L %s -type f " + UNFIT, user, path) == "", path


MODES = {("f", "644"), ("d", "755")}
UNFIT = r"'(' '!' -readable -o -writable ')' -printf '%%P\n'"
