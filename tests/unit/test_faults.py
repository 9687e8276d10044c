"""docs/faults.md: complete, and as the source is."""

import ast
import re
from pathlib import Path

import pytest

from pivot import faults

ROOT = Path(__file__).parents[2]
ROWS = {row.code: row for row in faults.sites()}


def test_the_page_is_as_the_source_is():
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    assert page == faults.page(), "stale: pivot faults > docs/faults.md"


def test_no_code_of_the_source_is_missed():
    """Every text of the source that looks like a code of a known family is one that was collected."""
    families = {key.split("-", 1)[0] for key in faults.FAMILIES}
    seen = set()
    for path in [*(ROOT / "src/pivot").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]:
        if path.name != "faults.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    seen.add(node.value)
    codes = {text for text in seen if re.fullmatch(r"[A-Z]+(-[A-Z0-9]+)+", text) and text.split("-")[0] in families}
    # names of NCCL's and SGLang's variables have underscores, so nothing else looks like this
    assert {code for code in codes if not {code, f"DRAFTER-{code}"} & faults.codes()} == set()
    assert len(codes) > 100


@pytest.mark.parametrize(
    ("code", "severities", "message", "fix"),
    [
        ("HOST-NONE", ("error",), "no host is in the group inference, so there is nothing to deploy", None),
        ("LAUNCH-PIPELINE", ("error",), None, "write pp-size: 1, or serve without a drafter"),
        # a function that wraps Finding and adds the family
        ("DRAFTER-NO-AUX", ("error",), None, "write use_aux_hidden_state: true"),
        # a tuple without a severity, and one with a pattern before the code
        ("ENV-NAME", ("error",), None, "use capitals, digits and underscores"),
        ("PVE-PRIVILEGE", ("error",), "VM.Monitor no longer exists in Proxmox VE 9", None),
        # two severities, by a choice
        ("NCCL-UNKNOWN", ("error", "warning"), None, None),
        ("HOST-SHM-LEFTOVERS", ("info",), None, None),
        # named arguments, and a code that is one of two
        ("WEIGHTS-RSYNC", ("error",), "the host has no rsync, which receives the files", None),
        ("WIRE-UNSTABLE", ("error",), None, None),
        ("WIRE-UNKNOWN", ("error",), None, None),
    ],
)
def test_what_is_read(code, severities, message, fix):
    site = ROWS[code]
    assert site.severities == severities
    assert message is None or site.message == message
    assert fix is None or site.fix == fix


def test_a_family_without_a_title_is_refused():
    assert faults.family("HOST-COLLISION") == "HOST-NONE"
    assert faults.family("HOST-IDMAP") == "HOST"
    with pytest.raises(KeyError, match="NEW-THING: give its family a title"):
        faults.family("NEW-THING")


def test_what_is_worked_out_is_still_in_the_source():
    text = "".join(
        (ROOT / f"src/pivot/{name}.py").read_text(encoding="utf-8")
        for name in ("inventory/inventory", "drafters/model")
    )
    for code in faults.WORKED_OUT:
        assert f'"{code.removeprefix("DRAFTER-")}"' in text
        assert code not in ROWS
