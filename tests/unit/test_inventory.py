import pathlib

import pytest

from pivot import inventory

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


def test_known_and_foreign_variables_are_silent(place):
    names = ["sglang_server_port", "sglang_engine_root", "__sglang_server_x", "my_variable", "sglang"]
    assert inventory.unknown_variables("infer1", names, SPECS, place) == []


def test_type_errors_say_where_the_value_was_set(place):
    message = "argument 'sglang_server_port' is of type str and we were unable to convert to int"
    (finding,) = inventory.type_findings("infer1", [message], SPECS["sglang_server"], place)
    assert finding.code == "VAR-TYPE"
    assert "(set in group_vars/server.yml:3)" in finding.message


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ({"a": {"proxmox_container_vmid": 101}, "b": {"proxmox_container_vmid": "101"}}, "vmid 101"),
        ({"a": {"ansible_host": "192.0.2.1"}, "b": {"ansible_host": "192.0.2.1"}}, "address 192.0.2.1"),
    ],
)
def test_two_hosts_with_one_id_or_address(hosts, words):
    (finding,) = inventory.collisions(hosts)
    assert finding.subject == "a, b"
    assert words in finding.message


def test_hosts_of_their_own_do_not_collide():
    hosts = {"a": {"proxmox_container_vmid": 101, "ansible_host": "x"}, "b": {"proxmox_container_vmid": 102}, "c": {}}
    assert inventory.collisions(hosts) == []


def test_the_roles_of_this_project_have_specs_with_their_own_prefix():
    specs = inventory.role_specs(pathlib.Path(__file__).parents[2] / "roles")
    assert "sglang_server" in specs
    for role, options in specs.items():
        assert options, role
        assert all(name.startswith(f"{role}_") for name in options), role
