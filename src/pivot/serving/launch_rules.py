"""Launch settings against what the pinned engine takes, and against each other.

`pivot.serving.launch` looks at their form alone; this module needs the engine's description
(`pivot.engines.descriptions`) for names and values, and nothing but the settings for the relations, whose sources stand
in each finding.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pivot.engines import descriptions
from pivot.findings import Finding, Severity
from pivot.serving.nccl import alike

ERROR, WARNING = Severity.ERROR, Severity.WARNING
FLAGS, VARIABLES = "sglang_server_launch", "sglang_server_environment"
# backends without kernels for compute capability 12.0 (rtx6kpro; kernel reports of the field)
NOT_ON_SM120 = frozenset({"trtllm_mla", "trtllm_mha", "fa3", "fa4", "cutlass_mla", "flashmla"})
# the same for experts and matrix products: kernels of trtllm ("Unsupported architecture") and DeepGEMM (sglang 24633
# and PR 19948, rtx6kpro)
GEMM_NOT_ON_SM120 = frozenset(
    {
        "flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm", "deep_gemm", "flashinfer_deepgemm",
    }
)  # fmt: skip
GEMMS = ("moe-runner-backend", "speculative-moe-runner-backend", "fp8-gemm-backend", "fp4-gemm-backend")
# switches that were reported not to work there (ambientlight/rtx-pro-6000-bench), or to do nothing (GCP tuning report)
USELESS_ON_SM120 = {
    "enable-torch-compile": "was reported to fail or to slow down",
    "enable-piecewise-cuda-graph": "was reported to fail or to slow down",
    "enable-flashinfer-allreduce-fusion": "does nothing, as its kernels are for 9.0 and 10.0",
}
# attention backends that take a tree of drafts with pages of more than one token
TREES = frozenset({"flashinfer", "fa3", "triton"})
# variables that switch a check of the engine off
BYPASSES = ("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "FLASHINFER_DISABLE_VERSION_CHECK")
TRUE = ("true", "1", "yes", "y")
# words for a boolean, and what YAML or JSON call it
WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
# algorithms of one family in SGLang (arg_groups/speculative_hook.py): three numbers or none, a drafter of their own
EAGLES = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
# of them those whose drafter can be layers of the target's own checkpoint
OWN_LAYERS = ("EAGLE", "NEXTN")
# numbers that a start with 0 or less cannot use
COUNTS = (
    *("tp-size", "tensor-parallel-size", "pp-size", "pipeline-parallel-size", "dp-size", "data-parallel-size"),
    *("ep-size", "expert-parallel-size", "context-length", "max-running-requests", "max-total-tokens", "page-size"),
    *("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens", "watchdog-timeout"),
)
# what SGLang's own loaders take in model-loader-extra-config; another key ends the start
LOADER_KEYS = {"enable_multithread_load": bool, "num_threads": int}
Wrong = tuple[str, Severity, str, str]
"""A finding's code, severity, message and fix."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The settings of one host. capability: of its GPUs, ``12.0``; drafter: whether one is deployed; both None when not
    known; quantisation: method of the target's checkpoint, empty when it has none; own_drafter: whether that
    checkpoint brings layers that draft."""

    subject: str
    flags: Mapping[str, Any]
    environment: Mapping[str, Any]
    version: str = ""
    engine: Mapping[str, Any] | None = None
    capability: str | None = None
    drafter: bool | None = None
    quantisation: str = ""
    own_drafter: bool = False


def check(launch: Launch) -> list[Finding]:
    """Everything wrong with the names, the values and the relations."""
    wrong = [*_against_engine(launch), *(item for rule in RULES for item in rule(launch))]
    return [Finding(code, severity, launch.subject, message, fix) for code, severity, message, fix in wrong]


# --- names and values


def _against_engine(launch: Launch) -> Iterator[Wrong]:
    if launch.engine is None:
        return
    table: Mapping[str, Mapping[str, Any]] = launch.engine.get("flags") or {}
    names = {alias: name for name, flag in table.items() for alias in (name, *flag.get("aliases", []))}
    for name, value in launch.flags.items():
        if isinstance(name, str):
            yield from _flag(name, value, names, table, launch.version)
    settings = launch.engine.get("environment") or {}
    for name, value in launch.environment.items():
        if isinstance(name, str) and name.startswith(("SGLANG_", "SGL_")):
            yield from _variable(name, value, settings, launch.version)


def _flag(
    name: str, value: object, names: Mapping[str, str], table: Mapping[str, Mapping[str, Any]], version: str
) -> Iterator[Wrong]:
    """One flag of the inventory; value is as YAML holds it."""
    where = f"{FLAGS}.{name}"
    name = name.lstrip("-").replace("_", "-").lower()  # pivot.serving.launch says where it is spelt otherwise
    if name not in names:
        begun = {names[other] for other in names if other.startswith(name)}
        if len(begun) == 1:
            whole = next(iter(begun))
            yield "LAUNCH-SHORT", WARNING, f"{where} is short for {whole} of SGLang {version}", f"write {whole}"
            yield from _value(where, value, table[whole])
            return
        yield "LAUNCH-UNKNOWN", ERROR, f"{where} is no flag of SGLang {version}", _meant(name, names)
        return
    flag = table[names[name]]
    if flag.get("deprecated"):
        message = f"{where} is deprecated in SGLang {version}"
        yield "LAUNCH-DEPRECATED", WARNING, message, "see its --help for the new name"
    yield from _value(where, value, flag)


def _meant(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else "remove it, or pin an SGLang that has it"


def _value(where: str, value: object, flag: Mapping[str, Any]) -> Iterator[Wrong]:
    """A value against the type and the choices of its flag; what the description does not know is let pass."""
    kind, right = flag.get("type"), f"write {_example(flag)}"
    if value is None:
        return  # pivot.serving.launch says it
    if kind in ("bool", "on-off"):
        if not isinstance(value, bool):
            message = f"{where} is {_short(value)}, but a switch takes no value"
            yield "LAUNCH-VALUE", ERROR, message, "write true, or remove the line"
        return
    if isinstance(value, bool):
        yield "LAUNCH-VALUE", ERROR, f"{where} is {value}, but it is no switch", right
        return
    for item in value if isinstance(value, list) and flag.get("nargs") else [value]:
        if not _fits(item, kind):
            yield "LAUNCH-VALUE", ERROR, f"{where} is {_short(item)}, which is not {_example(flag)}", right
        elif flag.get("choices") and _plain(item) not in map(str, flag["choices"]):
            close = difflib.get_close_matches(_plain(item), list(map(str, flag["choices"])), n=1)
            fix = f"did you mean {close[0]}? {right}" if close else right
            yield "LAUNCH-VALUE", ERROR, f"{where} is {_short(item)}, which SGLang refuses", fix


def _fits(value: object, kind: str | None) -> bool:
    text = _plain(value)
    if isinstance(value, Mapping):
        return kind not in ("int", "float", "human_readable_int")
    if kind == "int":
        return re.fullmatch(r"[+-]?[0-9]{1,18}", text) is not None
    if kind == "human_readable_int":
        return re.fullmatch(r"[+-]?[0-9]{1,18}|[0-9]{1,9}(\.[0-9]{1,9})?[kMGT]|[0-9]{1,9}[KMGT]i", text) is not None
    if kind == "float":
        return re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text[:40]) is not None
    if kind == "json" and isinstance(value, str):
        return _parsed(value) is not None
    return not isinstance(value, list) or kind != "str"


def _example(flag: Mapping[str, Any]) -> str:
    kinds = {"int": "a whole number", "float": "a number", "human_readable_int": "a number such as 131072 or 128k"}
    if flag.get("choices"):
        return f"one of {', '.join(map(str, flag['choices']))}"
    return kinds.get(str(flag.get("type")), "JSON" if flag.get("type") == "json" else "a text")


def _plain(value: object) -> str:
    """A value as the command line would hold it; Python spells no number of thousands of digits."""
    return "huge" if isinstance(value, int) and abs(value) > 1 << 64 else str(value)


def _short(value: object) -> str:
    """A value, short enough for a sentence."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a huge number"


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _variable(name: str, value: object, settings: Mapping[str, Any], version: str) -> Iterator[Wrong]:
    """One SGLANG_ variable; SGL_ is the older beginning of the same names."""
    where = f"{VARIABLES}.{name}"
    known: Mapping[str, str | None] = settings.get("variables") or {}
    new = re.sub(r"^SGL_", "SGLANG_", name)
    if name in (settings.get("deprecated") or []):
        yield "ENV-DEPRECATED", WARNING, f"{where} is only warned about by SGLang {version}", "remove it"
        return
    if name not in known and new not in known:
        if not new.startswith(tuple(settings.get("families") or ())):
            # what resembles no name may be read by a companion of SGLang
            near = difflib.get_close_matches(new, list(known), n=3, cutoff=0.85)
            close = [other for other in near if alike(new, other)]
            message = f"{where} is no variable of SGLang {version}, which would ignore it silently"
            if others := descriptions.versions_with(name):
                yield "ENV-UNKNOWN", ERROR, message, f"remove it: it is of SGLang {', '.join(others)}"
            else:
                fix = f"did you mean {close[0]}?" if close else "remove it, or pin an SGLang that has it"
                yield "ENV-UNKNOWN", ERROR if close else WARNING, message, fix
        return
    kind, text = known.get(name, known.get(new)), _plain(value)
    words = settings.get("booleans") or {}
    taken = [*words.get("true", []), *words.get("false", [])]
    good = {
        "bool": not taken or text.lower() in taken,
        "int": re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) is not None,
        "float": _fits(text.strip(), "float") or text.strip().lower() in ("inf", "nan"),
    }.get(kind or "", True)
    if not good:
        message = (
            f"{where} is {_short(text)}, which SGLang cannot read as {kind}: it would use its default and only warn"
        )
        yield "ENV-VALUE", ERROR, message, f"write one of {', '.join(taken)}" if kind == "bool" else "write a number"


