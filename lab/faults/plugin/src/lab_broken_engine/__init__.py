"""LAB ONLY: makes SGLang hand the wrong hidden states to an EAGLE-3 drafter, as a broken engine would.

An SGLang plugin (entry-point group ``sglang.srt.plugins``). It does nothing unless ``LAB_BROKEN_ENGINE`` holds a
fault as JSON; see `lab_broken_engine.faults.Fault` for what can be asked.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)
VARIABLE = "LAB_BROKEN_ENGINE"


def register() -> None:
    """What SGLang calls in each of its processes: break what is asked for, loudly, or do nothing.

    A fault that cannot be read is an error on purpose: a bench row must never run unbroken by accident.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    from lab_broken_engine.faults import Fault, install  # noqa: PLC0415 - imports torch, only when asked to break

    fault = Fault.from_json(text)
    logger.warning("lab_broken_engine: THIS ENGINE IS BROKEN ON PURPOSE (%s); results are worthless", fault)
    install(fault)
