"""What an SGLang server on this host is, whoever set it up: read-only, bounded, secrets masked before anything leaves.

Sent in one piece with `pivot.bundles.redact`, `pivot.engines.installed` and `pivot.serving.reading` (see
`pivot.program`). Standard library only, Python 3.9. Argument: JSON with ``unit`` and ``pid`` (0: found by itself).
Prints one JSON object; exits 3 with {"failed": sentence} when there is nothing to look at. What cannot be read is named
under ``problems`` as [what, sentence].
"""

import contextlib
import glob
import http.client
import json
import os
import pathlib
import re
import shlex
import sys
import urllib.error
import urllib.request

from pivot.bundles.redact import MASK, Redactor, secret_name, secret_values
from pivot.engines import installed
from pivot.serving.reading import DEEPEST, MOST_TENSORS, Failed, header, inside, parsed, read, run

FAILED = 3
MODULE = "sglang.launch_server"
# names of variables that concern an engine; no other leaves the host
VARIABLES = ("SGLANG_", "SGL_", "NCCL_", "HF_", "CUDA_", "TORCH", "OMP_", "PYTORCH_")
# bytes: of a config, of the environment and the command line of a process, of an answer
CONFIG, PROCESS, ANSWER = 4 << 20, 2 << 20, 4 << 20
MOST_FILES, MOST_PACKAGES = 64, 3000
# of what a server says about itself, the part that is shown
ANSWERED = (
    "version", "model_path", "served_model_name", "speculative_algorithm", "speculative_draft_model_path",
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "context_length", "tp_size",
    "attention_backend", "speculative_attention_mode", "quantization", "kv_cache_dtype", "max_total_num_tokens",
)  # fmt: skip


class Look:
    """What was found; every text goes through the redactor when it is told."""

    def __init__(self):
        self.redactor = Redactor()
        self.problems = []

    def problem(self, what, sentence):
        """Something that could not be read."""
        self.problems.append([what, sentence])

    def told(self, value, depth=0):
        """A value as it may leave the host: secrets masked, text that JSON can carry, not nested without end."""
        if isinstance(value, str):
            return self.redactor.text(value.encode("utf-8", "replace").decode())
        if isinstance(value, (dict, list)) and depth > DEEPEST:
            return "nested too deeply"
        if isinstance(value, list):
            return [self.told(item, depth + 1) for item in value]
        if isinstance(value, dict):
            return {self.told(str(key)): self.entry(str(key), item, depth) for key, item in value.items()}
        return value

    def entry(self, key, value, depth):
        """A value of a mapping; whole masked where its name says secret."""
        kind = secret_name(key)
        return MASK if value and isinstance(value, str) and kind not in ("", "token") else self.told(value, depth + 1)


# --- the process and its unit


def words(pid, name):
    """The NUL-separated texts of /proc/PID/cmdline or environ."""
    try:
        data = read(f"/proc/{pid}/{name}", PROCESS, whole=False)
    except Failed:
        return []
    return data.decode("utf-8", "replace").rstrip("\0").split("\0") if data else []


def serves(argv):
    """Whether a command line starts a server."""
    if MODULE in argv[:-1] and argv[argv.index(MODULE) - 1] == "-m":
        return True
    names = [os.path.basename(word) for word in argv[:3]]
    names = names[1:] if names and names[0].startswith("python") else names  # a script, as the kernel names it
    return names[:2] == ["sglang", "serve"]


def unit_of(pid):
    """The systemd service that a process belongs to, empty when it belongs to none."""
    try:
        text = read(f"/proc/{pid}/cgroup", 1 << 16, whole=False).decode("utf-8", "replace")
    except Failed:
        return ""
    found = re.findall(r"/([^/\n]+\.service)(?=[/\n]|$)", text)
    return found[-1] if found and not found[-1].startswith("user@") else ""  # that of a login is no unit of a server