# --- relations


def _flag_of(launch: Launch, name: str, *aliases: str) -> Any:
    return next((launch.flags[option] for option in (name, *aliases) if option in launch.flags), None)


def _number(value: object) -> int | None:
    digits = "" if isinstance(value, bool) else _plain(value)
    return int(digits) if re.fullmatch(r"[0-9]{1,9}", digits) else None


def _is_on(launch: Launch, name: str) -> bool:
    return _plain(launch.environment.get(name, "")).strip().lower() in TRUE


def _algorithm(launch: Launch) -> str:
    return _plain(_flag_of(launch, "speculative-algorithm") or "").upper()


def _drafter(launch: Launch) -> Iterator[Wrong]:
    algorithm = _algorithm(launch)
    if launch.drafter and not algorithm:
        message = "a drafter is deployed, but speculative-algorithm is not set, so it would not be used"
        fix = "write speculative-algorithm: EAGLE3, or sglang_server_drafter_path: null"
        yield "LAUNCH-NO-ALGORITHM", WARNING, message, fix
    elif algorithm in EAGLES and launch.drafter is False and not (algorithm in OWN_LAYERS and launch.own_drafter):
        message = f"speculative-algorithm is {algorithm}, but no drafter is deployed: the target would be loaded"
        yield "LAUNCH-NO-DRAFTER", ERROR, f"{message} twice (sglang issue 36528)", "set sglang_server_drafter_path"


