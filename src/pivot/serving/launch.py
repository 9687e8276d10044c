"""Launch arguments and environment of an SGLang server: render, check, and compare with what runs."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from pivot.bundles.secret_names import secret_name
from pivot.findings import Finding, Severity

# SGLang's --config reader refuses these although they are ordinary flags (read from 0.5.23's merger)
ARGV_ONLY = frozenset(
    {
        "dcp-replicate-q-proj", "disable-cuda-graph", "dllm-fdfo", "enable-decoder-swa-bounded-replay",
        "enable-dp-attention", "enable-dsa-fused-indexer", "enable-fused-qk-norm-rope", "enable-tf32-matmul",
        "enable-tp-lm-head-all-to-all", "experts-shared-outer-loras", "lora-paths", "lora-strict-loading",
        "mm-enable-dp-encoder", "ple-offload-embedding", "speculative-enable-w4a4-mxfp4-megamoe",
    }
)  # fmt: skip
# --x / --no-x pairs: false is a flag of its own
ON_OFF = ARGV_ONLY - {"disable-cuda-graph", "enable-dp-attention", "lora-paths"}
# the role sets these from variables of their own
RESERVED = {
    "api-key": "sglang_server_api_key",
    "host": "sglang_server_host",
    "model-path": "sglang_server_model_path",
    "nccl-port": "sglang_server_nccl_port",  # the firewall closes it
    "port": "sglang_server_port",
    "speculative-draft-model-path": "sglang_server_drafter_path",
}
# what an address that means all of them is on the machine itself
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound to
# bytes; the files of a server are some kilobytes, and a disk that full is about to fail anyway
LEAST_FREE = 4 << 20
# proxies are named in small letters, which is how they are read
_NAME = re.compile(r"^([A-Z_][A-Z0-9_]*|(http|https|ftp|all|no)_proxy)$")
_FLAG = re.compile(r"^[a-z][a-z0-9-]*$")


def check(
    subject: str, flags: Mapping[str, Any], environment: Mapping[str, Any], api_key: object = None
) -> list[Finding]:
    """Everything wrong with the launch settings of one host that their form alone shows; the key itself is not said."""
    wrong = [
        _wrong_text("sglang_server_api_key", api_key) if isinstance(api_key, str) else None,
        *(_wrong_flag(name, value) for name, value in flags.items()),
        *(_wrong_variable(name, value) for name, value in environment.items()),
    ]
    return [
        Finding(code, Severity.ERROR, subject, message, fix) for code, message, fix in (item for item in wrong if item)
    ]


def _wrong_flag(name: object, value: object) -> tuple[str, str, str] | None:
    where = f"sglang_server_launch.{name}"
    if not isinstance(name, str):
        return "LAUNCH-NAME", f"{where} is no text to YAML, but a name has to be", "put it in quotes, or correct it"
    if not _FLAG.match(name):
        fix = f"write {name.lstrip('-').replace('_', '-').lower()}"
        return "LAUNCH-NAME", f"{where} is not spelt as SGLang spells its flags", fix
    if name in RESERVED:
        return "LAUNCH-RESERVED", f"{where} is set by a variable of its own", f"set {RESERVED[name]} instead"
    if name.startswith("ssl-") or name == "enable-ssl-refresh":
        message = f"{where} is for TLS, but start guard, health and comparison ask the server over plain HTTP"
        return "LAUNCH-TLS", message, "remove it, and have a proxy before the server speak TLS: docs/day-one.md, step 8"
    return _wrong_value(name, value)


def _wrong_value(name: str, value: object) -> tuple[str, str, str] | None:
    where = f"sglang_server_launch.{name}"
    if value is None:
        message = f"{where} is null, which SGLang would read as the word None"
        return "LAUNCH-NULL", message, "remove it or give it a value"
    if value is False and name not in ON_OFF:
        return "LAUNCH-FALSE", f"{where} is false, which SGLang's --config drops silently", "remove the line"
    texts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
    return next((wrong for text in texts if (wrong := _wrong_text(where, text))), None)


def _wrong_text(where: str, text: str) -> tuple[str, str, str] | None:
    """A value that would not arrive as it is written."""
    if _controls(text):
        message = f"{where} has a line break or another control character"
        return "LAUNCH-CONTROL", message, "write it in one line; JSON says \\n where a value needs one"
    # as argparse reads it: numbers, a dash alone and what holds a space are values
    if text.startswith("-") and not re.fullmatch(r"-|-[0-9]+|-[0-9]*\.[0-9]+|.* .*", text):
        message = f"{where} begins with -, which SGLang's command line takes for the next flag"
        return "LAUNCH-DASH", message, "write a value that begins otherwise"
    return None


def _controls(text: str) -> bool:
    """Whether a text has a character that systemd drops or that ends a line; a tab is neither."""
    return any(unicodedata.category(letter) in ("Cc", "Zl", "Zp", "Cs") for letter in text.replace("\t", " "))


def _wrong_variable(name: object, value: object) -> tuple[str, str, str] | None:
    where = f"sglang_server_environment.{name}"
    if not isinstance(name, str) or not _NAME.match(name):
        return "ENV-NAME", f"{where} is no environment variable's name", "use capitals, digits and underscores"
    if not isinstance(value, str):
        plain = int(value) if isinstance(value, bool) else value
        shown, text = ("no text", "VALUE") if secret_name(name) else (repr(value), str(plain))
        message = f"{where} is {shown}, which YAML does not hand on as it was written"
        return "ENV-TYPE", message, f'quote it, for example {name}: "{text}"'
    if value != value.strip() or _controls(value):
        message = f"{where} has white space at an end, or a line break or another control character"
        return "ENV-SPACE", message, "remove it"
    return None


def url(host: str, port: int, outside: str | None = None) -> str:
    """Where a server is asked that listens at a host. outside: the machine's address for others, where it listens on
    every address; None: it is asked from the machine itself."""
    place = (outside or EVERYWHERE[host]) if host in EVERYWHERE else host
    return f"http://[{place}]:{port}" if ":" in place else f"http://{place}:{port}"


def config_mapping(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the flags that SGLang's --config file can hold, sorted by name."""
    return {name: flags[name] for name in sorted(flags) if name not in ARGV_ONLY}


