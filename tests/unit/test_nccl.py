"""NCCL's variables: names, values, relations and reasons; every expectation from NVIDIA's manual, by hand."""

import random
from pathlib import Path

import pytest
import yaml

from pivot.findings import Severity
from pivot.serving import nccl

ROOT = Path(__file__).parents[2]


def check(environment, **changes):
    values = {"reasons": frozenset(nccl.table()), **changes}
    return nccl.check(nccl.Settings(subject="llm01", environment=environment, **values))


def found(environment, **changes):
    return [f"{finding.code} {finding.severity}" for finding in check(environment, **changes)]


def text(environment, **changes):
    return " ".join(f"{finding.message} | {finding.fix}" for finding in check(environment, **changes))


# --- the table


def test_the_table_is_well_formed():
    kinds = {"text", "switch", "integer", "number", "choice", "items", "selection", "level"}
    for name, known in nccl.table().items():
        assert name.startswith("NCCL_")
        assert known["kind"] in kinds, name
        assert ("one_of" in known) or known["kind"] not in ("choice", "items", "selection", "level"), name
        assert set(known) <= {
            "kind", "one_of", "min", "max", "since", "until", "values_since", "debugging", "undocumented", "exact",
        }, name  # fmt: skip
        for version in (known.get("since"), known.get("until"), *(known.get("values_since") or {}).values()):
            assert version is None or nccl._order(version) > (2,), name


@pytest.mark.parametrize("name", ["P2P_DISABLE", "P2P_LEVEL", "ALGO", "PROTO", "IB_DISABLE", "CUMEM_ENABLE"])
def test_what_is_for_debugging(name):
    assert nccl.table()[f"NCCL_{name}"]["debugging"]


@pytest.mark.parametrize("name", ["SOCKET_IFNAME", "DEBUG", "DEBUG_FILE", "TOPO_FILE", "IGNORE_CPU_AFFINITY"])
def test_what_may_stay(name):
    assert not nccl.table()[f"NCCL_{name}"].get("debugging")


# --- names


@pytest.mark.parametrize(
    ("name", "severity", "said"),
    [
        ("NCCL_P2P_DISABEL", "error", "did you mean NCCL_P2P_DISABLE?"),
        ("NCCL_MIN_NCHANNEL", "error", "did you mean NCCL_MIN_NCHANNELS?"),
        ("NCCL_BUFFERSIZE", "error", "did you mean NCCL_BUFFSIZE?"),
        ("NCCL_QUITE_ANOTHER_THING", "warning", "correct the name, or remove it"),
        # alike, but another word: NCCL may well read it
        ("NCCL_P2P_XYZ_CHUNKSIZE", "warning", "_CHUNKSIZE?"),
        ("NCCL_AB_BUFFSIZE", "warning", "did you mean NCCL_BUFFSIZE?"),
    ],
)
def test_unknown_names(name, severity, said):
    assert found({name: "1"}) == [f"NCCL-UNKNOWN {severity}"]
    assert said in text({name: "1"})


def test_other_variables_are_none_of_its_business():
    other = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "x", "SGLANG_NCCL_SO_PATH": "x", "nccl_debug": "x", 5: "x"}
    assert found(other) == []
    # a type is found by pivot.serving.launch
    assert found({"NCCL_P2P_DISABLE": True, "NCCL_ALGO": None}) == []