def _counts(launch: Launch) -> Iterator[Wrong]:
    for name in COUNTS:
        value = launch.flags.get(name)
        if re.fullmatch(r"-[0-9]{1,18}|0", _plain(value)):
            yield "LAUNCH-VALUE", ERROR, f"{FLAGS}.{name} is {value}, which is no count", "write 1 or more"


def _triple(launch: Launch) -> Iterator[Wrong]:
    """The three numbers of a draft; other algorithms have numbers of their own, and adaptive steps choose them."""
    if _algorithm(launch) not in ("", *EAGLES) or _flag_of(launch, "speculative-adaptive") is True:
        return
    names = ("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens")
    values = {name: _flag_of(launch, name) for name in names}
    given = [name for name in names if values[name] is not None]
    if 0 < len(given) < len(names):
        missing = [name for name in names if name not in given]
        message = f"{', '.join(given)} without {', '.join(missing)}: SGLang takes all three or none"
        yield "LAUNCH-TRIPLE", ERROR, message, f"add {', '.join(missing)}, or remove all three"
        return
    steps, topk, tokens = (_number(values[name]) for name in names)
    if topk == 1 and steps and tokens is not None and tokens != steps + 1:
        message = f"{names[2]} is {tokens}, but with topk 1 and {steps} steps SGLang takes {steps + 1} silently"
        yield "LAUNCH-TRIPLE", ERROR, message, f"topk 1 => write {names[2]}: {steps + 1}"
    if topk is not None and topk > 1 and _is_on(launch, "SGLANG_ENABLE_SPEC_V2"):
        message = f"SGLANG_ENABLE_SPEC_V2 is on and speculative-eagle-topk is {topk}: the second version takes 1 only"
        yield "LAUNCH-SPEC-V2", ERROR, message, "write speculative-eagle-topk: 1, or remove the variable"


