import json

import pytest
import yaml

from pivot.serving import launch


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
        ({"nccl-port": 30002}, "LAUNCH-RESERVED"),  # the firewall would close the other port
        ({"ssl-certfile": "/etc/sglang/cert.pem"}, "LAUNCH-TLS"),
        ({"enable-ssl-refresh": True}, "LAUNCH-TLS"),
        ({"tp": None}, "LAUNCH-NULL"),
        ({"enable-metrics": False}, "LAUNCH-FALSE"),
        ({"served-model-name": "a\nb"}, "LAUNCH-CONTROL"),
        ({"lora-paths": ["a=b", "c\x00=d"]}, "LAUNCH-CONTROL"),
        ({"served-model-name": "a\u2028b"}, "LAUNCH-CONTROL"),
        ({"served-model-name": "--tp-size"}, "LAUNCH-DASH"),
        ({"served-model-name": "-x"}, "LAUNCH-DASH"),
    ],
)
def test_each_launch_guard_fires(flags, code):
    assert codes(flags) == [code]


@pytest.mark.parametrize(
    "value", ["-1", "-0.5", "-.5", "-", "-a b", "a-b", "a\tb", "50% of $HOME \\ 'q' \"", "é \U0001f600"]
)
def test_hard_values_are_no_findings(value):
    assert codes({"served-model-name": value}, {"NCCL_IB_HCA": value}) == []


def test_field_case_b07_yaml_booleans_in_the_environment_are_named_with_their_fix():
    (finding,) = launch.check("h", {}, {"NCCL_IB_DISABLE": True})
    assert finding.code == "ENV-TYPE"
    assert finding.fix == 'quote it, for example NCCL_IB_DISABLE: "1"'


def test_a_secret_that_yaml_takes_for_a_number_is_not_shown():
    (finding,) = launch.check("h", {}, {"HF_TOKEN": 123456789})
    assert finding.code == "ENV-TYPE"
    assert finding.fix == 'quote it, for example HF_TOKEN: "VALUE"'
    assert "123456789" not in finding.message


@pytest.mark.parametrize(
    ("host", "outside", "inside"),
    [
        ("192.0.2.11", "http://192.0.2.11:30000", "http://192.0.2.11:30000"),
        ("llm01", "http://llm01:30000", "http://llm01:30000"),
        ("2001:db8::11", "http://[2001:db8::11]:30000", "http://[2001:db8::11]:30000"),
        ("0.0.0.0", "http://llm01.example.org:30000", "http://127.0.0.1:30000"),  # noqa: S104 - asked, not bound to
        ("::", "http://llm01.example.org:30000", "http://[::1]:30000"),
    ],
)
def test_where_a_server_is_asked(host, outside, inside):
    assert launch.url(host, 30000, "llm01.example.org") == outside
    assert launch.url(host, 30000) == inside
    if host == "::":
        assert launch.url(host, 30000, "2001:db8::12") == "http://[2001:db8::12]:30000"


def test_names_that_yaml_reads_as_something_else():
    assert codes({8: "x", True: "y"}, {}) == ["LAUNCH-NAME", "LAUNCH-NAME"]
    assert codes({}, {8: "x", None: "y"}) == ["ENV-NAME", "ENV-NAME"]


def test_proxies_are_named_in_small_letters():
    assert codes({}, {"http_proxy": "http://192.0.2.1:3128", "no_proxy": "localhost", "HTTPS_PROXY": "x"}) == []
    assert codes({}, {"nccl_debug": "INFO"}) == ["ENV-NAME"]


def test_field_case_b22_trailing_space_and_all_findings_at_once():
    assert codes({"tp": None}, {"SGLANG_ENABLE_JIT_DEEPGEMM": "0 ", "lower": "1", "NCCL_NET": "a\x1bb"}) == [
        "LAUNCH-NULL",
        "ENV-SPACE",
        "ENV-NAME",
        "ENV-SPACE",
    ]


def test_config_text_is_sorted_yaml_and_holds_json_for_mappings():
    text = launch.config_text(
        {"tp": 8, "model-loader-extra-config": {"num_threads": 16}, "disable-cuda-graph": True, "gc-threshold": [1, 2]}
    )
    assert list(yaml.safe_load(text)) == ["gc-threshold", "model-loader-extra-config", "tp"]
    assert json.loads(yaml.safe_load(text)["model-loader-extra-config"]) == {"num_threads": 16}


HARD = [
    *(
        "50% of %h",
        "$HOME ${HOME} $$",
        "a \\ b\\n",
        "'",
        '"',
        "` # : - ? [x] {y} & * ! | > @",
        "true",
        "1e3",
        "010",
        "null",
    ),
    *('{"a": "%s $x \\\\ \\"q\\""}', "\t x", "é", "\x7f", "\x85", "\xa0", "\u2028", "\ufeff", "\ufffe", "\U0001f600"),
    *("~", ""),
]


@pytest.mark.parametrize("value", [*HARD, 1e-05, 1e22, 0.85, -1, 10**20, True, ["a b", "%", 1]])
def test_every_value_is_read_back_as_it_was_meant(value):
    read = yaml.safe_load(launch.config_text({"served-model-name": value}))["served-model-name"]
    assert read == value or str(read) == str(value)
    assert yaml.safe_load(f"x: {launch.scalar(value)}")["x"] == read


def test_hard_texts_inside_of_json_are_read_back():
    given = {text: text for text in HARD}
    read = yaml.safe_load(launch.config_text({"json-model-override-args": given}))["json-model-override-args"]
    assert json.loads(read) == given


def test_what_the_config_file_cannot_hold_stands_on_the_command_line():
    flags = {"tp": 8, "disable-cuda-graph": True, "enable-tf32-matmul": False, "lora-paths": ["a=b", "c=d"]}
    assert launch.argv("/p", "/c.yaml", flags) == [
        "/p", "-m", "sglang.launch_server", "--config", "/c.yaml",
        "--disable-cuda-graph", "--no-enable-tf32-matmul", "--lora-paths", "a=b", "c=d",
    ]  # fmt: skip


def test_field_case_b20_specifiers_are_doubled_and_words_quoted():
    assert launch.unit_words(["/p", "a b", "%h", 'say "x"', "$HOME"]) == '/p "a b" %%h "say \\"x\\"" $$HOME'


def test_mappings_on_the_command_line_are_json():
    assert launch.argv("/p", "/c", {"lora-paths": [{"lora_name": "a"}]})[-1] == '{"lora_name": "a"}'


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


def test_a_key_that_sglang_takes_for_a_flag_is_found_and_not_said():
    (finding,) = launch.check("llm01", {}, {}, "-k3y-of-somebody")
    assert finding.code == "LAUNCH-DASH"
    assert finding.message.startswith("sglang_server_api_key begins with -")
    assert "k3y" not in str(finding)


@pytest.mark.parametrize("key", [None, "", "k3y-of-somebody", "k3y-"])
def test_other_keys_are_taken(key):
    assert launch.check("llm01", {}, {}, key) == []
