"""inventory/example: a real cluster that nobody here has. What it says is checked as far as that goes without one."""

import hashlib
import ipaddress
import json
import re
import shutil
import sys
from pathlib import Path

import jinja2
import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from pivot.inventory import inventory, pins
from pivot.serving import launch, launch_rules, nccl

from .example_checkout import (
    EXAMPLE,
    FILES,
    LOCK,
    MAKE_DRAFTER,
    MAKE_TARGET,
    NCCL,
    PINS,
    PROFILES,
    ROOT,
    SPECS,
    VAULT,
    unknown,
)  # fmt: skip

RENDER = """
- name: What the hosts would get
  hosts: inference
  connection: local
  gather_facts: false
  vars:
    sglang_server_templates: "{{ pivot_root }}/templates"
    __sglang_server_state: {engine: {python: /opt/sglang/releases/x/bin/python}}
  tasks:
    - name: The role's own check, and its variables for this play
      ansible.builtin.include_role: {name: sglang_server, tasks_from: preflight.yml, public: true}
    - name: The environment of each profile
      ansible.builtin.set_fact:
        text: "{{ lookup('ansible.builtin.template', sglang_server_templates ~ '/environment.j2') }}"
      loop: [latency, throughput, p2p-fallback]
      loop_control: {loop_var: sglang_server_nccl_profile}
      register: environments
    - name: Write all of it
      ansible.builtin.copy:
        dest: "{{ out }}/{{ inventory_hostname }}.json"
        content: "{{ texts | to_json }}"
        mode: "0600"
      vars:
        profiles: "{{ environments.results | map(attribute='sglang_server_nccl_profile') }}"
        texts:
          launch: "{{ __sglang_server_launch_text }}"
          service: "{{ lookup('ansible.builtin.template', sglang_server_templates ~ '/sglang.service.j2') }}"
          firewall: "{{ lookup('ansible.builtin.template', sglang_server_templates ~ '/firewall.nft.j2') }}"
          drafter: "{{ __sglang_server_drafter_text }}"
          environment: "{{ dict(profiles | zip(environments.results | map(attribute='ansible_facts.text'))) }}"
          variables: "{{ dict(names | zip(q('ansible.builtin.vars', *names))) }}"
"""


def names_set():
    """The variables that the inventory sets, by file."""
    return {name: path for path in FILES if path.name != "hosts.yml" for name in yaml.safe_load(path.read_text())}


@pytest.fixture(scope="module")
def rendered(filled):
    """Every file that the two hosts would get, the environment by profile, and the values of all role variables."""
    (filled.root / "render.yml").write_text(RENDER)
    out = filled.root / "out"
    out.mkdir()
    known = {option for options in SPECS.values() for option in options}
    names = sorted({*names_set(), "proxmox_container_vmid", "proxmox_container_node"} & known)
    done = filled.play("render.yml", names=names, out=str(out), ansible_python_interpreter=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.stem: json.loads(path.read_text()) for path in out.iterdir()}


EXPECTED = """
- hosts: inference
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.debug: {msg: "expected {{ debug_probes_expected_inputs }}"}
"""


def test_what_the_probe_expects_is_the_contract_whatever_ids_an_engine_needs_for_it(filled):
    (filled.root / "expected.yml").write_text(EXPECTED)
    done = filled.play("expected.yml", sglang_server_eagle_layer_ids=[1, 29, 57])
    # the filled convention is output: what comes out of layer 2 goes into layer 3
    assert done.stdout.count("expected [3, 31, 59]") == 2, done.stdout + done.stderr


def test_of_a_server_over_several_machines_that_of_rank_0_is_asked():
    given = yaml.safe_load((EXAMPLE / "group_vars/inference/debug.yml").read_text())["debug_probes_url"]
    for rank, url in (
        ({}, "http://192.0.2.11:30000"),
        ({"node-rank": "0"}, "http://192.0.2.11:30000"),
        ({"node-rank": 1}, ""),
    ):
        values = {"ansible_host": "192.0.2.11", "sglang_server_launch": rank}
        assert jinja2.Template(given).render(values) == url


# What is not known is null, and refused


def test_every_null_is_found_and_nothing_else():
    found = pins.check(PINS, ROOT, EXAMPLE)
    assert [(item.code, item.subject, item.message, item.fix) for item in found] == unknown("example")