# --- values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("P2P_DISABLE", "0"),
        ("P2P_DISABLE", "1"),
        ("P2P_LEVEL", "SYS"),
        ("NET_GDR_LEVEL", "PHB"),
        ("SOCKET_FAMILY", "AF_INET6"),
        ("LAUNCH_MODE", "group"),
        ("BUFFSIZE", "67108864"),
        ("BUFFSIZE", "0x4000000"),
        ("MIN_NCHANNELS", "8 "),  # of white space another check speaks, and NCCL reads 8
        ("NTHREADS", "512"),
        ("MIN_NCHANNELS", "32"),
        ("PROTO", "LL"),
        ("PROTO", "^LL128"),
        ("PROTO", "ll,simple"),
        ("ALGO", "Ring"),
        ("ALGO", "^tree,nvls"),
        ("ALGO", "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring"),
        ("ALGO", "allreduce:^tree"),
        ("DEBUG", "warn"),
        ("DEBUG_SUBSYS", "INIT,ENV,^GRAPH"),
        ("DEBUG_TIMESTAMP_LEVELS", ""),
        ("DEBUG_TIMESTAMP_LEVELS", "^TRACE"),
        ("IB_GID_INDEX", "-1"),
        ("NVLS_ENABLE", "2"),
        ("RAS_TIMEOUT_FACTOR", "0.5"),
        ("SOCKET_IFNAME", "^=docker0"),
        ("GRAPH_FILE", "/etc/nccl/graph.xml"),
        ("IB_RAIL_POLICY", "CX9:FLIP"),
    ],
)
def test_right_values(name, value):
    assert found({f"NCCL_{name}": value}) == []


@pytest.mark.parametrize(
    ("name", "value", "expected", "said"),
    [
        # N-07: numbers of a level
        ("P2P_LEVEL", "0", "NCCL-LEVEL warning", "write the name: LOC"),
        ("P2P_LEVEL", "3", "NCCL-LEVEL warning", "write the name: PHB"),
        ("P2P_LEVEL", "5", "NCCL-LEVEL warning", "write the name: SYS"),
        ("NET_GDR_LEVEL", "2", "NCCL-LEVEL warning", "write the name: PXB"),
        ("P2P_LEVEL", "SYSTEM", "NCCL-VALUE error", "did you mean SYS?"),
        ("P2P_LEVEL", "-1", "NCCL-VALUE error", "LOC, NVL, PIX, PXB, PHB, SYS"),
        # NCCL compares these with strcmp
        ("P2P_LEVEL", "sys", "NCCL-VALUE error", "silently ignores | NCCL reads it only in capitals: write SYS"),
        ("P2P_LEVEL", "Nvl", "NCCL-VALUE error", "only in capitals: write NVL"),
        ("NET_GDR_LEVEL", "phb", "NCCL-VALUE error", "only in capitals: write PHB"),
        ("SOCKET_FAMILY", "af_inet", "NCCL-VALUE error", "only in capitals: write AF_INET"),
        ("IB_ADDR_FAMILY", "Af_inet6", "NCCL-VALUE error", "only in capitals: write AF_INET6"),
        # B07: what YAML or a habit makes of a switch
        ("IB_DISABLE", "yes", "NCCL-VALUE error", "silently reads as 0 | write 0 or 1"),
        ("IB_DISABLE", "true", "NCCL-VALUE error", "silently reads as 0"),
        ("P2P_DISABLE", "", "NCCL-VALUE error", "silently reads as 0"),
        ("P2P_DISABLE", "2", "NCCL-VALUE error", "no documented meaning"),
        ("BUFFSIZE", "64M", "NCCL-VALUE error", "silently reads as 64 "),
        ("BUFFSIZE", "9" * 19, "NCCL-VALUE error", "silently reads as its default"),
        ("BUFFSIZE", "0", "NCCL-VALUE warning", "1 or more"),
        ("NTHREADS", "500", "NCCL-VALUE error", "write 64 or 128 or 256 or 512"),
        ("MIN_NCHANNELS", "64", "NCCL-VALUE warning", "from 1 to 32"),
        ("MAX_CTAS", "65", "NCCL-VALUE warning", "from 1 to 64"),
        ("IB_TIMEOUT", "32", "NCCL-VALUE warning", "from 0 to 31"),
        ("PROTO", "LL64", "NCCL-VALUE error", "write one of LL, LL128, Simple"),
        ("PROTO", "LL,", "NCCL-VALUE error", "has ''"),
        ("ALGO", "Rings", "NCCL-VALUE error", "did you mean Ring?"),
        ("ALGO", "allreduce:tre", "NCCL-VALUE error", "did you mean Tree?"),
        ("DEBUG", "DEBUG", "NCCL-VALUE error", "VERSION, WARN, ATTN, INFO, TRACE"),
        ("DEBUG_SUBSYS", "INIT,P2PX", "NCCL-VALUE error", "did you mean P2P?"),
        ("RAS_TIMEOUT_FACTOR", "0", "NCCL-VALUE error", "a number above 0"),
    ],
)
def test_wrong_values(name, value, expected, said):
    assert found({f"NCCL_{name}": value}) == [expected]
    assert said in text({f"NCCL_{name}": value})