def namespace(pid):
    """The PID namespace of a process."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def servers():
    """Processes that start a server and whose parent does not; those of this machine itself before containers'."""
    found = {int(name): words(name, "cmdline") for name in os.listdir("/proc") if name.isdigit()}
    found = {pid: argv for pid, argv in found.items() if serves(argv)}
    roots = [pid for pid in sorted(found) if parent(pid) not in found]
    own = [pid for pid in roots if namespace(pid) == namespace("self")]
    return own or roots


def parent(pid):
    """The parent of a process, 0 when it is gone."""
    try:
        return int(read(f"/proc/{pid}/stat", 4096, whole=False).rpartition(b")")[2].split()[1])
    except (Failed, IndexError, ValueError):
        return 0


def show(unit):
    """What systemd knows of a unit; empty without systemd."""
    names = "LoadState,ActiveState,MainPID,FragmentPath,DropInPaths,User,ExecStart,Environment,EnvironmentFiles"
    lines = run("systemctl", "show", "--property", names, "--", unit).splitlines() if unit else []
    return dict(line.split("=", 1) for line in lines if "=" in line)


def choose(given, look):
    """(pid, unit): of the asked-for unit or process, else of the one that serves. pid 0: it is not running."""
    wanted, found = given["unit"], servers()
    if given["pid"]:
        if not words(given["pid"], "cmdline"):
            raise Failed(f"there is no process {given['pid']} with a command line here (server_inspect_pid)")
        return given["pid"], unit_of(given["pid"])
    of_unit = [pid for pid in found if unit_of(pid) == wanted]
    facts = show(wanted)
    if not of_unit and not found:
        if facts.get("LoadState") == "loaded" and MODULE in facts.get("ExecStart", ""):
            return 0, wanted
        raise Failed(f"no SGLang server runs here, and {wanted} is no unit that would start one (server_inspect_unit)")
    chosen = (of_unit or found)[0]
    others = [str(pid) for pid in found if pid != chosen]
    if others:
        look.problem("several", f"this is process {chosen}, others are {', '.join(others[:8])}")
    if not of_unit and facts.get("LoadState") == "loaded":
        look.problem("other", f"{wanted} is there and serves nothing now: this is process {chosen}")
    return chosen, unit_of(chosen)


def unit_text(facts, look):
    """The unit's file and its drop-ins in systemd's order, as one text."""
    texts = []
    for path in [facts.get("FragmentPath", ""), *facts.get("DropInPaths", "").split()][:MOST_FILES]:
        if not path:
            continue
        try:
            texts.append(read(path, CONFIG >> 4).decode("utf-8", "replace"))
        except Failed as failed:
            look.problem("unit", f"{path} {failed}")
    return "\n".join(texts)


def planned(facts):
    """Command line and variables of a unit that is not running, as systemd tells them."""
    command = re.search(r"argv\[\]=(.*?) ; ", facts.get("ExecStart", ""))
    try:
        pairs = shlex.split(facts.get("Environment", ""))
    except ValueError:
        pairs = []
    return command.group(1).split() if command else [], pairs


# --- what it was told


def flags(argv):
    """Options of a command line, name → the word behind it; the last one counts."""
    found = {}
    for index, word in enumerate(argv):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            behind = argv[index + 1] if index + 1 < len(argv) else ""
            found[name] = value if equals else behind
    return found


def top_level(text):
    """The plain values of a YAML file's first level, enough to find files; the controller reads all of it."""
    found = {}
    for name, value in re.findall(r"(?m)^[\"']?([A-Za-z][\w-]*)[\"']?[ \t]*:[ \t]*([^\n]*)$", text):
        found[name.replace("_", "-")] = plain(value.strip())
    return found


def plain(value):
    """A YAML value of one line as text, without quotes and comments."""
    if value[:1] == "'":
        return value[1:].partition("'")[0]
    if value[:1] == '"':
        try:
            return str(json.JSONDecoder().raw_decode(value)[0])
        except ValueError:
            return value.strip('"')
    return re.sub(r"(^|\s)#.*", "", value).strip()