def _pipeline(launch: Launch) -> Iterator[Wrong]:
    stages = _number(_flag_of(launch, "pp-size", "pipeline-parallel-size", "pp"))
    if _algorithm(launch) == "EAGLE3" and stages is not None and stages > 1:
        message = f"pp-size is {stages}, but the ids are set on the last stage alone, so earlier layers are not kept"
        yield "LAUNCH-PIPELINE", ERROR, message, "write pp-size: 1, or serve without a drafter"


def _backends(launch: Launch) -> Iterator[Wrong]:
    if launch.capability is None or not launch.capability.startswith("12."):
        return
    for name in ("attention-backend", "prefill-attention-backend", "decode-attention-backend"):
        for option in (name, f"speculative-draft-{name}"):
            value = _flag_of(launch, option)
            if isinstance(value, str) and value in NOT_ON_SM120:
                message = f"{option} is {value}, which has no kernels for compute capability {launch.capability}"
                yield "LAUNCH-BACKEND", ERROR, message, "write flashinfer or triton"
    for option in GEMMS:
        value = _flag_of(launch, option)
        if isinstance(value, str) and value in GEMM_NOT_ON_SM120:
            message = f"{option} is {value}, which has no kernels for compute capability {launch.capability}"
            yield "LAUNCH-BACKEND", ERROR, message, "remove it: SGLang then chooses one that this card has"
    for option, why in USELESS_ON_SM120.items():
        if _flag_of(launch, option) is True:
            message = f"{option} {why} (compute capability {launch.capability})"
            yield "LAUNCH-USELESS", WARNING, message, "remove it, or measure with and without it"
    if _is_on(launch, "SGLANG_ENABLE_JIT_DEEPGEMM"):
        message = f"SGLANG_ENABLE_JIT_DEEPGEMM is on, but DeepGEMM has no kernels for {launch.capability}"
        yield "LAUNCH-BACKEND", ERROR, message, 'write SGLANG_ENABLE_JIT_DEEPGEMM: "0"'


def _tree(launch: Launch) -> Iterator[Wrong]:
    """A tree of drafts (topk above 1) against what the attention backend and the pages allow."""
    topk, page = _number(_flag_of(launch, "speculative-eagle-topk")), _number(_flag_of(launch, "page-size"))
    backend = _flag_of(launch, "attention-backend")
    if topk is None or topk < 2 or not isinstance(backend, str):
        return
    if backend == "trtllm_mha":
        message = f"speculative-eagle-topk is {topk}, but attention-backend trtllm_mha takes 1 only"
        yield "LAUNCH-TREE", ERROR, message, "write speculative-eagle-topk: 1, or another attention-backend"
    elif page is not None and page > 1 and backend not in TREES:
        message = f"speculative-eagle-topk is {topk} with page-size {page}, which attention-backend {backend} cannot do"
        yield "LAUNCH-TREE", ERROR, message, "write page-size: 1, or flashinfer, fa3 or triton"


def _cache(launch: Launch) -> Iterator[Wrong]:
    kind = _plain(_flag_of(launch, "kv-cache-dtype") or "")
    if kind.startswith("fp8") and "compressed-tensors" in launch.quantisation.lower():
        message = f"kv-cache-dtype is {kind} with a compressed-tensors checkpoint: 16 tok/s instead of 90 were reported"
        yield "LAUNCH-KV-DTYPE", WARNING, message, "write kv-cache-dtype: bf16"