def test_numbers_are_read_as_c_reads_them():
    assert [nccl._parsed(value) for value in ("8", "0x10", "010", "-1", "+4", "08")] == [8, 16, 8, -1, 4, 0]


# --- versions


def test_what_this_nccl_does_not_read_yet_or_any_more():
    assert found({"NCCL_IB_PKEY_VALUE": "0x8111"}, version="2.30.7") == ["NCCL-AGE warning"]
    assert "needs NCCL 2.31, but the engine's lock brings 2.30.7" in text({"NCCL_IB_PKEY_VALUE": "1"}, version="2.30.7")
    assert found({"NCCL_DEBUG": "ATTN"}, version="2.30.7") == ["NCCL-AGE warning"]
    assert found({"NCCL_DEBUG": "ATTN"}, version="2.32.1") == []
    assert found({"NCCL_IB_PKEY_VALUE": "1"}, version=None) == []
    assert found({"NCCL_RMA_PLUGIN": "none"}, version="2.30.7") == []
    assert found({"NCCL_RMA_PLUGIN": "none"}, version="2.30") == ["NCCL-AGE warning"]
    # a key is in no sentence
    assert "key" not in text(
        {"NCCL_PSK": "a-key-of-this-test-that-is-made-up", "NCCL_IB_PKEY_VALUE": "1"}, version="2.1"
    )
    assert found({"NCCL_LL_THRESHOLD": "16384"}) == ["NCCL-AGE warning"]
    assert "no NCCL since 2.5" in text({"NCCL_LL_THRESHOLD": "16384"})


def test_the_version_of_a_lock():
    assert nccl.locked_version((ROOT / "requirements/engine/cuda-py312.lock").read_text()) == "2.30.7"
    assert nccl.locked_version("torch==2.9.1 --hash=sha256:00\nnccl4py==0.6.0\n") is None


# --- relations


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "8"}, ["NCCL-CHANNELS error"]),
        ({"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"}, []),
        ({"NCCL_MIN_NCHANNELS": "16"}, []),
        ({"NCCL_MIN_CTAS": "0x20", "NCCL_MAX_CTAS": "16"}, ["NCCL-CHANNELS error"]),
        ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, ["NCCL-SOCKETS error"]),
        ({"NCCL_SOCKET_NTHREADS": "8", "NCCL_NSOCKS_PERTHREAD": "8"}, []),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, ["NCCL-P2P warning"]),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"}, []),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p"}, ["NCCL-DEBUG-FILE warning"]),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p", "NCCL_DEBUG": "VERSION"}, ["NCCL-DEBUG-FILE warning"]),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p", "NCCL_DEBUG": "INFO"}, []),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.log", "NCCL_DEBUG": "INFO"}, ["NCCL-DEBUG-FILE warning"]),
        ({"NCCL_DEBUG_FILE": "/dev/stderr", "NCCL_DEBUG": "INFO"}, []),
        ({"NCCL_DEBUG_FILE": "~/nccl.%p", "NCCL_DEBUG": "INFO"}, ["NCCL-DEBUG-FILE error"]),
        ({"NCCL_PROTO": "LL,LL128"}, ["NCCL-LL128 warning"]),
        ({"NCCL_PROTO": "allreduce:LL128"}, ["NCCL-LL128 warning"]),
        ({"NCCL_PROTO": "^LL128"}, []),
        # launch_rules has these two
        ({"NCCL_DEBUG": "TRACE"}, []),
        ({"NCCL_P2P_DISABLE": "1"}, []),
    ],
)
def test_relations(environment, expected):
    assert found(environment) == expected


