"""inventory/example: a real cluster that nobody here has. What it says is checked as far as that goes without one.

A copy of the project without a lab and with a vault of its own is what a person has on day one.
"""

import hashlib
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from pivot.inventory import inventory, pins
from pivot.serving import launch, launch_rules, nccl

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "inventory/example"
FILES = sorted(EXAMPLE.rglob("*.yml"))
PINS = yaml.safe_load((EXAMPLE / "group_vars/all/pins.yml").read_text())["pivot_pins"]
NCCL = yaml.safe_load((EXAMPLE / "group_vars/inference/nccl.yml").read_text())
PROFILES = ["latency", "throughput", "p2p-fallback"]
LOCK = ROOT / "requirements/engine/cuda-py312.lock"
SPECS = inventory.role_specs(ROOT / "roles")
VAULT = {"vault_proxmox_password": "made-up-pass", "vault_sglang_api_key": "made-up-key"}

CONFIGS = {  # with the public numbers of these models
    "kimi-k2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "vocab_size": 163840,
            "max_position_embeddings": 262144,
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
    },
    "kimi-k2.5-eagle3": json.loads((ROOT / "tests/data/field-cases/B01b-drafter-config.json").read_text()),
}

SIZES = {"kimi-k2.5": 547 * 10**9, "kimi-k2.5-eagle3": 6 * 10**9}

TARGET = "pivot_pins.models.kimi-k2.5"
DRAFTER = "pivot_pins.models.kimi-k2.5-eagle3"
MAKE_TARGET = "pivot manifest /srv/models/moonshotai/Kimi-K2.5 --repository moonshotai/Kimi-K2.5"
MAKE_DRAFTER = "pivot manifest /srv/models/AQ-MedAI/Kimi-K25-eagle3 --repository AQ-MedAI/Kimi-K25-eagle3"
NO_SOURCE = (
    "put the files of the pinned revision there, or correct source; hosts that have them need no source: "
    "--skip-tags preflight"
)


def unknown(inventory_name):
    """(code, what, what is the matter, and the command or the words that fill it), in order."""
    run = "NVIDIA-Linux-x86_64-VERSION.run"
    driver = (
        ("version", "ssh root@NODE cat /proc/driver/nvidia/version"),
        ("file", f"download {run} from NVIDIA, then file: its path; '' where nothing is installed"),
        ("sha256", f"sha256sum {run}"),
    )
    rows = [("PIN-NULL", "pivot_pins.driver", f"{key} is not known yet", fill) for key, fill in driver]
    for subject, command, place, name in (
        (TARGET, MAKE_TARGET, "moonshotai/Kimi-K2.5", "kimi-k2.5"),
        (DRAFTER, MAKE_DRAFTER, "AQ-MedAI/Kimi-K25-eagle3", "kimi-k2.5-eagle3"),
    ):
        whole = f"{command} --revision COMMIT --output inventory/{inventory_name}/manifests/{name}.json"
        rows += [
            ("PIN-SOURCE", subject, f"the source /srv/models/{place} is no directory of this controller", NO_SOURCE),
            ("PIN-NULL", subject, "revision is not known yet", f"{whole}, then revision: COMMIT"),
            ("PIN-NULL", subject, "manifest is not known yet", whole),
        ]
    counts = "read how its training code counts layers, then write convention: input or output"
    return [*rows, ("PIN-NULL", f"{DRAFTER}.contract", "convention is not known yet", counts)]


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


