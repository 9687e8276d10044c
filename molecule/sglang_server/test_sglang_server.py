"""The service on a real container: who runs it, how it is confined, what it shows, and that it serves."""

import json
import re
import shlex
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from pivot.serving import launch

KEY = "molecule-not-a-secret"


@pytest.fixture
def service(host: Any) -> Any:
    unit = host.service("llm")
    assert unit.is_running, host.run("journalctl -u llm -n 60 --no-pager").stdout
    return unit


@pytest.fixture
def pid(host: Any, service: Any) -> str:
    return host.check_output("systemctl show llm -P MainPID")


def test_it_runs_as_its_own_user_and_at_boot(host: Any, service: Any, pid: str) -> None:
    assert service.is_enabled
    assert host.check_output(f"ps -o user= -p {pid}") == "llm"
    assert host.user("llm").shell == "/usr/sbin/nologin"


def test_the_launch_configuration_is_readable_by_root_and_the_service_alone(host: Any, service: Any) -> None:
    file = host.file("/etc/llm/launch.yaml")
    assert (file.user, file.group, file.mode) == ("root", "llm", 0o640)
    assert "max-running-requests: 4" in file.content_string


def test_the_key_is_in_no_command_line_environment_or_unit(host: Any, pid: str) -> None:
    seen = host.check_output("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; systemctl cat llm; systemctl show llm")
    seen += host.check_output(f"cat /proc/{pid}/environ")
    assert KEY not in seen


def test_the_layer_ids_stand_in_a_view_and_the_weights_are_links(host: Any, service: Any) -> None:
    (view,) = host.check_output("ls -d /etc/llm/drafter/*").split()
    config = json.loads(host.file(f"{view}/config.json").content_string)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 5, 7]
    assert host.file(f"{view}/model.safetensors").linked_to == "/srv/llm/drafter/model.safetensors"
    assert view in host.file("/etc/llm/launch.yaml").content_string


def test_the_sandbox_is_tight(host: Any, service: Any) -> None:
    last = host.run("systemd-analyze security llm.service --no-pager").stdout.splitlines()[-1]
    exposure = float(re.search(r"(\d+\.\d+)", last).group(1))
    assert exposure <= 2.0, last


def test_only_the_api_can_be_reached_from_elsewhere(host: Any, service: Any) -> None:
    address = host.check_output("hostname -I").split()[0]
    listening = host.check_output("ss -Hltn")
    assert f"{address}:31000" in listening
    assert ":31001" in listening, "the rendezvous port moved: the firewall rule protects nothing"
    with socket.create_connection((address, 31000), timeout=5):
        pass
    with pytest.raises(OSError, match="timed out"):
        socket.create_connection((address, 31001), timeout=2)


def test_other_open_ports_are_local(host: Any, service: Any) -> None:
    address = host.check_output("hostname -I").split()[0]
    ports = {int(line.split()[3].rsplit(":", 1)[1]) for line in host.check_output("ss -Hltn").splitlines()}
    reachable = set()
    for port in ports - {22, 31000}:
        try:
            socket.create_connection((address, port), timeout=1).close()
            reachable.add(port)
        except OSError:
            continue
    assert reachable == set()


def test_it_was_started_with_what_lies_on_disk(host: Any, service: Any) -> None:
    started = json.loads(host.file("/run/llm/started.json").content_string)
    for path in ("/etc/llm/launch.yaml", "/etc/llm/environment", "/etc/systemd/system/llm.service"):
        assert started[path] == host.file(path).sha256sum


def test_compiled_kernels_lie_with_their_release(host: Any, pid: str) -> None:
    release = Path(host.check_output("readlink -e /opt/sglang/current")).name
    place = f"/var/cache/llm/releases/{release}"
    environment = dict(
        item.split("=", 1)
        for item in host.check_output(f"tr '\\0' '\\n' </proc/{pid}/environ").splitlines()
        if "=" in item
    )
    names = ("FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "SGLANG_DG_CACHE_DIR")
    assert {name for name in names if environment[name].startswith(place)} == set(names)
    assert (host.file(place).user, host.file(place).mode) == ("llm", 0o750)


def test_what_was_healthy_is_kept_for_root_alone_and_without_the_key(host: Any, service: Any) -> None:
    kept = host.file("/var/lib/pivot/llm/healthy.json")
    assert (kept.user, kept.mode) == ("root", 0o600)
    assert KEY not in kept.content_string
    newest = json.loads(kept.content_string)["sets"][-1]
    assert newest["started"] == json.loads(host.file("/run/llm/started.json").content_string)


HARD = yaml.safe_load(Path(__file__).with_name("files").joinpath("hard.yml").read_text())


def test_hard_values_arrive_in_the_environment_as_they_were_written(host: Any, pid: str) -> None:
    code = "import json, sys; print(json.dumps(open(f'/proc/{sys.argv[1]}/environ').read().split(chr(0))))"
    pairs = json.loads(host.check_output(f"python3 -I -c {shlex.quote(code)} {pid}"))
    environment = dict(pair.split("=", 1) for pair in pairs if pair)
    assert {name: environment.get(name) for name in HARD["environment"]} == HARD["environment"]


def test_hard_values_arrive_in_the_server_as_they_were_written(host: Any, service: Any) -> None:
    address = host.check_output("hostname -I").split()[0]
    request = urllib.request.Request(f"http://{address}:31000/server_info")
    request.add_header("Authorization", f"Bearer {KEY}")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        info = json.load(answer)
    assert info["served_model_name"] == HARD["flags"]["served-model-name"]
    assert info["model_loader_extra_config"] == '{"enable_multithread_load": true, "num_threads": 2}'


def test_systemd_makes_the_wanted_words_and_variables_of_a_unit(host: Any) -> None:
    """The renderers against the systemd of this container, with more than one server can be given."""
    words = [
        "a b",
        "%h%%",
        "$HOME",
        "${HOME}",
        "$$",
        ";",
        "\\",
        "a\\nb",
        "it's",
        'say "x"',
        "#1",
        "é",
        "a\tb",
        "",
        "*?",
        "=",
        "@!+-:",
    ]
    variables = {f"HARD_{index}": word for index, word in enumerate(words)} | HARD["environment"]
    code = (
        "import json, os, sys; names = json.load(open('/run/hard.json')); "
        "print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]))"
    )
    unit = (
        "[Service]\nType=oneshot\nEnvironmentFile=/run/hard.env\nStandardOutput=file:/run/hard.out\n"
        f"ExecStart={launch.unit_words(['/usr/bin/python3', '-c', code, *words])}\n"
    )
    files = {
        "/run/hard.env": launch.environment_text(variables),
        "/run/hard.json": json.dumps(list(variables)),
        "/run/systemd/system/hard.service": unit,
    }
    for path, text in files.items():
        host.check_output(f"printf %s {shlex.quote(text)} >{path}")
    host.check_output("systemctl daemon-reload && systemctl start hard")
    arguments, environment = json.loads(host.file("/run/hard.out").content_string)
    host.check_output("rm /run/hard.* /run/systemd/system/hard.service && systemctl daemon-reload")
    assert arguments == words
    assert environment == variables
