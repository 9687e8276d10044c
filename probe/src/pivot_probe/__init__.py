"""Records which hidden states an EAGLE-3 target hands over and what its drafter receives.

An SGLang plugin (entry-point group ``sglang.srt.plugins``). It does nothing unless ``PIVOT_PROBE_DIR`` names a
directory that exists; see README.md for the records.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys

from pivot_probe.record import Recorder
from pivot_probe.settings import Settings

__version__ = "0.2.0"

logger = logging.getLogger(__name__)


def register() -> None:
    """What SGLang calls in each of its processes: install the hooks, or do nothing and say why in the log.

    It raises nothing: SGLang would log an exception with its traceback and serve on, but a probe that cannot work
    has no business being that loud.
    """
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        logger.warning("pivot_probe: %s; nothing is recorded", error)
        return
    if settings is None:
        return
    if _is_launcher():
        return  # it runs no model, and resolving the hook targets would import all of them
    from pivot_probe.hooks import install  # noqa: PLC0415 - imports torch and SGLang, only when recording

    try:
        recorder = Recorder(settings)
    except OSError as error:
        logger.warning("pivot_probe: cannot write to PIVOT_PROBE_DIR (%s); nothing is recorded", error)
        return
    install(recorder, __version__)


def _is_launcher() -> bool:
    """True in the process that parses the command line and starts the others."""
    if multiprocessing.parent_process() is not None:
        return False
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return main is not None and main.name.split(".")[0] == "sglang"
