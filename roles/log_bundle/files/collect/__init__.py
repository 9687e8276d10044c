"""The collector, which reaches a host as one program with `pivot.bundles.redact` (`pivot.program`). Python 3.9."""