class Paths:
    """Where a path of the process lies for us: relative to its directory, below its root if that is another."""

    def __init__(self, pid, environment):
        self.environment = environment
        self.base, self.root = "/", ""
        if pid:
            try:
                self.base = os.readlink(f"/proc/{pid}/cwd")
                mine, its = os.stat("/"), os.stat(f"/proc/{pid}/root/")
                if (mine.st_dev, mine.st_ino) != (its.st_dev, its.st_ino):
                    self.root = f"/proc/{pid}/root"
            except OSError:
                pass

    def place(self, path):
        """The path as this program opens it."""
        return inside(self.root + os.path.join(self.base, path))

    def own(self, place):
        """A place as the process itself would name it."""
        return os.path.normpath(place[len(self.root) :])

    def model(self, name, revision=""):
        """The directory of a model: itself, or the snapshot of a repository in the cache of Hugging Face."""
        direct = self.place(name)
        if os.path.isdir(direct) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            return direct
        home = self.environment.get("HF_HOME") or os.path.join(
            self.environment.get("HOME") or "/root", ".cache/huggingface"
        )
        cache = self.environment.get("HF_HUB_CACHE") or os.path.join(home, "hub")
        repository = self.place(os.path.join(cache, "models--" + name.replace("/", "--")))
        wanted = revision or "main"
        with contextlib.suppress(Failed, ValueError):  # a commit needs no reference
            wanted = read(f"{repository}/refs/{wanted}", 256).decode("ascii").strip()
        return f"{repository}/snapshots/{os.path.basename(wanted)}"


def config_of(directory, what, look):
    """config.json of a model, None when it cannot be used: then a problem says so."""
    path = os.path.join(directory, "config.json")
    try:
        return look.told(parsed(read(path, CONFIG)))
    except Failed as failed:
        look.problem(what, f"{path} {failed}")
        return None


def tensors_of(directory, look):
    """Headers of all safetensors files, file → tensors, None when one cannot be used; and all names of files."""
    paths = sorted(glob.glob(os.path.join(glob.escape(directory), "*.safetensors")))
    if not paths or len(paths) > MOST_FILES:
        look.problem("drafter's weights", f"{directory} has {len(paths)} safetensors files, not 1 to {MOST_FILES}")
        return None
    found = {}
    for path in paths:
        try:
            found[os.path.basename(path)] = look.told(header(path))
        except (Failed, OSError) as failed:
            look.problem("drafter's weights", f"{path} {failed}")
            return None
        if sum(map(len, found.values())) > MOST_TENSORS:
            look.problem("drafter's weights", f"{path} and those before it have more than {MOST_TENSORS} tensors")
            return None
    return found


# --- the engine


def interpreter(argv, pid, paths):
    """The Python that runs the server, as its command line names it."""
    word = argv[0] if argv else ""
    if word and "/" not in word:
        places = [os.path.join(item, word) for item in paths.environment.get("PATH", "").split(":") if item]
        word = next((place for place in places if os.access(paths.place(place), os.X_OK)), "")
    if word:
        return os.path.join(paths.base, word)
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def engine(python, paths):
    """Versions of SGLang and NCCL, the plugins beside them, and where Python takes code from, as it is installed there;
    nothing is imported."""
    home = os.path.dirname(os.path.dirname(python))
    lib = f"{glob.escape(home)}/lib/python3*"
    own = [f"{lib}/site-packages", f"{lib}/dist-packages", "/usr/lib/python3/dist-packages"]
    own += ["/usr/local/lib/python3*/dist-packages"] if home == "/usr" else []
    given = [item for item in paths.environment.get("PYTHONPATH", "").split(":") if item.startswith("/")]
    version, nccl, plugins, installs, seen = "", "", [], [], 0
    # earlier places win
    for pattern in [*map(glob.escape, given), *own]:
        for path in sorted(glob.glob(f"{glob.escape(paths.root)}{pattern}/*.dist-info")):
            seen += 1
            name, _, rest = os.path.basename(path)[: -len(".dist-info")].partition("-")
            if name.lower() == "sglang":
                version = version or rest
                site = paths.own(os.path.dirname(path))
                installs.append({"version": rest, "place": site, "altered": altered(path), **source(path, paths)})
            nccl = nccl or (rest if re.fullmatch(r"nvidia_nccl_cu[0-9]+", name) else "")
            if seen <= MOST_PACKAGES and registers(path):
                plugins.append(f"{name} {rest}")
    return {
        "python": python,
        "version": version,
        "nccl": nccl,
        "plugins": plugins[:MOST_FILES],
        "installs": installs[:MOST_FILES],
        "paths": strays(own, given, paths)[:MOST_FILES],
    }


