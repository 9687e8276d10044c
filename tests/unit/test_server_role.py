"""What roles/sglang_server decides in its own files: when a task of it runs, and what its variables say."""

from pathlib import Path

import jinja2
import pytest
import yaml

ROLE = Path(__file__).resolve().parents[2] / "roles/sglang_server"


def decided(name, **variables):
    """Whether the role's task of this name runs."""
    tasks = yaml.safe_load((ROLE / "tasks/main.yml").read_text())
    (given,) = [task["when"] for task in tasks if task["name"] == name]
    conditions = given if isinstance(given, list) else [given]
    return all(jinja2.Environment().compile_expression(condition)(**variables) for condition in conditions)  # noqa: S701


def state(active="active", enabled="enabled", loaded="loaded"):
    unit = {"ActiveState": active, "UnitFileState": enabled, "LoadState": loaded}
    return {
        "__sglang_server_state": {"unit": unit},
        "__sglang_server_down": active != "active",
        "__sglang_server_reasons": [],
    }


@pytest.mark.parametrize(
    ("facts", "starts", "enables"),
    [
        (state(), False, False),
        (state(enabled="disabled"), False, True),  # a right server is left running
        (state(active="failed"), True, False),
        (state(active="inactive", enabled="", loaded="not-found"), True, False),  # in check mode of a fresh host
    ],
)
def test_a_unit_that_is_not_enabled_is_no_reason_for_a_restart(facts, starts, enables):
    assert decided("Run", **facts) == starts
    assert decided("Each boot starts it", **facts) == enables