class Checkout:
    """A copy of the project, its lab never up, with inventory/mine and a vault that has a password of its own."""

    def __init__(self, place: Path) -> None:
        self.root, self.mine = place / "pivot", place / "pivot/inventory/mine"
        for name in ("playbooks", "plugins", "roles", "templates", "requirements", "lab/vault-password", "ansible.cfg"):
            self._copy(name)
        self._copy("deploy.yml")
        shutil.copytree(EXAMPLE, self.mine)
        (self.root / "artifacts").mkdir()
        (place / ".ssh").mkdir()
        (place / ".ssh/id_ed25519.pub").write_text("ssh-ed25519 AAAA operator\n")
        (place / ".ssh/id_ed25519").write_text("made up\n")
        (place / "vault-password").write_text("a password of this cluster\n")
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(place),
            "LC_ALL": "C.UTF-8",
            "ANSIBLE_CONFIG": str(self.root / "ansible.cfg"),
            "ANSIBLE_VAULT_PASSWORD_FILE": str(place / "vault-password"),
        }

    def _copy(self, name: str) -> None:
        source, target = ROOT / name, self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)

    def run(self, *words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.root, env=environment or self.environment, capture_output=True, text=True, check=False
        )

    def play(self, playbook: str, **variables: object) -> subprocess.CompletedProcess[str]:
        return self.run("ansible-playbook", "-i", "inventory/mine", playbook, "-e", json.dumps(variables))

    def make_vault(self) -> None:
        plain = self.mine / "group_vars/all/vault.yml"
        plain.write_text(yaml.safe_dump(VAULT))
        done = self.run("ansible-vault", "encrypt", str(plain))
        assert done.returncode == 0, done.stderr
        assert plain.read_text().startswith("$ANSIBLE_VAULT;")

    def fill(self) -> None:
        """The nulls filled, with values of this test alone."""
        path = self.mine / "group_vars/all/pins.yml"
        text = path.read_text()
        for name, repository in (
            ("kimi-k2.5", "moonshotai/Kimi-K2.5"),
            ("kimi-k2.5-eagle3", "AQ-MedAI/Kimi-K25-eagle3"),
        ):
            head, tail = text.split(f"repository: {repository}", 1)
            tail = tail.replace("revision: null", "revision: made-up", 1)
            tail = tail.replace("manifest: null", f"manifest: manifests/{name}.json", 1)
            text = f"{head}repository: {repository}{tail}"
            (self.mine / "manifests").mkdir(exist_ok=True)
            manifest = {"format": 1, "repository": repository, "revision": "made-up", "safetensors": {}}
            sizes = {"config.json": 1, "model.safetensors": SIZES[name]}
            manifest["files"] = {file: {"sha256": "0" * 64, "size": size} for file, size in sizes.items()}
            manifest["config"] = CONFIGS[name]
            (self.mine / f"manifests/{name}.json").write_text(json.dumps(manifest))
        sources, installer = self.root.parent / "models", self.root.parent / "NVIDIA-Linux-x86_64-999.99.99.run"
        installer.write_text("made-up")
        for line in re.findall(r"source: (/srv/models/.*)", text):
            (sources / line.removeprefix("/srv/models/")).mkdir(parents=True)
        text = (
            text.replace("/srv/models/", f"{sources}/")
            .replace("version: null", "version: 999.99.99")
            .replace("file: null", f"file: {installer}")
            .replace("sha256: null", f"sha256: {hashlib.sha256(b'made-up').hexdigest()}")
            .replace("convention: null", "convention: output")
        )
        assert yaml.safe_load(text)["pivot_pins"] != PINS
        path.write_text(text)

    def trust(self) -> None:
        """What docs/day-one.md puts beside the inventory."""
        (self.mine / "trust").mkdir()
        (self.mine / "trust/known_hosts").write_text("pve1.example.org ssh-ed25519 AAAA\n")
        (self.mine / "trust/pve-root-ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("untouched"))
    checkout.make_vault()
    return checkout


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("filled"))
    checkout.make_vault()
    checkout.fill()
    checkout.trust()
    return checkout


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


def report(text):
    """Findings as a terminal shows them: (code, subject, message, fix), those of several hosts once."""
    pattern = r"^ *(?:\[ERROR\].* )?ERROR +([A-Z-]+)  ([^:\n]+): ([^\n]+)\n +fix: ([^\n]+)"
    return sorted(set(re.findall(pattern, text, re.MULTILINE)))


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


def test_preflight_refuses_the_nulls_on_a_fresh_checkout(untouched):
    done = untouched.play("playbooks/preflight.yml")
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    trust = untouched.mine / "trust"
    missing = [item for item in report(text) if item[0] == "FILE-MISSING"]
    assert {item[1] for item in missing} == {"llm01", "llm02"}
    assert {item[2].split(" names ")[-1] for item in missing} == {
        f"{trust / 'known_hosts'}, whose directory does not exist",
        f"{trust / 'pve-root-ca.pem'}, which is no file of this controller",
    }
    assert [item for item in report(text) if item not in missing] == sorted(unknown("mine"))