def settings(flags: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that launch.yaml holds, in its order: the role's own settings that are set, then the flags."""
    return {**{name: value for name, value in own.items() if value not in (None, "")}, **config_mapping(flags)}


def config_text(flags: Mapping[str, Any]) -> str:
    """The body of launch.yaml, one flag a line; mappings become the JSON text that SGLang parses."""
    return "".join(f"{name}: {scalar(value)}\n" for name, value in config_mapping(flags).items())


def scalar(value: object) -> str:
    """A value as YAML that PyYAML reads back exactly: JSON, but for the letters that only YAML takes otherwise."""
    text = json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value
    return re.sub(r"[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]", lambda match: f"\\u{ord(match[0]):04x}", _json(text))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def argv(python: str, config: str, flags: Mapping[str, Any]) -> list[str]:
    """The command line: the interpreter, --config as an argument of its own, then what --config cannot hold."""
    arguments = [python, "-m", "sglang.launch_server", "--config", config]
    for name in sorted(set(flags) & ARGV_ONLY):
        value = flags[name]
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", *map(_word, value if isinstance(value, list) else [value])]
    return arguments


def _word(value: object) -> str:
    """One argument; a mapping becomes the JSON text that SGLang parses."""
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else str(value)


def unit_words(arguments: Sequence[str]) -> str:
    """A command line as ExecStart= wants it: quoted, with % and $ taken literally."""
    words = []
    for argument in arguments:
        text = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
        words.append(f'"{text}"' if re.search(r"[\s'\"\\;]", argument) or not argument else text)
    return " ".join(words)


def environment_text(environment: Mapping[str, str]) -> str:
    """An EnvironmentFile= body, sorted; every value quoted, so that nothing in it is special to systemd."""
    lines = []
    for name in sorted(environment):
        text = re.sub(r'(["\\`$])', r"\\\1", environment[name])
        lines.append(f'{name}="{text}"\n')
    return "".join(lines)


def drafter_config(config: Mapping[str, Any], layer_ids: Sequence[int] | None) -> str:
    """The drafter's config.json with the layer ids where SGLang reads them; None keeps the drafter's own."""
    rendered = dict(config)
    if layer_ids is not None:
        ids = {"eagle_aux_hidden_state_layer_ids": [int(i) for i in layer_ids]}
        nested = rendered.get("eagle_config")
        rendered["eagle_config"] = {**(nested if isinstance(nested, Mapping) else {}), **ids}
    return json.dumps(rendered, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def configured_layer_ids(config: Mapping[str, Any], layer_ids: Sequence[int] | None) -> list[int] | None:
    """The ids that the rendered drafter config holds, None when SGLang's default will be used."""
    nested = json.loads(drafter_config(config, layer_ids)).get("eagle_config")
    ids = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    return None if ids is None else [int(i) for i in ids]


def view_digest(config: str, links: Mapping[str, str]) -> str:
    """Digest of a drafter view as the host computes it: one line an entry, links by their target.

    config: text of its config.json; links: name → target of every other entry.
    """
    lines = {name: f"{name} -> {target}" for name, target in links.items()}
    lines["config.json"] = f"config.json {sha256(config)}"
    return sha256("\n".join(lines[name] for name in sorted(lines)))


def sha256(text: str) -> str:
    """Hex digest of a text as it will stand in a file (UTF-8)."""
    return hashlib.sha256(text.encode()).hexdigest()


def differences(files: Mapping[str, str], modes: Mapping[str, str], state: Mapping[str, Any]) -> list[str]:
    """Paths on the host that are not as wanted.

    files: path → sha256; modes: path → ``owner:group 0640``; state: those of the host, null if missing.
    """
    wrong = {path for path in files if state["files"].get(path) != files[path]}
    wrong |= {path for path in modes if state["modes"].get(path) != modes[path]}
    return sorted(wrong)


def space(subject: str, free: Mapping[str, int]) -> list[Finding]:
    """Directories whose file system is too full for what a server needs written there. free: bytes by directory."""
    return [
        Finding(
            "SERVER-SPACE",
            Severity.ERROR,
            subject,
            f"{count / (1 << 20):.1f} MiB are free where {path} is, and nothing is written with less than "
            f"{LEAST_FREE >> 20} MiB",
            "make room there (df -h on the host); /etc/sglang moves with sglang_server_config_dir",
        )
        for path, count in sorted(free.items())
        if count < LEAST_FREE
    ]
