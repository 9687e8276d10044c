import pathlib

import pytest

from pivot.inventory import inventory, sizes

SPECS = {
    "sglang_server": {"sglang_server_port": {"type": "int"}, "sglang_server_launch": {"type": "dict"}},
    "sglang_engine": {"sglang_engine_root": {"type": "path"}},
}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/server.yml").write_text("---\nsglang_server_prot: 30000\nsglang_server_port: abc\n")
    return tmp_path


def test_a_misspelt_variable_is_named_with_its_place_and_the_right_name(place):
    (finding,) = inventory.unknown_variables("infer1", ["sglang_server_prot"], SPECS, place)
    assert finding.code == "VAR-UNKNOWN"
    assert "group_vars/server.yml:2" in finding.message
    assert finding.fix == "did you mean sglang_server_port?"


def test_a_variable_that_resembles_nothing_points_to_the_spec(place):
    (finding,) = inventory.unknown_variables("infer1", ["sglang_engine_zzz"], SPECS, place)
    assert finding.fix == "see roles/sglang_engine/meta/argument_specs.yml"
    assert "the command line" in finding.message


@pytest.mark.parametrize(
    "name", ["sglang_sever_port", "sglang_servers_port", "SGLANG_SERVER_PORT", "sglang-server-port"]
)
def test_a_misspelt_prefix_is_found_too(name, place):
    (finding,) = inventory.unknown_variables("infer1", [name], SPECS, place)
    assert finding.code == "VAR-UNKNOWN"
    assert "is no variable of any role" in finding.message
    assert finding.fix == "did you mean sglang_server_port?"


def test_known_and_foreign_variables_are_silent(place):
    names = [
        "server_port",
        "sglang_port",
        "llm_server_port",
        "sglang_server_port",
        "sglang_engine_root",
        "__sglang_server_x",
        "my_variable",
        "sglang",
    ]
    assert inventory.unknown_variables("infer1", names, SPECS, place) == []


def test_every_place_that_sets_a_name_is_named(place):
    (place / "hosts.yml").write_text("all:\n  vars:\n    sglang_server_port: 1\n")
    assert inventory.where_set("sglang_server_port", place) == "group_vars/server.yml:3 or hosts.yml:3"


def test_an_inventory_with_nobody_to_deploy_to(place):
    (place / "hosts.yml").write_text("all:\n  children:\n    inferrence:\n      hosts:\n        a:\n")
    (finding,) = inventory.groups({"all": ["a"], "ungrouped": [], "inferrence": ["a"]}, place)
    assert finding.code == "HOST-NONE"
    assert finding.fix == "did you mean inference where it says inferrence (hosts.yml:3)?"
    (finding,) = inventory.groups({"all": [], "ungrouped": []}, place)
    assert finding.fix.startswith("put the containers under inference")


def test_a_host_in_no_group_is_named_with_its_place(place):
    (place / "hosts.yml").write_text("all:\n  hosts:\n    stray:\n")
    (finding,) = inventory.groups({"all": ["a", "stray"], "ungrouped": ["stray"], "inference": ["a"]}, place)
    assert finding.code == "HOST-UNGROUPED"
    assert "stray (hosts.yml:3)" in finding.message


def test_grouped_hosts_are_silent(place):
    assert inventory.groups({"all": ["a", "n"], "ungrouped": [], "inference": ["a"], "proxmox": ["n"]}, place) == []


@pytest.mark.parametrize(
    ("missing", "fix"),
    [
        ("vault_sglang_api_key", "write it into group_vars/all/vault.yml of the inventory"),
        ("ansible_host", "give the host its address in hosts.yml"),
        ("lab_bridge", "the lab is not up: make lab-up"),
        ("my_number", "set it in the inventory, or correct the name"),
    ],
)
def test_what_is_not_set_is_named_with_its_user_and_what_sets_it(missing, fix, place):
    (finding,) = inventory.undefined("infer1", {"sglang_server_port": f"'{missing}' is undefined"}, place)
    assert finding.code == "VAR-UNDEFINED"
    assert finding.message == f"not set: {missing}; needed by sglang_server_port (group_vars/server.yml:3)"
    assert finding.fix.startswith(fix)


def test_a_lab_that_is_down_is_one_finding(place):
    lacking = {"a": "'lab_bridge' is undefined", "b": "'vault_x' is undefined", "c": "'lab_key' is undefined"}
    (finding,) = inventory.undefined("infer1", {**lacking, "d": "'lab_key' is undefined"}, place)
    assert finding.message.startswith("not set: lab_bridge, lab_key, vault_x; needed by a (")
    assert finding.message.endswith(" and 1 more")
    assert finding.fix == "the lab is not up: make lab-up"


