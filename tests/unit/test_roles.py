"""What every role keeps to, read from its files: reasons beside silenced tasks, size, no variables of others."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
TASK_FILES = sorted(
    [
        *ROOT.glob("*.yml"),
        *ROOT.glob("playbooks/**/*.yml"),
        *ROOT.glob("roles/*/tasks/**/*.yml"),
        *ROOT.glob("roles/*/handlers/**/*.yml"),
        *(path for path in ROOT.glob("molecule/*/**/*.yml") if path.name != "molecule.yml"),
    ]
)
SILENCING = ("ignore_errors", "ignore_unreachable", "failed_when", "no_log")
LONGEST = 150
# what an inventory of this project calls its own; a role that can be used alone gets it through its own variables
INVENTORY_NAMES = r"(?<![\w.])(?:lab_|__lab_|vault_|pivot_pins|pivot_root)\w*"


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def walk(node: yaml.Node, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], yaml.Node, yaml.Node]]:
    """(keys above, key, value) of every entry of every mapping; nodes know their lines."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield above, key, value
            yield from walk(value, (*above, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from walk(item, above)


def tasks(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    """Every mapping that is an item of a list (plays, tasks, blocks), and what an include applies to its tasks."""
    if isinstance(node, yaml.SequenceNode):
        yield from (item for item in node.value if isinstance(item, yaml.MappingNode))
    children = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        children = [value for _, value in node.value]
        yield from (v for key, v in node.value if key.value == "apply" and isinstance(v, yaml.MappingNode))
    for child in children:
        yield from tasks(child)


def silences(key: str, value: str) -> bool:
    """Whether a keyword with this value hides a failure or an output."""
    if key == "failed_when":
        return value.lower() in ("false", "no", "off")
    return value.lower() not in ("false", "no", "off")


def comment_above(lines: list[str], number: int) -> str:
    """The comment lines directly above a line (counted from 0), in one text."""
    found: list[str] = []
    while number > 0 and lines[number - 1].lstrip().startswith("#"):
        number -= 1
        found.insert(0, lines[number].strip(" #"))
    return " ".join(found)


def unexplained(text: str) -> list[str]:
    """Keywords that silence a task without a reason: behind them, above them, or above the task, naming them."""
    document = yaml.compose(text)
    if document is None:
        return []
    lines = text.splitlines()
    found = []
    for task in tasks(document):
        for key, value in task.value:
            if key.value not in SILENCING or not any(silences(key.value, item.value) for item in scalars(value)):
                continue
            number = key.start_mark.line
            behind = re.search(r"\s#\s*\S", lines[number])
            task_comment = comment_above(lines, task.start_mark.line)
            if not (behind or comment_above(lines, number) or key.value in task_comment):
                found.append(f"line {number + 1}: {key.value}")
    return found


def variables(document: yaml.Node) -> Iterator[tuple[int, str]]:
    """(line from 1, text) of every key and every scalar that Ansible may evaluate; descriptions are only read."""
    for above, key, value in walk(document):
        if "description" in (key.value, *above) or "short_description" in (key.value, *above):
            continue
        yield key.start_mark.line + 1, str(key.value)
        for scalar in scalars(value):
            yield scalar.start_mark.line + 1, scalar.value


def scalars(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """A scalar, or the scalars of a list; mappings are walked by `walk`."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from scalars(item)


def foreign(text: str, role: str, roles: list[str]) -> list[str]:
    """Variables that a role's file names and that belong to another role or to an inventory of this project."""
    document = yaml.compose(text)
    if document is None:
        return []
    others = "|".join(sorted((name for name in roles if name != role), key=len, reverse=True))
    name = rf"(?:__)?(?:{others})_\w+"
    # an attribute is another thing's name, but not of hostvars
    pattern = re.compile(rf"(?<![\w.]){name}|hostvars\b[\w.\[\]()'\" ]*?\.{name}|{INVENTORY_NAMES}")
    found = {(line, name) for line, value in variables(document) for name in pattern.findall(value)}
    return [f"line {line}: {name}" for line, name in sorted(found)]


def keys(path: Path) -> list[str]:
    return list(yaml.safe_load(path.read_text()) or {}) if path.exists() else []


def specs(role: str) -> dict[str, dict[str, object]]:
    return yaml.safe_load((ROOT / "roles" / role / "meta/argument_specs.yml").read_text())["argument_specs"]


# ---------------------------------------------------------------- the guards themselves


@pytest.mark.parametrize(
    "task",
    [
        "- name: A\n  command: x\n  ignore_errors: true\n",
        "- name: A\n  command: x\n  failed_when: false\n",
        "- name: A\n  command: x\n  failed_when: [false]\n",
        "- name: A\n  command: x\n  no_log: '{{ hide }}'\n",
        "- block:\n    - command: x\n  no_log: true\n",
        "# something else\n- name: A\n  command: x\n  no_log: true\n",
        "- hosts: all\n  tasks:\n    - command: x\n      ignore_unreachable: true\n",
        "- include_role:\n    name: x\n    apply:\n      ignore_errors: true\n",
    ],
)
def test_a_silenced_task_without_a_reason_is_found(task: str) -> None:
    assert len(unexplained(task)) == 1


@pytest.mark.parametrize(
    "task",
    [
        "- name: A\n  command: x\n  ignore_errors: true # it may be gone already\n",
        "- name: A\n  command: x\n  # it may be gone already\n  failed_when: false\n",
        "# no_log: the answer holds a secret\n- name: A\n  command: x\n  no_log: true\n",
        "- name: A\n  command: x\n  failed_when: result.rc > 1\n",
        "- name: A\n  command: x\n  no_log: false\n",
        "argument_specs:\n  main:\n    options:\n      x_key:\n        no_log: true\n",
    ],
)
def test_a_reason_beside_it_is_accepted(task: str) -> None:
    assert unexplained(task) == []


@pytest.mark.parametrize(
    "text",
    [
        "- debug: {msg: '{{ other_role_port }}'}",
        "- debug: {msg: x}\n  when: __other_role_plan.changes",
        "mine_root: '{{ other_role_root }}'",
        "- include_role: {name: other_role}\n  vars: {other_role_port: 1}",
        "- debug: {msg: x}\n  loop: ['{{ vault_key }}']",
        "mine_pin: '{{ pivot_pins.engines }}'",
        "mine_host: '{{ lab_api_host }}'",
        "mine_port: '{{ hostvars[mine_node].other_role_port }}'",
        "mine_port: '{{ hostvars.node.__other_role_plan }}'",
        "mine_port: '{{ hostvars[mine_node][\"other_role_port\"] }}'",
        'mine_port: \'{{ lookup("vars", "other_role_port") }}\'',
    ],
)
def test_a_variable_of_another_is_found(text: str) -> None:
    assert len(foreign(text, "mine", ["mine", "other_role"])) == 1


@pytest.mark.parametrize(
    "text",
    [
        "mine_root: '{{ mine_base }}' # as other_role_root",
        "- include_role: {name: other_role}",
        "- debug: {msg: '{{ answer.other_role_root }}'}",
        "argument_specs: {main: {description: [as C(other_role_x)], options: {mine_x: {description: other_role_x}}}}",
    ],
)
def test_own_variables_comments_and_descriptions_are_not(text: str) -> None:
    assert foreign(text, "mine", ["mine", "other_role"]) == []


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize("path", TASK_FILES, ids=relative)
def test_no_task_is_silenced_without_its_reason(path: Path) -> None:
    assert unexplained(path.read_text()) == []


@pytest.mark.parametrize("path", TASK_FILES, ids=relative)
def test_no_task_file_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("path", TASK_FILES, ids=relative)
def test_hosts_do_not_write_one_file_of_the_controller_at_once(path: Path) -> None:
    """These modules read a file, add to it and replace it: of two at the same time one is lost."""
    for task in tasks(yaml.compose(path.read_text())):
        given = {str(key.value): value.value for key, value in task.value}
        modules = {name.rsplit(".", 1)[-1] for name in given} & {"known_hosts", "lineinfile", "blockinfile"}
        if modules and given.get("delegate_to") == "localhost":
            assert given.get("throttle") == "1" or given.get("run_once") == "true", given["name"]


def rendered(role: str) -> list[Path]:
    """The project's templates that a role's files name."""
    named = "".join(path.read_text() for path in (ROOT / "roles" / role).rglob("*.yml"))
    return [path for path in sorted((ROOT / "templates").glob("*.j2")) if path.name in named]


def test_every_template_belongs_to_one_role() -> None:
    owned = [path for role in ROLES for path in rendered(role)]
    assert sorted(owned) == sorted((ROOT / "templates").rglob("*.j2"))


@pytest.mark.parametrize("role", ROLES)
def test_no_role_reads_the_variables_of_another(role: str) -> None:
    files = sorted((ROOT / "roles" / role).rglob("*.yml"))
    found = {relative(path): foreign(path.read_text(), role, ROLES) for path in files}
    for path in [*(ROOT / "roles" / role).glob("templates/**/*.*"), *rendered(role)]:
        found[relative(path)] = foreign(yaml.dump([path.read_text()]), role, ROLES)
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("role", ROLES)
def test_names_of_a_role_begin_with_its_own(role: str) -> None:
    home = ROOT / "roles" / role
    assert [name for name in keys(home / "defaults/main.yml") if not name.startswith(role + "_")] == []
    assert [name for name in keys(home / "vars/main.yml") if not name.startswith(f"__{role}_")] == []
    made = []
    for path in home.glob("tasks/**/*.yml"):
        for above, key, value in walk(yaml.compose(path.read_text())):
            if key.value == "register":
                made.append(value.value)
            elif above and above[-1].rsplit(".", 1)[-1] == "set_fact":
                made.append(key.value)
    assert [name for name in made if not re.match(rf"(__)?{role}_", name)] == []


@pytest.mark.parametrize("role", ROLES)
def test_every_default_has_a_specification(role: str) -> None:
    known = {name for entry in specs(role).values() for name in entry.get("options", {})}  # type: ignore[attr-defined]  # a dict
    assert set(keys(ROOT / "roles" / role / "defaults/main.yml")) - known == set()
    assert [name for name in known if not name.startswith(role + "_")] == []
    assert [entry for entry in specs(role) if not (ROOT / "roles" / role / f"tasks/{entry}.yml").exists()] == []


@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_a_scenario_that_uses_it_alone(role: str) -> None:
    scenario = ROOT / "molecule" / role
    assert (scenario / "molecule.yml").exists()
    assert list(scenario.glob("test_*.py"))
    used = set()
    for path in scenario.glob("*.yml"):
        for above, key, value in walk(yaml.compose(path.read_text())):
            module = above[-1].rsplit(".", 1)[-1] if above else ""
            if key.value == "role" or (key.value == "name" and module in ("include_role", "import_role")):
                used.add(value.value)
    assert used == {role}


@pytest.mark.parametrize("role", ROLES)
def test_a_scenario_checks_converges_and_verifies(role: str) -> None:
    own = yaml.safe_load((ROOT / "molecule" / role / "molecule.yml").read_text())
    shared = yaml.safe_load((ROOT / ".config/molecule/config.yml").read_text())
    sequence = own.get("scenario", shared["scenario"])["test_sequence"]
    assert [step for step in sequence if step in ("check", "converge", "verify")][:3] == ["check", "converge", "verify"]
    assert sequence[-1] == "destroy"
    # a bundle is made by every run: the scenario says so and shows what a second run leaves alone
    assert "idempotence" in sequence or role == "log_bundle"