def _json_words(launch: Launch) -> Iterator[Wrong]:
    """Words in quotes where JSON has a boolean of its own: any text, also "false", counts as true."""
    for name, value in launch.flags.items():
        data = _parsed(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
        for key, item in data.items() if isinstance(data, Mapping) else ():
            if isinstance(item, str) and item.lower() in WORDS:
                message = f'{FLAGS}.{name}: {key} is the text "{item}", and every text counts as true'
                yield "LAUNCH-JSON", WARNING, message, f"write {key}: {WORDS[item.lower()]} without quotes"


def _loader(launch: Launch) -> Iterator[Wrong]:
    """What SGLang's own loaders refuse; other load formats have options of their own."""
    value = launch.flags.get("model-loader-extra-config")
    data = _parsed(value) if isinstance(value, str) else value
    if not isinstance(data, Mapping) or _flag_of(launch, "load-format") not in (None, "auto", "safetensors"):
        return
    where = f"{FLAGS}.model-loader-extra-config"
    for key, item in data.items():
        if key not in LOADER_KEYS:
            close = difflib.get_close_matches(str(key), list(LOADER_KEYS), n=1)
            fix = f"did you mean {close[0]}?" if close else f"SGLang takes {' and '.join(LOADER_KEYS)}"
            yield "LAUNCH-LOADER", ERROR, f"{where}: {_short(key)} is no option of the loader", fix
        elif LOADER_KEYS[key] is int and _number(item if isinstance(item, int) else None) in (None, 0):
            message = f"{where}: {key} is {_short(item)}, not a number of threads"
            yield "LAUNCH-LOADER", ERROR, message, f"write {key}: 16, without quotes"


def _peers(launch: Launch) -> Iterator[Wrong]:
    # as NCCL reads it: 0x1 too, and nothing but 1
    off = re.fullmatch(r"\s*\+?(0[xX])?0*1\s*", _plain(launch.environment.get("NCCL_P2P_DISABLE", "0")))
    if off and not _flag_of(launch, "disable-custom-all-reduce"):
        message = "NCCL_P2P_DISABLE is on, but SGLang's own all-reduce would still use peer access, and hang or compute"
        yield "LAUNCH-PEERS", ERROR, f"{message} wrong data", "write disable-custom-all-reduce: true"
    segments = "expandable_segments:true" in _plain(launch.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")).lower()
    if segments and _flag_of(launch, "enable-pcie-oneshot-allreduce"):
        message = "expandable_segments is on, but enable-pcie-oneshot-allreduce shares memory that such segments cannot"
        yield "LAUNCH-SEGMENTS", ERROR, message, "remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF"


def _left_on(launch: Launch) -> Iterator[Wrong]:
    """What belongs into a debugging session or a benchmark, and not into a service."""
    simulated = sorted(name for name in launch.environment if str(name).startswith("SGLANG_SIMULATE_ACC"))
    if simulated and _simulates(launch.environment.get("SGLANG_SIMULATE_ACC_LEN")):
        message = f"{', '.join(simulated)} is set: acceptance is simulated, so no output is valid"
        yield "ENV-SIMULATED", ERROR, message, "remove it"
    elif simulated:
        message = f"{', '.join(simulated)} is set, and does nothing as it is: one number more would make output invalid"
        yield "ENV-SIMULATED", WARNING, message, "remove it"
    for name in BYPASSES:
        if _is_on(launch, name):
            message = f"{name} is on: a mixture of versions is not refused any more"
            yield "ENV-BYPASS", WARNING, message, "remove it, and make the versions agree"
    if _plain(launch.environment.get("NCCL_DEBUG", "")).upper() == "TRACE":
        yield "ENV-TRACE", WARNING, "NCCL_DEBUG is TRACE, which writes a line a call", "write NCCL_DEBUG: WARN"


def _simulates(length: object) -> bool:
    """Whether this accept length is simulated: any above 0; what is no number is taken for one."""
    if length is None:
        return False
    try:
        return float(_plain(length)) > 0
    except ValueError:
        return True


RULES: tuple[Callable[[Launch], Iterator[Wrong]], ...] = (
    _drafter,
    _counts,
    _triple,
    _pipeline,
    _backends,
    _tree,
    _cache,
    _json_words,
    _loader,
    _peers,
    _left_on,
)