def test_a_broken_expression_is_told_once_for_all_that_need_it(place):
    problems = {"a": "division\n by zero", "sglang_server_prot": "division by zero", "c": "other"}
    found = inventory.undefined("infer1", problems, place)
    assert [finding.code for finding in found] == ["VAR-EXPRESSION", "VAR-EXPRESSION"]
    assert found[0].message.endswith(
        "sglang_server_prot (group_vars/server.yml:2) cannot be worked out: division by zero"
    )
    assert inventory.undefined("infer1", {}, place) == []


def test_a_required_variable_that_is_not_set():
    specs = {"r": {"r_needed": {"required": True, "description": "Its number."}, "r_other": {}}}
    (finding,) = inventory.missing("infer1", ["r_other"], specs, ["r", "unknown"])
    assert (finding.code, finding.fix) == ("VAR-MISSING", "set it in the inventory: Its number.")
    assert inventory.missing("infer1", ["r_needed"], specs, ["r"]) == []
    assert inventory.missing("infer1", [], specs, []) == []


def test_a_required_variable_without_a_value(place):
    specs = {"sglang_server": {"sglang_server_prot": {"required": True, "description": "Its number."}, "s_other": {}}}
    values = {"sglang_server_prot": None, "s_other": None}
    (finding,) = inventory.nulls("infer1", values, specs, ["sglang_server", "unknown"], place)
    assert finding.code == "VAR-MISSING"
    assert finding.message.startswith("sglang_server_prot (group_vars/server.yml:2) is null, and the role")
    assert finding.fix == "write its value there: Its number."
    assert inventory.nulls("infer1", {**values, "sglang_server_prot": 0}, specs, ["sglang_server"], place) == []
    assert inventory.nulls("infer1", {}, specs, ["sglang_server"], place) == []


def test_files_of_the_controller_that_are_not_there(place):
    wanted = {
        "proxmox_container_api_ca": str(place / "ca.pem"),
        "proxmox_container_known_hosts": str(place / "trust/known_hosts"),
        "sglang_server_health_prompts": None,
    }
    found = inventory.files("infer1", wanted, place)
    assert [finding.code for finding in found] == ["FILE-MISSING", "FILE-MISSING"]
    assert found[0].fix == f"mkdir -p {place / 'trust'}, and put the node's key into the file"
    assert f"names {place / 'ca.pem'}, which is no file" in found[1].message
    (place / "ca.pem").write_text("x")
    (place / "trust").mkdir()
    assert inventory.files("infer1", wanted, place) == []


def test_a_file_under_the_home_directory_is_found(place, monkeypatch):
    monkeypatch.setenv("HOME", str(place))
    (place / "key").write_text("x")
    assert inventory.files("infer1", {"ansible_ssh_private_key_file": "~/key"}, place) == []


def test_encrypted_files_are_found_beside_every_kind_of_inventory(place):
    vault = place / "group_vars/all/vault.yml"
    vault.parent.mkdir()
    vault.write_text("$ANSIBLE_VAULT;1.1;AES256\n6132\n")
    (place / "hosts.yml").write_text("all:\n")
    assert inventory.vaults(place) == inventory.vaults(place / "hosts.yml") == [vault]
    vault.write_text("---\n")
    assert inventory.vaults(place) == []


def test_a_vault_that_is_not_read_says_why(place):
    assert inventory.unread_vault(place, "read") == []
    (closed,) = inventory.unread_vault(place, "closed")
    assert (closed.code, closed.subject) == ("VAULT-CLOSED", str(place))
    assert "ANSIBLE_VAULT_PASSWORD_FILE=FILE" in closed.fix
    (broken,) = inventory.unread_vault(place, "broken")
    assert (broken.code, broken.message) == ("FILE-YAML", "its decrypted text is no YAML")
    assert "in single quotes" in broken.fix


def test_type_errors_say_where_the_value_was_set(place):
    message = "argument 'sglang_server_port' is of type str and we were unable to convert to int"
    options, values = SPECS["sglang_server"], {"sglang_server_port": "abc"}
    (finding,) = inventory.type_findings("infer1", [message], options, place, values)
    assert finding.code == "VAR-TYPE"
    assert finding.message == ("sglang_server_port is 'abc', which is no whole number (set in group_vars/server.yml:3)")
    assert finding.fix == "write a whole number, without quotes or a unit"
    message = "value of sglang_server_launch must be one of: a, b, got: c"
    (finding,) = inventory.type_findings("infer1", [message], options, place, values)
    assert finding.message.startswith(message)