def test_what_is_missing_is_said_in_the_order_of_day_one(untouched):
    text = untouched.play("playbooks/preflight.yml").stdout
    order = ["trust/known_hosts", "pve-root-ca.pem", "version is not", "the source", "revision is", "convention is"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_a_forgotten_vault_is_named_with_what_belongs_into_it(filled):
    vault = filled.mine / "group_vars/all/vault.yml"
    kept = vault.read_text()
    vault.unlink()
    text = filled.play("playbooks/preflight.yml").stdout
    vault.write_text(kept)
    assert "VAR-UNDEFINED" in text
    assert "not set: vault_proxmox_password, vault_sglang_api_key" in text
    assert "write it into group_vars/all/vault.yml" in text


def test_preflight_passes_when_they_are_filled(filled):
    done = filled.play("playbooks/preflight.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert report(done.stdout + done.stderr) == []


def test_preflight_says_which_layers_reach_the_drafter(filled):
    done = filled.play("playbooks/preflight.yml")
    line = (
        "ids [3, 31, 59] on 0.5.23 → inputs of layers 3, 31, 59 (outputs of 2, 30, 58); "
        "contract: outputs of 2, 30, 58; agrees"
    )
    for host in ("llm01", "llm02"):
        assert re.search(rf"^{host}\n  layers +{re.escape(line)}$", done.stdout, re.MULTILINE), done.stdout
    done = filled.play("playbooks/preflight.yml", sglang_server_eagle_layer_ids=[2, 30, 58])
    assert done.returncode == 2, done.stdout
    assert "contract: outputs of 2, 30, 58; DISAGREES; write [3, 31, 59]" in done.stdout
    assert {item[0] for item in report(done.stdout + done.stderr)} == {"DRAFTER-LAYERS"}


def test_preflight_sees_what_an_operator_gets_wrong_at_once(filled):
    done = filled.play(
        "playbooks/preflight.yml",
        sglang_server_environment={"OMP_NUM_THREADS": 8},
        sglang_server_prot=1,
        proxmox_container_memory="768G",
        proxmox_container_vmid=9001,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert {item[0] for item in report(text)} == {"ENV-TYPE", "VAR-UNKNOWN", "VAR-TYPE", "HOST-COLLISION"}
    for words in ('OMP_NUM_THREADS: "8"', "did you mean sglang_server_port?", "the vmid 9001 is given to 2 hosts"):
        assert words in text
    assert "Traceback" not in text


def test_a_backend_without_kernels_for_the_cards_is_refused_before_anything_is_touched(filled):
    launch_file = yaml.safe_load((filled.root / "inventory/mine/group_vars/inference/server.yml").read_text())
    flags = {**launch_file["sglang_server_launch"], "attention-backend": "trtllm_mla"}
    done = filled.play("playbooks/preflight.yml", sglang_server_launch=flags)
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert {item[0] for item in report(text)} == {"LAUNCH-BACKEND"}
    assert "no kernels for compute capability 12.0" in text


def test_preflight_says_what_fits_into_a_card(filled):
    done = filled.play("playbooks/preflight.yml")
    # 0.85 x 95.6 GiB less 553e9 B / 8; 18,127,260,618 B / (70,272 + 4,096) B
    line = (
        "81.3 of 95.6 GiB a card are static: weights 63.7, drafter 0.7, KV cache 16.9 = 243,750 tokens of 74,368 B; "
        "1 request of 131,072 tokens fits; or 16 of 15,234; 14.3 GiB for graphs, NCCL and activations"
    )
    assert len(re.findall(rf"^  memory +{re.escape(line)}$", done.stdout, re.MULTILINE)) == 2, done.stdout
    assert "BUDGET-" not in done.stdout
    text = (filled.root / "inventory/mine/group_vars/inference/server.yml").read_text()
    flags = {**yaml.safe_load(text)["sglang_server_launch"], "tp-size": 4}
    done = filled.play("playbooks/preflight.yml", sglang_server_launch=flags)
    assert done.returncode == 2
    assert {item[0] for item in report(done.stdout + done.stderr)} == {"BUDGET-WEIGHTS"}


def test_a_misspelt_variable_of_nccl_is_refused_and_what_is_for_debugging_has_its_reason(filled):
    assert "NCCL-" not in filled.play("playbooks/preflight.yml").stdout
    done = filled.play(
        "playbooks/preflight.yml", sglang_server_environment={"NCCL_P2P_LEVLE": "SYS", "NCCL_ALGO": "Ring"}
    )
    assert {item[0] for item in report(done.stdout + done.stderr)} == {"NCCL-UNKNOWN"}
    assert "did you mean NCCL_P2P_LEVEL?" in done.stdout
    # given on the command line, without a comment
    assert "NVIDIA counts NCCL_ALGO among what is for debugging" in done.stdout


def test_a_waived_finding_is_printed_and_stops_nothing(filled):
    wrong = {"sglang_server_environment": {"NCCL_P2P_LEVLE": "SYS"}}
    done = filled.play("playbooks/preflight.yml", **wrong, pivot_waivers={"NCCL-UNKNOWN": "a build of our own"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "INFO    NCCL-UNKNOWN" in done.stdout + done.stderr
    assert "(accepted by pivot_waivers: a build of our own)" in " ".join((done.stdout + done.stderr).split())
    done = filled.play("playbooks/preflight.yml", **wrong, pivot_waivers={"NCCL-UNKNOWN": "", "NCCL-UNKOWN": "x"})
    assert done.returncode == 2
    codes = {item[0] for item in report(done.stdout + done.stderr)}
    assert codes == {"NCCL-UNKNOWN", "WAIVER-REASON", "WAIVER-UNKNOWN"}


def test_what_is_worth_knowing_is_printed_and_no_warning(filled):
    done = filled.play("playbooks/preflight.yml", sglang_server_eagle_layer_ids=[31, 3, 59])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for host in ("llm01", "llm02"):
        assert [line for line in lines if line.startswith(f"  {host}: ids [31, 3, 59] on 0.5.23 → ")]
        assert [line for line in lines if line.startswith(f"  {host}:   rope: theta 1000000.0")]
        assert [line for line in lines if line.startswith(f"  INFO    DRAFTER-ORDER  {host}: ")]
    assert not re.search(r"\[WARNING\]:\s+INFO", done.stdout + done.stderr)


@pytest.mark.parametrize("variables", [{}, {"sglang_server_prot": 1, "proxmox_container_vmid": 9001}])
def test_the_command_says_what_the_play_says(filled, variables):
    command = Path(sys.executable).with_name("pivot")
    done = filled.run(str(command), "check", "inventory/mine", "--json", "-e", json.dumps(variables))
    assert done.returncode == (1 if variables else 0), done.stdout + done.stderr
    data = json.loads(done.stdout)
    wrong = [item for item in data["findings"] if item["severity"] == "error"]
    found = {(item["code"], item["subject"], item["message"], item["fix"]) for item in wrong}
    play = filled.play("playbooks/preflight.yml", **variables)
    assert sorted(found) == report(play.stdout + play.stderr)
    for host, said in data["hosts"].items():
        assert f"{host}: {said['layers']}" in play.stdout


@pytest.mark.parametrize(
    ("tag", "name", "value"),
    [
        ("provision", "proxmox_host_devices", {"all": True}),
        ("engine", "sglang_engine_keep_releases", "many"),
        ("weights", "model_weights_models", "all"),
        ("serve", "sglang_server_port", "abc"),
    ],
)
def test_without_preflight_the_argument_specs_still_hold(filled, tag, name, value):
    words = ["ansible-playbook", "-i", "inventory/mine", "deploy.yml", "--skip-tags", "preflight", "--tags", tag]
    done = filled.run(*words, "-e", json.dumps({name: value}))
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert "Validation of arguments failed" in text
    assert name in text
    assert "Everything wrong with the inventory" not in text


def test_an_unknown_profile_names_the_known_ones(filled):
    done = filled.play("playbooks/preflight.yml", sglang_server_nccl_profile="fast")
    assert done.returncode == 2
    words = " ".join((done.stdout + done.stderr).split())
    assert "sglang_server_nccl_profile must be one of: none, latency, throughput, p2p-fallback, got: fast" in words


# The whole story reads it, without a lab


@pytest.mark.parametrize("vault", [True, False])
def test_the_story_is_understood_without_a_lab(filled, vault):
    assert not (filled.root / ".lab").exists()
    environment = dict(filled.environment)
    password = environment.pop("ANSIBLE_VAULT_PASSWORD_FILE")
    words = ["ansible-playbook", "deploy.yml", "--syntax-check", "-i"]
    words += ["inventory/mine", "--vault-password-file", password] if vault else [str(EXAMPLE)]
    done = filled.run(*words, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "playbook: deploy.yml" in done.stdout


def test_the_vault_is_closed_to_the_labs_password(filled):
    environment = {k: v for k, v in filled.environment.items() if k != "ANSIBLE_VAULT_PASSWORD_FILE"}
    done = filled.run("ansible-playbook", "-i", "inventory/mine", "playbooks/preflight.yml", environment=environment)
    assert done.returncode != 0
    assert "made-up-pass" not in done.stdout + done.stderr
    assert f"VAULT-CLOSED  {filled.mine}/group_vars/all/vault.yml" in done.stderr


# Values


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


def test_the_unit_waits_long_and_restarts_rarely(rendered):
    text = rendered["llm01"]["service"]
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
    assert settings["TimeoutStartSec"] == "3610"
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
