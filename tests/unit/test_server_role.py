"""What roles/sglang_server decides in its own files: when a task of it runs, and what its variables say."""

from pathlib import Path

import jinja2
import pytest
import yaml

from pivot.serving import launch

ROLE = Path(__file__).resolve().parents[2] / "roles/sglang_server"


def decided(name, **variables):
    """Whether the role's task of this name runs."""
    tasks = yaml.safe_load((ROLE / "tasks/main.yml").read_text())
    (given,) = [task["when"] for task in tasks if task["name"] == name]
    conditions = given if isinstance(given, list) else [given]
    return all(jinja2.Environment().compile_expression(condition)(**variables) for condition in conditions)  # noqa: S701


def said(name, **variables):
    """What the role's variable of this name is."""
    given = yaml.safe_load((ROLE / "vars/main.yml").read_text())[name]
    environment = jinja2.Environment()  # noqa: S701
    environment.filters["pivot_launch_url"] = launch.url
    return environment.from_string(given).render(**variables)


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


@pytest.mark.parametrize(
    ("launch", "answers"), [({}, "True"), ({"node-rank": 0}, "True"), ({"node-rank": "1"}, "False")]
)
def test_of_a_server_over_several_machines_that_of_rank_0_answers(launch, answers):
    assert said("__sglang_server_answers", sglang_server_launch=launch) == answers
    for name in ("health", "drift"):
        assert 'answers: "{{ __sglang_server_answers }}"' in (ROLE / f"tasks/{name}.yml").read_text()


@pytest.mark.parametrize(
    ("host", "outside", "inside"),
    [
        ("192.0.2.11", "http://192.0.2.11:30000", "http://192.0.2.11:30000"),
        ("0.0.0.0", "http://llm01.example.org:30000", "http://127.0.0.1:30000"),  # noqa: S104 - asked, not bound to
    ],
)
def test_a_server_on_every_address_is_asked_at_the_hosts_own(host, outside, inside):
    variables = {"sglang_server_host": host, "sglang_server_port": 30000, "ansible_host": "llm01.example.org"}
    assert said("__sglang_server_url", **variables) == outside
    assert said("__sglang_server_url_inside", **variables) == inside
    unit = (ROLE.parents[1] / "templates/sglang.service.j2").read_text()
    assert "wait {{ __sglang_server_url_inside }}/health" in unit