def test_a_secret_of_a_wrong_type_is_not_shown(place):
    options = {"sglang_server_api_key": {"type": "dict", "no_log": True}}
    message = "argument 'sglang_server_api_key' is of type str and we were unable to convert to dict"
    (finding,) = inventory.type_findings("infer1", [message], options, place, {"sglang_server_api_key": "hidden"})
    assert "hidden" not in finding.message + finding.fix


@pytest.mark.parametrize(
    ("name", "value", "kind", "said"),
    [
        ("sglang_server_environment", "MY_PASS made-up-word", "dict", "is a text, which is no mapping"),
        ("sglang_server_environment", ["MY_PASS made-up-word"], "dict", "is a list, which is no mapping"),
        ("proxmox_container_devices", {"path": "made-up-word"}, "list", "is a mapping, which is no list"),
        ("proxmox_container_devices", 7, "list", "is a single value, which is no list"),
        ("sglang_server_port", "HF_TOKEN=hf_madeupwordmadeupwordmadeupword", "int", "which is no whole number"),
    ],
)
def test_what_may_hold_secrets_is_not_shown_where_its_type_is_wrong(place, name, value, kind, said):
    message = f"argument '{name}' is a text, not a {kind}"
    (finding,) = inventory.type_findings("infer1", [message], {name: {"type": kind}}, place, {name: value})
    assert said in finding.message
    assert "made" not in finding.message


@pytest.mark.parametrize(
    ("given", "value", "expected"),
    [
        ({"vault_sglang_api_key"}, None, ["VAR-EMPTY"]),
        ({"vault_sglang_api_key"}, "", ["VAR-EMPTY"]),
        ({"vault_sglang_api_key"}, "made-up", []),
        (set(), None, []),  # a server without a key, as somebody chose
    ],
)
def test_names_of_the_vault_without_a_value(given, value, expected):
    found = inventory.empty_secrets("infer1", given, {"sglang_server_api_key": value})
    assert [finding.code for finding in found] == expected


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, []),
        ({"ansible_user": "root", "ansible_become": False}, []),
        ({"ansible_become": "no"}, []),
        ({"ansible_user": "ops"}, ["ansible_user (group_vars/all.yml:2) is ops, and the roles log in as root"]),
        (
            {"ansible_user": "root", "ansible_become": "yes"},
            ["ansible_become (group_vars/all.yml:3) is set, which tasks on the controller get too"],
        ),
    ],
)
def test_the_roles_log_in_as_root(tmp_path, values, said):
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text("---\nansible_user: ops\nansible_become: yes\n")
    found = inventory.login("infer1", values, tmp_path)
    assert [(finding.code, finding.message) for finding in found] == [("VAR-LOGIN", text) for text in said]


# --- files that are no YAML


@pytest.mark.parametrize(
    ("name", "text", "line", "what", "fix"),
    [
        ("group_vars/server.yml", "---\na:\n\tb: 1\n", 3, "\\t", "write spaces instead of the tab"),
        ("group_vars/all/x.yaml", "---\na: 1\n  b: 2\n", 3, "mapping values are not allowed", "quotes, colons, indent"),
        ("host_vars/a.yml", "---\na: 'b\n", 3, "(while scanning a quoted scalar, line 2)", "quotes, colons"),
        ("hosts.yml", "all:\n  hosts:\n    a\n    b: 1\n", 4, "", "that line or the one above it"),
    ],
)
def test_a_file_that_is_no_yaml_is_named_with_its_line(place, name, text, line, what, fix):
    (place / name).parent.mkdir(exist_ok=True, parents=True)
    (place / name).write_text(text)
    (finding,) = inventory.broken(place)
    assert (finding.code, finding.subject) == ("FILE-YAML", f"{place / name}:{line}")
    assert what in finding.message
    assert fix in finding.fix


