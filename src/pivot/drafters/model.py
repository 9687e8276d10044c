"""The drafter contract: which layers of the target an EAGLE-3 drafter will really be fed, and whether it fits at all.

Pure: four things decide (two configs, the drafter's safetensors header, the launch settings) and the engine's
description says how the engine reads them. They are read in `pivot.drafters.pair`; what is wrong with them is in
`pivot.drafters.pair_ids` and `pivot.drafters.pair_weights`. A layer is named by its INPUT: the input of layer 3 is the
output of layer 2, the input of layer 0 is the embedding.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from pivot.drafters import pair_ids, pair_weights
from pivot.drafters.configs import short
from pivot.drafters.layers import as_outputs, numbers
from pivot.drafters.pair import ERROR, WARNING, Look, Pair, ids_to_write, words
from pivot.engines import descriptions
from pivot.findings import Finding, Severity


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The answer. line: which layers, for people; notes: what is worth knowing and no finding; layers: the layer
    inputs that reach the drafter, ascending, None when not known."""

    line: str
    notes: tuple[str, ...]
    layers: tuple[int, ...] | None
    findings: tuple[Finding, ...]

    def text(self) -> str:
        """The line and the notes, for a terminal; findings are rendered elsewhere."""
        return "\n".join([self.line, *(f"  {note}" for note in self.notes)])


def check(pair: Pair) -> Verdict:
    """All findings about a pair at once, and the line that says which layers reach the drafter."""
    look = Look(pair)
    kept = look.kept()
    if look.whole.data and look.drafter.data:
        for part in PARTS:
            part(look)
    return Verdict(_line(look, kept), tuple(look.notes), kept, tuple(look.found.items))


def _line(look: Look, kept: tuple[int, ...] | None) -> str:
    """``ids [3, 5, 7] on 0.5.23 → inputs of layers 3, 5, 7 (outputs of 2, 4, 6); contract: …; agrees``."""
    ids, contract = look.ids, look.contract
    start = f"ids {ids}" if ids is not None else "no ids" if look.readable else "ids that cannot be used"
    line = f"{start} on {look.pair.version} → "
    if reason := look.nothing_kept():
        line += f"no states reach the drafter, as {reason}"
    elif kept is None:
        line += "layers not known"
    else:
        if ids is None:
            line += "its default, "
        elif look.rule == "plus_one_if_first_is_1" and ids[0] == 1:
            line += "all raised by 1, as the first is 1: "
        line += f"inputs of layers {numbers(kept)} (outputs of {as_outputs(kept)})"
    if contract is None:
        return f"{line}; no contract to compare with"
    line += f"; contract: {contract}"
    if contract.inputs is None or kept is None:
        return f"{line}; not compared"
    return f"{line}; agrees" if contract.inputs == kept else f"{line}; DISAGREES; {ids_to_write(look, contract.inputs)}"


def _intended(look: Look) -> None:
    """The target that the drafter was made for, and revisions that can move."""
    contract, served = look.contract, look.pair.served
    if contract and contract.target and served and contract.target != served:
        message = f"the drafter was made for {contract.target}, but {served} is served"
        look.found.add("TARGET", ERROR, message, "pin the drafter of this target, or correct the contract")
    for repository, revision in sorted(look.pair.revisions.items()):
        if not isinstance(revision, str) or not re.fullmatch(r"[0-9a-f]{7,64}", revision):
            message = f"the revision of {repository} is {short(revision)}, which can come to mean other files"
            look.found.add("UNPINNED", WARNING, message, "pin a commit; drafters are republished in place")


def _known_faults(look: Look) -> None:
    """What is known of this version."""
    for fault in descriptions.faults(look.pair.version, words(look)):
        message = f"SGLang {look.pair.version}: {fault['message']} ({fault['basis']}: {fault['source']})"
        look.found.add("ENGINE-FAULT", Severity(fault["severity"]), message, fault["fix"])


PARTS: tuple[Callable[[Look], None], ...] = (*pair_ids.PARTS, *pair_weights.PARTS, _intended, _known_faults)
