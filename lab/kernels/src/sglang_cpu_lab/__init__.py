"""SGLang plugin of the lab: makes the CPU attention backend that EAGLE accepts available without AMX."""

from __future__ import annotations

import os

from sglang_cpu_lab import collector


def activate() -> None:
    """Entry point `cpu_lab` of the group `sglang.srt.plugins`; SGLang calls it once in every process.

    Only the platform fact `has_amx` is declared: it keeps the `intel_amx` attention backend, whose two operators
    come from this distribution's `sgl_kernel`. `cpu_has_amx_support()` stays false, so the layers take SGLang's
    own PyTorch code. Without SGLANG_USE_CPU_ENGINE=1 it raises RuntimeError, which SGLang logs, and changes nothing.
    """
    collector.resume()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise RuntimeError(
            "the plugin cpu_lab is for the lab's CPU engine alone: set SGLANG_USE_CPU_ENGINE=1,"
            " or uninstall sglang-cpu-lab from this host"
        )
    # SGLang offers no public way to override a platform fact.
    from sglang.srt import runtime_context  # noqa: PLC0415 - only exists, and only loads fast, inside an engine

    runtime_context._PLATFORM._install(has_amx=True)
