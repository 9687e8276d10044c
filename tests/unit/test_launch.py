import json

import pytest
import yaml

from pivot import launch

WANTED = {
    "files": {"/etc/sglang/launch.yaml": "aa"},
    "argv": ["/opt/r/bin/python", "-m", "sglang.launch_server", "--config", "/etc/sglang/launch.yaml"],
    "environment": {"NCCL_DEBUG": "WARN"},
}


def running(**changes):
    process = {"argv": WANTED["argv"], "environment": {"NCCL_DEBUG": "WARN"}, "started": WANTED["files"]}
    return {"running": {**process, **changes}, "drop_ins": []}


def codes(flags=None, environment=None):
    return [finding.code for finding in launch.check("h", flags or {}, environment or {})]


def test_good_settings_have_no_findings():
    assert codes({"tp": 8, "enable-metrics": True, "enable-tf32-matmul": False}, {"NCCL_IB_DISABLE": "1"}) == []


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ({"model_path": "x"}, "LAUNCH-NAME"),
        ({"--tp": 8}, "LAUNCH-NAME"),
        ({"api-key": "x"}, "LAUNCH-RESERVED"),
        ({"tp": None}, "LAUNCH-NULL"),
        ({"enable-metrics": False}, "LAUNCH-FALSE"),
    ],
)
def test_each_launch_guard_fires(flags, code):
    assert codes(flags) == [code]


def test_field_case_b07_yaml_booleans_in_the_environment_are_named_with_their_fix():
    (finding,) = launch.check("h", {}, {"NCCL_IB_DISABLE": True})
    assert finding.code == "ENV-TYPE"
    assert finding.fix == 'quote it, for example NCCL_IB_DISABLE: "1"'


def test_field_case_b22_trailing_space_and_all_findings_at_once():
    assert codes({"tp": None}, {"SGLANG_ENABLE_JIT_DEEPGEMM": "0 ", "lower": "1"}) == [
        "LAUNCH-NULL",
        "ENV-SPACE",
        "ENV-NAME",
    ]


def test_config_text_is_sorted_yaml_and_holds_json_for_mappings():
    text = launch.config_text(
        {"tp": 8, "model-loader-extra-config": {"num_threads": 16}, "disable-cuda-graph": True, "gc-threshold": [1, 2]}
    )
    assert list(yaml.safe_load(text)) == ["gc-threshold", "model-loader-extra-config", "tp"]
    assert json.loads(yaml.safe_load(text)["model-loader-extra-config"]) == {"num_threads": 16}


def test_what_the_config_file_cannot_hold_stands_on_the_command_line():
    flags = {"tp": 8, "disable-cuda-graph": True, "enable-tf32-matmul": False, "lora-paths": ["a=b", "c=d"]}
    assert launch.argv("/p", "/c.yaml", flags) == [
        "/p", "-m", "sglang.launch_server", "--config", "/c.yaml",
        "--disable-cuda-graph", "--no-enable-tf32-matmul", "--lora-paths", "a=b", "c=d",
    ]  # fmt: skip


def test_field_case_b20_specifiers_are_doubled_and_words_quoted():
    assert launch.unit_words(["/p", "a b", "%h", 'say "x"', "$HOME"]) == '/p "a b" %%h "say \\"x\\"" $$HOME'


def test_environment_values_are_taken_literally():
    assert launch.environment_text({"B": 'x"y$z', "A": "1"}) == 'A="1"\nB="x\\"y\\$z"\n'


def test_layer_ids_go_into_the_nested_key_and_the_original_stays():
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}}
    text = launch.drafter_config(config, [3, 5, 7])
    assert json.loads(text)["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [3, 5, 7],
        "use_aux_hidden_state": True,
    }
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert launch.configured_layer_ids(config, None) == [1, 2, 3]
    assert launch.configured_layer_ids({}, [3, 5, 7]) == [3, 5, 7]
    assert launch.configured_layer_ids({}, None) is None
    assert launch.configured_layer_ids({"eagle_config": None}, None) is None
    assert launch.configured_layer_ids({"eagle_config": [1]}, [3, 5, 7]) == [3, 5, 7]


def test_a_server_that_is_as_wanted_needs_no_restart():
    assert launch.restart_reasons(WANTED, running()) == []
    assert launch.restart_reasons(WANTED, {"running": None}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"argv": ["/opt/old/bin/python", "-m", "sglang.launch_server"]}, "command line"),
        ({"environment": {"NCCL_DEBUG": "TRACE"}}, "NCCL_DEBUG is 'TRACE'"),
        ({"environment": {}}, "NCCL_DEBUG is None"),
        ({"started": {"/etc/sglang/launch.yaml": "bb"}}, "started with another /etc/sglang/launch.yaml"),
        ({"started": None}, "started with another"),
    ],
)
def test_field_case_b28_the_running_process_decides(changes, words):
    (reason,) = launch.restart_reasons(WANTED, running(**changes))
    assert words in reason


def test_arguments_appended_by_a_drop_in_are_not_a_difference():
    state = running(argv=[*WANTED["argv"], "--disable-cuda-graph"])
    assert launch.restart_reasons(WANTED, state)
    assert launch.restart_reasons(WANTED, {**state, "drop_ins": ["50-pivot-probe.conf"]}) == []


def test_differences_name_missing_and_changed_files_and_modes():
    state = {"files": {"/a": "1", "/b": None}, "modes": {"/a": "root:root 0644"}}
    assert launch.differences({"/a": "1", "/b": "2", "/c": "3"}, {}, state) == ["/b", "/c"]
    assert launch.differences({"/a": "1"}, {"/a": "root:sglang 0640"}, state) == ["/a"]
    assert launch.differences({"/a": "1"}, {"/a": "root:root 0644"}, state) == []


def test_a_view_is_known_by_its_links_and_its_config():
    digest = launch.view_digest("{}\n", {"model.safetensors": "/models/a/model.safetensors"})
    assert digest == "0025999aff9b2125cb36d9851802f0385600a435a9d72e1466bca90219b2b773"
    assert digest != launch.view_digest("{}\n", {"model.safetensors": "/models/b/model.safetensors"})


def test_a_full_disk_is_named_before_anything_is_written():
    (finding,) = launch.space("infer1", {"/etc/sglang": 1 << 20, "/etc/systemd/system": 1 << 30})
    assert finding.code == "SERVER-SPACE"
    assert finding.message.startswith("1.0 MiB are free where /etc/sglang is")
    assert launch.space("infer1", {"/etc/sglang": 4 << 20}) == []


def test_a_restart_that_nobody_consented_to_names_its_reasons():
    finding = launch.restart_finding("infer1", ["its port is 1", "its key is new"])
    assert finding.code == "SERVER-RESTART-NEEDED"
    assert finding.message.endswith("restarted: its port is 1; its key is new")
