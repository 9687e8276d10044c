"""The drafter: what its `fc` is fed, what each drafting step consumes, and what the target makes of the draft."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from pivot_probe import batch
from pivot_probe.device import capturing
from pivot_probe.guard import guarded
from pivot_probe.prints import Prints, Sent
from pivot_probe.record import Recorder
from pivot_probe.states import Described, dtype_name, first_rows
from pivot_probe.target import TargetWatch


class Step(NamedTuple):
    """One forward of the drafter within a round. hidden: first rows; rows: all; tokens: what it was given."""

    rows: int
    hidden: torch.Tensor
    positions: Sent | None
    tokens: Sent | None


class Consumed(NamedTuple):
    """What the steps of a round consumed, ready to be written: prints, and rows and positions, one entry a step."""

    printed: Prints
    rows: list[tuple[int, Sent | None]]


class DraftWatch:
    """Collects what belongs to one pass or one round of the drafter, and writes it as records. One per process."""

    def __init__(self, recorder: Recorder, target: TargetWatch) -> None:
        self.recorder = recorder
        self._target = target
        self._rows = recorder.settings.rows
        self._about = batch.NOBODY  # of the drafter's forward that runs now
        self._normalised = False
        self._received: torch.Tensor | None = None  # the first rows of what a normalising drafter is given
        self._round: list[Step] = []

    # --- the pass over the target's states

    @guarded
    def after_drafter_init(self, _result: object, model: Any, *_args: Any, **_kwargs: Any) -> None:
        """Watch what a new drafter receives and what its `fc` is fed and gives."""
        count = int(getattr(model, "num_aux_hidden_states", 3))
        self._normalised = any(getattr(model, name, None) is not None for name in ("input_norm", "fc_norm"))
        model.fc.register_forward_hook(functools.partial(self.on_fc, count))

    @guarded
    def before_runner_forward(self, runner: Any, forward_batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """Note what the drafter is about to consume; the target's own runner is not of interest here."""
        self._about, self._received = batch.NOBODY, None
        self._target.drafting = bool(runner.is_draft_worker)
        if not runner.is_draft_worker or capturing():
            return
        hidden = getattr(forward_batch.spec_info, "hidden_states", None)
        if hidden is None or not hidden.shape[0]:
            return
        about = self._about = batch.rows_of(forward_batch, self._rows)
        if forward_batch.forward_mode.is_decode():
            tokens = Sent(forward_batch.input_ids.clone()) if batch.own(about.requests) else None
            self._round.append(Step(hidden.shape[0], first_rows(hidden, self._rows), about.positions, tokens))
            return
        self._round.clear()
        if self._normalised:
            self._received = first_rows(hidden, self._rows)
        if hidden.shape[-1] == runner.model_config.hidden_size:
            self._given(about, hidden)

    @guarded
    def on_fc(self, count: int, _fc: object, args: tuple[torch.Tensor, ...], output: Any) -> None:
        """A forward hook of `fc`: write its input, slice by slice, and its output."""
        if capturing():
            return
        given = output[0] if isinstance(output, tuple) else output
        beside = [first_rows(given, self._rows)]
        if self._received is not None:
            beside.extend(self._received.chunk(count, dim=-1))
        about = self._about
        described = Described(args[0], count, self._rows, beside)

        def late(_number: int) -> dict[str, Any]:
            fields, (output, *received) = described.fields()
            return {**fields, **about.fields(), "output": output, "received": received or None}

        rows, dtype = args[0].shape[0], dtype_name(args[0])
        self.recorder.write("fc", late, rank=self._target.rank, target=self._target.target, rows=rows, dtype=dtype)

    def _given(self, about: batch.Rows, hidden: torch.Tensor) -> None:
        """Write the states that go past `fc`."""
        described = Described(hidden, 1, self._rows)
        rows, dtype = hidden.shape[0], dtype_name(hidden)

        def late(_number: int) -> dict[str, Any]:
            return {**described.fields()[0], **about.fields()}

        self.recorder.write("given", late, rank=self._target.rank, target=self._target.target, rows=rows, dtype=dtype)

    # --- a round of drafting

    @guarded
    def after_drafting(self, result: Any, worker: Any, forward_batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """Write one record for each step of a round."""
        steps, self._round = self._round, []
        if capturing() or result[2] is None or not result[2].shape[0]:
            return
        requests = batch.named(getattr(forward_batch, "rids", None))
        chain = int(worker.topk) == 1
        last = Sent(result[2][:, -1:].clone()) if chain and batch.own(requests) else None
        consumed = Consumed(Prints([step.hidden for step in steps]), [(step.rows, step.positions) for step in steps])
        for number, tokens in enumerate([*(step.tokens for step in steps), last]):
            late = functools.partial(_step, number, consumed, tokens, len(requests or ()))
            self.recorder.write("draft", late, target=self._target.target, requests=requests, step=number)

    # --- what the target makes of it

    @guarded
    def after_verifying(self, result: Any, _worker: Any, schedule: Any, *_args: Any, **_kwargs: Any) -> None:
        """Write one verification: what was drafted, and how much of it was accepted."""
        verified, accepted = schedule.spec_info, result.accept_lens
        if capturing() or accepted is None or not accepted.shape[0]:
            return
        requests = batch.named([request.rid for request in schedule.reqs])
        own = batch.own(requests)
        lengths = Sent(accepted.clone())
        drafted = Sent(verified.draft_token.clone()) if own else None
        committed = Sent(result.next_token_ids.clone()) if own else None

        def late(_number: int) -> dict[str, Any]:
            kept = [int(length) for length in lengths.arrived().tolist()]
            trees = None if drafted is None else shared(drafted.arrived(), len(kept))
            made = None if committed is None else shared(committed.arrived(), len(kept))
            return {
                "drafted": trees and [tree[1:] for tree in trees],  # the first is the token drafting began from
                "accepted": [length - 1 for length in kept],
                "committed": made and [row[:length] for row, length in zip(made, kept)],  # noqa: B905 - both of kept
            }

        target, steps, topk = self._target.target, int(verified.spec_steps), int(verified.topk)
        self.recorder.write("verify", late, target=target, requests=requests, steps=steps, topk=topk)


def _step(number: int, consumed: Consumed, chosen: Sent | None, requests: int, _record: int) -> dict[str, Any]:
    """What a record tells of one step; the first consumes what `fc` gave. chosen: its candidates."""
    tokens = None if chosen is None else shared(chosen.arrived(), requests)
    if not number:
        return {"rows": None, "hidden": None, "positions": None, "tokens": tokens}
    rows, positions = consumed.rows[number - 1]
    hidden = consumed.printed.texts()[number - 1]
    return {"rows": rows, "hidden": hidden, "positions": batch.numbers(positions), "tokens": tokens}


def shared(values: torch.Tensor, requests: int) -> list[list[int]]:
    """Whole numbers in equal shares, one for each request."""
    rows: list[list[int]] = values.reshape(requests, -1).tolist()
    return rows
