"""A copy of the project without a lab, with inventory/example as somebody's own: what a person has on day one."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from pivot.inventory import inventory

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