def test_every_broken_file_is_named_at_once_and_others_are_none(place):
    (place / "group_vars/vault.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n6132\n")
    (place / "group_vars/own.yml").write_text("a: !vault |\n  $ANSIBLE_VAULT\nb: !unsafe '{{'\n")
    (place / "hosts.yml").write_text("all:\n")
    (place / "notes.txt").write_text("\t{")
    assert inventory.broken(place) == inventory.broken(place / "hosts.yml") == []
    for name in ("one", "two"):
        (place / f"group_vars/{name}.yml").write_bytes(b"a: \xff\xfe")
    assert [finding.code for finding in inventory.broken(place / "hosts.yml")] == ["FILE-YAML", "FILE-YAML"]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ({"a": {"proxmox_container_vmid": 101}, "b": {"proxmox_container_vmid": "101"}}, "vmid 101"),
        ({"a": {"ansible_host": "192.0.2.1"}, "b": {"ansible_host": "192.0.2.1"}}, "address 192.0.2.1"),
        ({"a": {"ansible_host": "2001:DB8:0::1"}, "b": {"ansible_host": "2001:db8::1"}}, "address 2001:db8::1"),
        ({"a": {"ansible_host": "LLM.example.org"}, "b": {"ansible_host": "llm.example.org"}}, "address llm.example"),
    ],
)
def test_two_hosts_with_one_id_or_address(hosts, words):
    (finding,) = inventory.collisions(hosts)
    assert finding.subject == "a, b"
    assert words in finding.message


def test_hosts_of_their_own_do_not_collide():
    hosts = {"a": {"proxmox_container_vmid": 101, "ansible_host": "x"}, "b": {"proxmox_container_vmid": 102}, "c": {}}
    assert inventory.collisions(hosts) == []


@pytest.mark.parametrize(
    ("values", "code", "fix"),
    [
        ({"proxmox_container_node": "pve1"}, None, ""),
        ({"proxmox_container_node": "node-a", "proxmox_container_node_host": "pve1"}, None, ""),
        ({}, None, ""),
        ({"proxmox_container_node": "pve2"}, "HOST-NODE", "did you mean pve1?"),
        ({"proxmox_container_node": "pve1", "proxmox_container_node_host": "xy"}, "HOST-NODE", "add it to the group"),
    ],
)
def test_a_node_that_the_inventory_does_not_have(values, code, fix):
    found = list(inventory.absent_nodes({"llm01": values, "pve1": {}}))
    assert [finding.code for finding in found] == ([code] if code else [])
    assert all(finding.fix.startswith(fix) for finding in found)


@pytest.mark.parametrize(
    ("group", "words"),
    [("inferense", "did you mean inference?"), ("proxmx", "did you mean proxmox?"), ("monitoring", None)],
)
def test_a_misspelt_group_beside_the_right_one(group, words, place):
    members = {"all": ["a", "b"], "ungrouped": [], "inference": ["a"], group: ["b"]}
    assert [finding.fix for finding in inventory.groups(members, place)] == ([words] if words else [])
    assert inventory.groups({**members, "proxmox": ["b"]}, place) == []


# --- numbers that have the right type


SIZED = {
    **{name: {"type": "int"} for name in (*sizes.LIMITS, "sglang_server_stop_seconds", "proxmox_container_swap")},
    "sglang_server_nccl_port": {"type": "int", "default": 30001},
    "gpu_runtime_memory_gib": {"type": "float"},
    "gpu_runtime_compute_capability": {"type": "str"},
}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"proxmox_container_vmid": 100, "proxmox_container_swap": 0, "gpu_runtime_memory_gib": 0}, ""),
        ({"sglang_server_port": "30000", "sglang_server_stop_seconds": 1}, ""),
        ({"sglang_server_port": "many", "sglang_server_stop_seconds": None, "proxmox_container_memory": True}, ""),
        ({"proxmox_container_vmid": 99}, "write a number from 100 to 999999999"),
        ({"sglang_server_port": 65536}, "write a number from 1 to 65535"),
        ({"proxmox_container_memory": "-1"}, "write a number of 16 or more"),
        ({"sglang_server_stop_seconds": 0}, "write a number of 1 or more"),
        ({"gpu_runtime_memory_gib": -95.6}, "write a number of 0 or more"),
        ({"sglang_server_port": 30001}, "write another port"),
        ({"gpu_runtime_compute_capability": "sm120"}, 'for example "12.0"'),
        ({"gpu_runtime_compute_capability": 12.0}, ""),
        ({"gpu_runtime_compute_capability": ""}, ""),
    ],
)
def test_numbers_that_cannot_be(values, said, place):
    found = list(sizes.check("infer1", values, SIZED, place))
    assert [finding.code for finding in found] == (["VAR-RANGE"] if said else [])
    assert all(said in finding.fix for finding in found)


def test_the_roles_of_this_project_have_specs_with_their_own_prefix():
    specs = inventory.role_specs(pathlib.Path(__file__).parents[2] / "roles")
    assert "sglang_server" in specs
    for role, options in specs.items():
        assert options, role
        assert all(name.startswith(f"{role}_") for name in options), role