def test_peers_are_off_by_their_level_too():
    assert found({"NCCL_P2P_LEVEL": "LOC"}, custom_all_reduce=True) == ["NCCL-P2P error"]
    assert found({"NCCL_P2P_LEVEL": "LOC"}, custom_all_reduce=False) == []
    assert found({"NCCL_P2P_LEVEL": "0"}, custom_all_reduce=True) == ["NCCL-LEVEL warning", "NCCL-P2P error"]
    assert found({"NCCL_P2P_LEVEL": "SYS"}, custom_all_reduce=True) == []
    assert found({"NCCL_P2P_LEVEL": "loc"}, custom_all_reduce=True) == ["NCCL-VALUE error"]  # NCCL ignores it


def test_several_faults_are_one_list():
    environment = {
        "NCCL_P2P_LEVEL": "4",
        "NCCL_IB_DISABEL": "1",
        "NCCL_ALGO": "Rings",
        "NCCL_MIN_NCHANNELS": "9",
        "NCCL_MAX_NCHANNELS": "3",
    }
    assert found(environment, reasons=frozenset()) == [
        "NCCL-VALUE error",
        "NCCL-UNKNOWN error",
        "NCCL-LEVEL warning",
        "NCCL-CHANNELS error",
        "NCCL-DEBUGGING warning",
    ]


# --- reasons


def test_what_is_for_debugging_needs_a_reason():
    environment = {"NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": "SYS", "NCCL_DEBUG": "WARN"}
    assert found(environment, reasons=frozenset()) == ["NCCL-DEBUGGING warning"]
    assert "NVIDIA counts NCCL_P2P_LEVEL, NCCL_PROTO among" in text(environment, reasons=frozenset())
    assert "NVIDIA counts NCCL_PROTO among" in text(environment, reasons=frozenset({"NCCL_P2P_LEVEL"}))
    assert found(environment, reasons=frozenset({"NCCL_P2P_LEVEL", "NCCL_PROTO"})) == []
    assert found({"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"}, reasons=frozenset()) == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("# misdetected bandwidth\nNCCL_PROTO: LL", {"NCCL_PROTO"}),
        ("NCCL_PROTO: LL  # misdetected bandwidth", {"NCCL_PROTO"}),
        ("  # many channels\n  NCCL_MIN_NCHANNELS: '32'\n  NCCL_MAX_NCHANNELS: '64'", {"MIN", "MAX"}),
        ("NCCL_PROTO: LL", set()),
        ("#\nNCCL_PROTO: LL", set()),
        ("# NCCL_PROTO: Simple\nNCCL_PROTO: LL", set()),
        ("# about another\nOTHER: 1\nNCCL_PROTO: LL", set()),
        ("# about a chapter\n\nNCCL_PROTO: LL", set()),
        # a reason in one place does not excuse the other
        ("# here it is\nNCCL_PROTO: LL\nother:\n  NCCL_PROTO: LL", set()),
    ],
)
def test_comments_are_reasons(lines, expected):
    names = {f"NCCL_{name}_NCHANNELS" if name in ("MIN", "MAX") else name for name in expected}
    assert nccl.commented([lines]) == names