def source(path, paths):
    """Where the code of an editable installation lies, and how many of its tracked files were changed; else nothing."""
    place = installed.editable(pathlib.Path(path))
    if not place:
        return {"editable": "", "changed": 0}
    # no optional locks: git would otherwise refresh its index, and nothing may change here
    status = run(
        *("git", "--no-optional-locks", "-c", f"safe.directory={paths.place(place)}", "-C", paths.place(place)),
        *("status", "--porcelain", "--untracked-files=no"),
    )
    return {"editable": place, "changed": len(status.splitlines())}


def altered(path):
    """Files of SGLang that are not as the RECORD of its distribution says, as [path, what]; none without a RECORD."""
    info = pathlib.Path(path)
    try:
        return installed.altered(info.parent, info, "sglang")[:MOST_FILES]
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        return [[f"{info.name}/RECORD", "unreadable"]]


def strays(own, given, paths):
    """Places of code besides the interpreter's own, as [place, why]: of PYTHONPATH, what `pivot.engines.installed`
    finds beside the packages, a directory sglang where the server was started, which -m takes before all others."""
    found = [[item, "PYTHONPATH"] for item in given]
    for pattern in own:
        for site in sorted(glob.glob(f"{glob.escape(paths.root)}{pattern}")):
            for what, why in installed.elsewhere(pathlib.Path(site)):
                if why == "editable installation of sglang" or (paths.own(site).startswith("/usr/") and what[0] != "/"):
                    continue  # told with the installation; a distribution's packages have no RECORD to belong to
                found.append([what, why if " " in why else f"{paths.own(site)}/{why}"])
    if os.path.isfile(os.path.join(paths.place("sglang"), "__init__.py")):
        found.append([os.path.join(paths.base, "sglang"), "the working directory"])
    return found


def card():
    """MiB of the smallest card, 0 where no NVIDIA driver says it."""
    sizes = run("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits").split()
    return min((int(size) for size in sizes if re.fullmatch(r"[0-9]{1,9}", size)), default=0)


def content(directory):
    """Names of a model's files, and the bytes of its safetensors files; nothing is opened."""
    names, size = [], 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if not entry.is_file():
                    continue
                names.append(entry.name)
                size += entry.stat().st_size if entry.name.endswith(".safetensors") else 0
    except OSError:
        return {"files": [], "bytes": 0}
    return {"files": sorted(names)[: 4 * MOST_FILES], "bytes": size}


def registers(path):
    """Whether a distribution registers plugins of SGLang."""
    try:
        return b"[sglang." in read(f"{path}/entry_points.txt", 1 << 16, whole=False)
    except Failed:
        return False


