"""Records of the probe as a test writes them: states that are told apart, forward by forward."""

import base64
import json
import random
import struct
from collections.abc import Sequence
from typing import Any

from pivot.wirings import wiring
from pivot.wirings.records import parse

LAYERS = 6
Row = list[float]


def row(*seed: object) -> Row:
    """One row's fingerprint, told from all others; rows of neighbouring layers lie close together."""
    layer, *place = seed
    base = random.Random(str(place))  # noqa: S311 - no secret is made of it
    own = random.Random(str(seed))  # noqa: S311 - as above
    return [base.gauss(0, 1) + 0.3 * int(str(layer)) * own.gauss(0, 1) for _ in range(16)]


def printed(rows: Sequence[Row]) -> str:
    return base64.b64encode(b"".join(struct.pack("<16f", *numbers) for numbers in rows)).decode()


class Run:
    """Records of schema 2, forward by forward. A state depends on layer, request, position and on the drafted token."""

    def __init__(self, capture: Sequence[int] = (2, 3, 5), rank: int = 0) -> None:
        self.capture, self.rank, self.n = list(capture), rank, 1
        self.lines: list[dict[str, Any]] = [
            {"point": "header", "n": 1, "schema": 2, "sglang": "0.5.23", "hooks": {}, "probe": "0.2.0"}
        ]

    def add(self, point: str, **fields: Any) -> int:
        self.n += 1
        self.lines.append({"point": point, "n": self.n, **fields})
        return self.n

    def forward(
        self, mode: str, places: Sequence[tuple[str, Sequence[int]]], fed: Any = None, packed: Any = None
    ) -> int:
        """One forward. places: request → its positions; fed, packed: (slice, row number, request, position) → row."""
        keys = [(request, position) for request, positions in places for position in positions]

        def states(layer: int) -> list[Row]:
            return [row(layer, *key, self.n if position > 90 else 0) for key in keys for position in [key[1]]]

        captured = [states(layer) for layer in sorted(self.capture)]
        number = self.n + 1
        inputs = {str(layer): printed(states(layer)) for layer in range(LAYERS)}
        outputs = {str(layer): printed(states(layer + 1)) for layer in range(LAYERS)}
        common = {
            "rank": self.rank,
            "requests": [request for request, _positions in places],
            "positions": [position for _request, position in keys],
            "rows": len(keys),
            "dtype": "float32",
        }
        self.add(
            "target",
            **common,
            model="DeepseekV2Model",
            mode=mode,
            layers=LAYERS,
            lengths=[len(positions) for _request, positions in places],
            capture=self.capture,
            captured={"count": len(captured), "prints": [printed(state) for state in captured]},
            inputs=inputs,
            outputs=outputs,
        )
        packed_states = captured if packed is None else packed(captured)
        self.add("packed", **common, target=number, prints=[printed(state) for state in packed_states])
        fed_states = packed_states if fed is None else fed(packed_states)
        self.add("fc", **common, target=number, prints=[printed(state) for state in fed_states], received=None)
        return number

    def verify(self, target: int, accepted: dict[str, int], steps: int = 3) -> None:
        self.add(
            "verify",
            target=target,
            requests=list(accepted),
            steps=steps,
            topk=1,
            drafted=None,
            accepted=list(accepted.values()),
            committed=None,
        )

    def text(self) -> str:
        return "".join(json.dumps(line) + "\n" for line in self.lines)

    def analyse(self, *others: "Run", **given: Any) -> wiring.Wiring:
        texts = [run.text() for run in (self, *others)]
        return wiring.analyse([parse(f"{index}.jsonl", text) for index, text in enumerate(texts)], **given)


def usual(change: Any = None, at: str = "fed", capture: Sequence[int] = (2, 3, 5)) -> Run:
    """Two requests: a prefill of each, and verifications of both at once."""
    run = Run(capture)
    given = {at: change}
    run.forward("EXTEND", [("a", range(5))], **given)
    run.forward("EXTEND", [("b", range(3))], **given)
    for step in range(3):
        run.forward("TARGET_VERIFY", [("a", range(5 + step, 9 + step)), ("b", range(3 + step, 7 + step))], **given)
    return run


def delayed(states: list[list[Row]]) -> list[list[Row]]:
    """Slice 1 one row late, its first row lost, as torch.roll does over a batch."""
    return [states[0], [states[1][-1], *states[1][:-1]], states[2]]