@pytest.mark.parametrize("profile", ["latency", "throughput", "p2p-fallback"])
def test_the_example_is_clean(profile):
    files = (ROOT / "inventory/example").rglob("*.yml")
    server = yaml.safe_load((ROOT / "inventory/example/group_vars/inference/server.yml").read_text())
    own = server["sglang_server_environment"]
    environment = nccl.environment(profile, own)
    reasons = nccl.commented(path.read_text() for path in files) | nccl.profile_reasons(profile, own)
    assert found(environment, reasons=reasons, version="2.30.7", custom_all_reduce=False) == []
    # and would not be without its reasons
    assert found(environment, reasons=frozenset()) == ["NCCL-DEBUGGING warning"]


def test_the_lab_is_clean():
    server = yaml.safe_load((ROOT / "inventory/lab/group_vars/inference/server.yml").read_text())
    assert found(server["sglang_server_environment"], reasons=frozenset(), custom_all_reduce=True) == []


def test_random_values_give_findings_and_no_traceback():
    rng = random.Random(7)  # noqa: S311 - the same in every run
    junk = ["", ":", ";", "^", ",", "^,^", "9" * 5000, "0x", "-", "é", "\ud800", "x" * 9999, "1e9", "a:b:c;;", "0b1"]
    for _ in range(3000):
        environment = {rng.choice([*nccl.table(), "NCCL_", "NCCL_X"]): rng.choice(junk) for _ in range(3)}
        for finding in check(environment, version=rng.choice([None, "2.30.7"]), reasons=frozenset()):
            assert finding.message and finding.fix and isinstance(finding.severity, Severity)
            assert len(finding.message) < 400


# --- profiles


def test_profiles_are_data_with_sources_and_the_board():
    text = yaml.safe_load(nccl.PROFILES.read_text())
    assert list(text["profiles"]) == ["latency", "throughput", "p2p-fallback"]
    for name, profile in text["profiles"].items():
        assert {"for", "board", "reported", "variables"} == profile.keys(), name
        assert all(item["source"] in text["sources"] for item in profile["reported"]), name
        for variable, entry in profile["variables"].items():
            assert variable in nccl.table(), variable
            assert isinstance(entry["value"], str), variable
            assert entry["source"] in text["sources"], variable
            assert not nccl.table()[variable].get("debugging") or entry["reason"], variable


@pytest.mark.parametrize("name", ["latency", "throughput", "p2p-fallback"])
def test_profiles_are_clean_and_their_reasons_count(name):
    variables = nccl.environment(name, {})
    assert variables
    reasons = nccl.profile_reasons(name, {})
    assert nccl.check(nccl.Settings(subject="h", environment=variables, reasons=reasons, version="2.30.7")) == []
    bare = nccl.check(nccl.Settings(subject="h", environment=variables, version="2.30.7"))
    assert [finding.code for finding in bare] == ["NCCL-DEBUGGING"]


def test_a_profile_is_overruled_variable_by_variable():
    own = {"NCCL_PROTO": "Simple", "NCCL_IB_DISABLE": None, "NCCL_DEBUG": "WARN"}
    assert nccl.environment("latency", own) == {
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MIN_NCHANNELS": "8",
        "NCCL_PROTO": "Simple",
        "NCCL_ALLOC_P2P_NET_LL_BUFFERS": "1",
        "NCCL_DEBUG": "WARN",
    }
    # what the host sets itself needs a reason of its own
    assert "NCCL_PROTO" not in nccl.profile_reasons("latency", own)
    assert "NCCL_P2P_LEVEL" in nccl.profile_reasons("latency", own)


def test_without_a_profile_nothing_is_added_or_taken_away():
    for profile in ("none", None, "", "no-such", ["latency"]):
        assert nccl.environment(profile, {"NCCL_DEBUG": None}) == {"NCCL_DEBUG": None}
        assert nccl.profile_reasons(profile, {}) == frozenset()


def test_the_role_offers_what_is_data():
    specs = yaml.safe_load((ROOT / "roles/sglang_server/meta/argument_specs.yml").read_text())["argument_specs"]
    assert specs["main"]["options"]["sglang_server_nccl_profile"]["choices"] == ["none", *nccl.profiles()]