def server_info(settings, look):
    """What the running server says about itself, the shown part; asked with the key of its own configuration."""
    host = settings.get("host") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.get('port') or 30000}/server_info"
    try:
        request = urllib.request.Request(url)
        if settings.get("api-key"):
            request.add_unredirected_header("Authorization", f"Bearer {settings['api-key']}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as answer:
            data = parsed(answer.read(ANSWER))
    except (OSError, ValueError, http.client.HTTPException, Failed) as error:
        look.problem("server_info", f"{url} did not answer: {look.told(str(getattr(error, 'reason', error)))}")
        return None
    if not isinstance(data, dict):
        look.problem("server_info", f"{url} answered no JSON object")
        return None
    return look.told({name: data[name] for name in ANSWERED if name in data})


def learn(look, argv, environment, text):
    """Take every secret of the server's settings as known, before anything is told."""
    given = flags(argv)
    known = [value for name, value in given.items() if secret_name(name)]
    known += [value for name, value in environment.items() if secret_name(name) == "sure"]
    known += [value for name, value in environment.items() if secret_name(name) == "token" and len(value) >= 8]
    look.redactor.learn([*known, *secret_values(text)])


def config_file(argv, paths, look):
    """Path and text of the file that --config names."""
    path = flags(argv).get("config", "")
    if not path:
        return "", ""
    try:
        data = read(paths.place(path), CONFIG >> 4)
        return path, data.decode("utf-8")
    except Failed as failed:
        look.problem("config", f"{path} {failed}")
    except UnicodeDecodeError:
        look.problem("config", f"{path} is not UTF-8")
    return path, ""


def inspect(given):
    """All of it."""
    look = Look()
    pid, unit = choose(given, look)
    facts = show(unit)
    argv, pairs = (words(pid, "cmdline"), words(pid, "environ")) if pid else planned(facts)
    if pid and not pairs:
        look.problem("environment", f"the environment of process {pid} cannot be read: connect as root")
    environment = dict(item.split("=", 1) for item in pairs if "=" in item)
    paths = Paths(pid, environment)
    config, text = config_file(argv, paths, look)
    unit_file = unit_text(facts, look)
    learn(look, argv, environment, f"{text}\n{unit_file}")
    settings = {**top_level(text), **flags(argv)}
    target = settings.get("model-path") or settings.get("model") or ""
    drafter = settings.get("speculative-draft-model-path") or settings.get("speculative-draft-model") or ""
    result = {
        "unit": {
            "name": unit,
            "text": look.redactor.text(unit_file),
            **{name: facts.get(name, "") for name in ("FragmentPath", "DropInPaths", "User")},
        },
        "pid": pid,
        "argv": look.redactor.arguments(argv),
        "config": {"path": config, "text": look.redactor.text(text)},
        "environment": look.redactor.environment(
            {name: value for name, value in environment.items() if name.startswith(VARIABLES)}
        ),
        "engine": engine(interpreter(argv, pid, paths), paths),
        "target": None,
        "drafter": None,
        "server_info": server_info(settings, look) if pid else None,
        "card_mib": card(),
        "capabilities": sorted(set(run("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()))[:8],
    }
    if target:
        directory = paths.model(target, settings.get("revision", ""))
        result["target"] = {
            "name": target,
            "path": paths.own(directory),
            "config": config_of(directory, "target's config", look),
            **content(directory),
        }
    else:
        look.problem("target", "no model-path is on the command line or in the file of --config")
    if drafter:
        directory = paths.model(drafter, settings.get("speculative-draft-model-revision", ""))
        result["drafter"] = {
            "name": drafter,
            "path": paths.own(directory),
            "config": config_of(directory, "drafter's config", look),
            "tensors": tensors_of(directory, look),
            **content(directory),
        }
    return {**look.told({name: result[name] for name in result}), "problems": look.told(look.problems)}


def main():
    """Print what was found, or why there is nothing."""
    try:
        result, code = inspect(json.loads(sys.argv[1])), 0
    except Failed as failed:
        result, code = {"failed": str(failed)}, FAILED
    print(json.dumps(result))
    return code


if __name__ == "__main__":
    sys.exit(main())