def test_the_command_that_fills_it_stands_above_each_null():
    lines = (EXAMPLE / "group_vars/all/pins.yml").read_text().splitlines()
    wanted = {
        "version": ["ssh root@pve1.example.org cat /proc/driver/nvidia/version"],
        "file": ["download NVIDIA-Linux-x86_64-VERSION.run from NVIDIA"],
        "sha256": ["sha256sum NVIDIA-Linux-x86_64-VERSION.run"],
        "revision": ["hf download moonshotai/Kimi-K2.5 --rev", "hf download AQ-MedAI/Kimi-K25-eagle3 --rev"],
        "manifest": [MAKE_TARGET, MAKE_DRAFTER],
        "convention": ["Read how its training code"],
    }
    for number, line in enumerate(lines):
        if line.endswith(": null"):
            above = number
            while lines[above - 1].lstrip().startswith("#"):
                above -= 1
            command = wanted[line.strip().removesuffix(": null")].pop(0)
            assert any(command in comment for comment in lines[above:number]), line
    assert not any(wanted.values())


def test_nothing_is_invented():
    """No hash, revision or secret is in use but the lock's own checksum."""
    lock = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    for path in [*FILES, EXAMPLE / "group_vars/all/vault.yml.example"]:
        code = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in path.read_text().splitlines())
        assert set(re.findall(r"\b[0-9a-f]{32,}\b", code)) <= {lock}, path
    secrets = yaml.safe_load((EXAMPLE / "group_vars/all/vault.yml.example").read_text())
    assert secrets == dict.fromkeys(VAULT)


def test_addresses_and_names_are_those_for_documentation():
    text = "\n".join(path.read_text() for path in FILES)
    addresses = set(re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", text))
    assert addresses
    network = ipaddress.ip_network("192.0.2.0/24")
    assert all(ipaddress.ip_address(address) in network for address in addresses)
    hosts = yaml.safe_load((EXAMPLE / "hosts.yml").read_text())["all"]["children"]
    assert [host["ansible_host"] for host in hosts["proxmox"]["hosts"].values()] == [
        "pve1.example.org",
        "pve2.example.org",
    ]


def unexplained(text, depth):
    """Lines that set something, down to an indentation, with no comment above, beside or (for a mapping) inside.

    Lines that follow each other without a break share the comment above the first.
    """
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines):
        match = re.match(r"( *)[\w.-]+:(?=\s|$)", line)
        if not match or len(match[1]) > depth or "#" in line:
            continue
        above = number - 1
        while re.match(rf"{match[1]}[\w.-]+:\s", lines[above]):
            above -= 1
        inside = lines[number + 1].strip() if number + 1 < len(lines) else ""
        if not lines[above].strip().startswith("#") and not inside.startswith("#"):
            found.append(line.strip())
    return found


def test_every_value_is_explained_where_it_stands():
    depths = {"server.yml": 2}
    for path in FILES:
        if path.name not in ("hosts.yml", "pins.yml"):
            assert unexplained(path.read_text(), depths.get(path.name, 0)) == [], path


def test_a_value_without_a_reason_is_seen():
    assert unexplained("---\n# why\na: 1\nb: 2\n\nc: 3\nd: 4 # why\n", 0) == ["c: 3"]
    assert unexplained("---\na:\n  # why\n  b: 1\n\n  c: 2\n", 2) == ["c: 2"]


def test_every_profile_fits_the_flags():
    settings = yaml.safe_load((EXAMPLE / "group_vars/inference/server.yml").read_text())
    flags, own = settings["sglang_server_launch"], settings["sglang_server_environment"]
    assert NCCL["sglang_server_nccl_profile"] in PROFILES
    for name in PROFILES:
        environment = nccl.environment(name, own)
        assert launch.check(name, flags, environment) == []
        checked = launch_rules.Launch(subject=name, flags=flags, environment=environment, capability="12.0")
        assert launch_rules.check(checked) == []


def test_the_engine_is_the_locked_one():
    (engine,) = PINS["engines"].values()
    assert engine["sha256"] == hashlib.sha256(LOCK.read_bytes()).hexdigest(), (
        "sha256sum requirements/engine/cuda-py312.lock"
    )
    assert (engine["accelerator"], engine["python"], engine["version"]) == ("cuda", "3.12", "0.5.23")


def test_two_hosts_serve_two_models_from_one_inventory(filled):
    own = filled.mine / "host_vars/llm02.yml"
    own.parent.mkdir()
    own.write_text(
        "pinned_target: {repository: a/other, revision: r7, manifest: manifests/o.json, source: null, hub: yes}\n"
    )
    show = "var=model_weights_models"
    try:
        done = filled.run("ansible", "-i", "inventory/mine", "inference", "-m", "ansible.builtin.debug", "-a", show)
    finally:
        shutil.rmtree(own.parent)
    hosts = {text.split(" ", 1)[0]: text for text in re.split(r"^(?=llm0)", done.stdout, flags=re.MULTILINE) if text}
    first, second = (
        yaml.safe_load(hosts[name].split("=>", 1)[1])["model_weights_models"] for name in ("llm01", "llm02")
    )
    assert [model["repository"] for model in first] == ["moonshotai/Kimi-K2.5", "AQ-MedAI/Kimi-K25-eagle3"]
    assert [model["repository"] for model in second] == ["a/other", "AQ-MedAI/Kimi-K25-eagle3"]
    assert (first[0]["source"].endswith("/Kimi-K2.5"), first[0]["hub"]) == (True, False)
    assert (second[0]["source"], second[0]["hub"], second[0]["revision"]) == ("", True, "r7")
    assert second[0]["manifest"].endswith("/inventory/mine/manifests/o.json")


def test_every_role_variable_has_its_type_and_no_required_one_is_missing(rendered):
    for host in ("llm01", "llm02"):
        values = rendered[host]["variables"]
        for role, options in SPECS.items():
            own = {name: values[name] for name in options if name in values}
            required = {name for name, option in options.items() if option.get("required")}
            assert required <= own.keys(), role
            given = {name: {**options[name], "default": None} for name in own}
            assert ArgumentSpecValidator(given).validate(own).error_messages == [], role
    assert inventory.unknown_variables("example", names_set(), SPECS, EXAMPLE) == []


def test_containers_get_eight_cards_and_nothing_unneeded(rendered):
    hosts = [rendered[host]["variables"] for host in ("llm01", "llm02")]
    for values in hosts:
        paths = [device.split(",")[0] for device in values["proxmox_container_devices"]]
        cards = [f"/dev/nvidia{number}" for number in range(8)]
        assert paths == [*cards, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
        assert all(re.fullmatch(r"[^,]+,mode=0[0-7]{3}", device) for device in values["proxmox_container_devices"])
        assert values["proxmox_container_api_user"] == "root@pam"
        assert values["proxmox_container_api_password"] == "made-up-pass"
        assert values["proxmox_container_ssh_public_keys"] == ["ssh-ed25519 AAAA operator"]
        assert values["gpu_runtime_driver"] == "999.99.99"
        assert Path(values["gpu_runtime_driver_file"]).name == "NVIDIA-Linux-x86_64-999.99.99.run"
    assert [values["proxmox_container_api_host"] for values in hosts] == ["pve1.example.org", "pve2.example.org"]
    assert [values["proxmox_host_node"] for values in hosts] == ["pve1", "pve2"]
    assert [values["proxmox_container_net0"] for values in hosts] == [
        "name=eth0,bridge=vmbr0,ip=192.0.2.11/24,gw=192.0.2.1,firewall=1",
        "name=eth0,bridge=vmbr0,ip=192.0.2.12/24,gw=192.0.2.1,firewall=1",
    ]


def test_launch_yaml_of_a_host(rendered):
    text = rendered["llm02"]["launch"]
    assert yaml.safe_load(text) == {
        "model-path": "/models/moonshotai/Kimi-K2.5/made-up",
        "speculative-draft-model-path": yaml.safe_load(text)["speculative-draft-model-path"],
        "host": "192.0.2.12",
        "port": 30000,
        "api-key": "made-up-key",
        "nccl-port": 30001,
        "served-model-name": "kimi-k2.5",
        "trust-remote-code": True,
        "tp-size": 8,
        "attention-backend": "flashinfer",
        "speculative-draft-attention-backend": "flashinfer",
        "mem-fraction-static": 0.85,
        "kv-cache-dtype": "bf16",
        "context-length": 131072,
        "chunked-prefill-size": 8192,
        "max-running-requests": 16,
        "cuda-graph-max-bs-decode": 16,
        "disable-custom-all-reduce": True,
        # JSON in a string, booleans as booleans: SGLang refuses "true"
        "model-loader-extra-config": '{"enable_multithread_load": true, "num_threads": 16}',
        "watchdog-timeout": 1200,
        "enable-metrics": True,
        "tool-call-parser": "kimi_k2",
        "reasoning-parser": "kimi_k2",
        "speculative-algorithm": "EAGLE3",
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
        "speculative-draft-model-quantization": "unquant",
    }
    assert re.fullmatch(r"/etc/sglang/drafter/[0-9a-f]{12}", yaml.safe_load(text)["speculative-draft-model-path"])


@pytest.mark.parametrize(
    ("profile", "own"),
    [
        (
            "latency",
            [
                'NCCL_ALLOC_P2P_NET_LL_BUFFERS="1"',
                'NCCL_IB_DISABLE="1"',
                'NCCL_MIN_NCHANNELS="8"',
                'NCCL_P2P_LEVEL="SYS"',
                'NCCL_PROTO="LL"',
            ],
        ),
        (
            "throughput",
            ['NCCL_BUFFSIZE="67108864"', 'NCCL_MAX_NCHANNELS="64"', 'NCCL_MIN_NCHANNELS="32"', 'NCCL_P2P_DISABLE="1"'],
        ),
        ("p2p-fallback", ['NCCL_CUMEM_ENABLE="0"', 'NCCL_P2P_DISABLE="1"']),
    ],
)
def test_environment_by_profile(rendered, profile, own):
    common = ["HF_HUB_OFFLINE", "OMP_NUM_THREADS", "SGLANG_ENABLE_JIT_DEEPGEMM", "TRANSFORMERS_OFFLINE"]
    values = dict(zip(common, ("1", "8", "0", "1"), strict=True)) | {"NCCL_DEBUG": "WARN"}
    lines = [
        line for line in rendered["llm01"]["environment"][profile].splitlines() if line and not line.startswith("#")
    ]
    assert lines == sorted([*own, *(f'{name}="{value}"' for name, value in values.items())])


def test_the_rendezvous_port_is_closed_to_others(rendered):
    assert 'iifname != "lo" tcp dport 30001 counter drop' in rendered["llm01"]["firewall"]


def test_the_processes_of_one_machine_meet_on_its_loopback(rendered):
    """A real node writes the container's address beside its name, and that is where gloo would listen."""
    assert "\nEnvironment=GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo\n" in rendered["llm01"]["service"]
    text = yaml.safe_load((ROOT / "roles/sglang_server/vars/main.yml").read_text())["__sglang_server_inside"]
    for flags, set_there in (({}, True), ({"nnodes": 1}, True), ({"nnodes": "2"}, False)):
        assert ("lo" in jinja2.Template(text).render(sglang_server_launch=flags)) is set_there


def test_the_server_finds_what_compiles_its_kernels(rendered):
    places = (
        "/opt/sglang/releases/x/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    )
    assert f"\nEnvironment=PATH={places}\n" in rendered["llm01"]["service"]


def test_the_unit_waits_long_and_restarts_rarely(rendered):
    text = rendered["llm01"]["service"]
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
    assert settings["TimeoutStartSec"] == "3610"
    assert settings["ExecStartPost"].endswith("start_guard.py wait http://192.0.2.11:30000/health 3600")
    assert settings["TimeoutStopSec"] == "180"
    assert (settings["StartLimitBurst"], settings["StartLimitIntervalSec"]) == ("3", "14400")
    assert int(settings["StartLimitBurst"]) * int(settings["TimeoutStartSec"]) < int(settings["StartLimitIntervalSec"])
    assert settings["KillMode"] != "process"
    # a GPU server needs its devices
    assert "PrivateDevices=yes" not in text
    assert "%h" not in text


def test_compiled_kernels_are_of_one_release(rendered):
    """SGLang's own caches, and those of what it compiles with, each by its variable; only downloads are shared."""
    text = rendered["llm01"]["service"]
    caches = dict(re.findall(r"(?m)^Environment=(\w+)=(/var/cache/\S+)$", text))
    assert set(caches) == {
        *("XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH", "SGLANG_CACHE_DIR", "SGLANG_DG_CACHE_DIR"),
        *("SGLANG_JIT_CACHE_DIR", "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"),
        *("TRITON_CACHE_DIR", "TVM_FFI_CACHE_DIR"),
    }
    assert {path.split("/")[5] for path in caches.values()} == {"x"}
    assert "CacheDirectory=sglang sglang/releases/x\n" in text


def test_the_drafter_gets_layer_inputs(rendered):
    """The registry of the filled copy says that 2, 30, 58 are outputs: as inputs they are one more."""
    config = json.loads(rendered["llm01"]["drafter"])
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    assert config["eagle_config"]["use_aux_hidden_state"] is True


# What docs/day-one.md says exists


def test_the_runbook_chapter_names_what_there_is():
    text = (ROOT / "docs/day-one.md").read_text()
    tags = {tag for words in re.findall(r"--tags ([\w,-]+)", text) for tag in words.split(",")}
    known = {tag for play in yaml.safe_load((ROOT / "deploy.yml").read_text()) for tag in play["tags"]}
    assert tags
    assert tags <= known
    for name in re.findall(r"`((?:playbooks|requirements|group_vars|inventory/example)[\w./-]*)`", text):
        assert (ROOT / name).exists() or (EXAMPLE / name).exists(), name
    for name in re.findall(r"`(\w+\.yml)`", text):
        assert name in {path.name for path in FILES} | {"deploy.yml"}, name
    for name in re.findall(r"`((?:sglang_|proxmox_)\w+)[:`]", text):
        assert any(name in options for options in SPECS.values()), name
    assert MAKE_TARGET in text
    assert "ANSIBLE_VAULT_PASSWORD_FILE" in text
