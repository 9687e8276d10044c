"""The target: every layer's input and output, what is captured, and what the logits processor hands on."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
from typing import Any

import torch

from pivot_probe import batch
from pivot_probe.device import capturing, rank
from pivot_probe.guard import guarded
from pivot_probe.prints import Sent
from pivot_probe.record import SCHEMA, Recorder
from pivot_probe.shelf import Shelf, Whole
from pivot_probe.states import Described, dtype_name, first_rows
from pivot_probe.targets import TARGETS


class Forward:
    """What one forward of the target has shown so far.

    rows, tokens, inputs and outputs (by layer, summed with the residual): of the first rows. Of a replay also whole,
    or left_out: why not, all_tokens and all_positions.
    """

    def __init__(self, forward_batch: Any, rows: int, rank: int) -> None:
        """rows: how many are recorded; the first rank alone keeps whole states."""
        self.batch: Any = forward_batch
        self.rows = batch.rows_of(forward_batch, rows)
        self.mode: str = forward_batch.forward_mode.name
        self.lengths = batch.lengths_of(forward_batch, self.rows.requests)
        self.tokens = batch.first(forward_batch.input_ids, rows) if batch.own(self.rows.requests) else None
        self.inputs: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.replay = rank == 0 and batch.own(self.rows.requests, batch.REPLAY)
        self.whole: Whole | None = None
        self.left_out = ""
        if self.replay:
            self.all_tokens = Sent(forward_batch.input_ids.to(torch.int64, copy=True))
            self.all_positions = Sent(forward_batch.positions.to(torch.int64, copy=True))

    def release(self) -> None:
        """Let go of what belongs to the engine and of what is printed: a record may wait for a while."""
        self.batch = None
        self.inputs, self.outputs = {}, {}


class TargetWatch:
    """Collects what belongs to one forward of the target and writes it as records. One per process.

    target: the number of the last target record; rank: this process's; drafting: the drafter runs now, which may be
    of a target's class.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.target = 0
        self.rank = 0
        self.drafting = False
        self._rows = recorder.settings.rows
        self._shelf = Shelf(recorder.path.parent, recorder.path.stem, recorder.settings.tensor_bytes)
        self._embedding: torch.Tensor | None = None
        self._forward: Forward | None = None
        self._unpacked: Forward | None = None  # the forward whose states have not been packed yet
        self._captured = 0
        self._layers = 0

    # --- hooks on functions

    @guarded
    def after_target_init(self, _result: object, model: Any, *_args: Any, **_kwargs: Any) -> None:
        """Watch the embedding, every decoder layer and the final norm of a new target model."""
        if not _is_target(model):
            return  # a subclass that only borrows the layers, such as another drafter
        if isinstance(model.embed_tokens, torch.nn.Module):
            model.embed_tokens.register_forward_hook(self.on_embedding)
        self._layers = len(model.layers)
        self.rank = rank()
        for number, layer in enumerate(model.layers):
            if "forward" in vars(type(layer)):  # otherwise a layer of another pipeline stage
                self._watch_layer(number, layer)
        if isinstance(model.norm, torch.nn.Module):
            model.norm.register_forward_pre_hook(functools.partial(self.on_final_norm, len(model.layers) - 1))

    @guarded
    def before_target_forward(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Begin a forward, unless nothing may be read now."""
        self._forward = None
        if self.drafting or capturing() or not _is_target(model):
            return
        forward_batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode"))
        self._forward = Forward(forward_batch, self._rows, self.rank)

    @guarded
    def after_target_forward(self, result: Any, model: Any, *_args: Any, **_kwargs: Any) -> None:
        """Write what one forward of the target saw and captured."""
        seen, self._forward = self._forward, None
        embedding, self._embedding = self._embedding, None
        if seen is None or not seen.inputs:
            return  # another model's, an idle batch, or one of a graph's capture
        capture = [int(number) for number in model.layers_to_capture]
        captured = result[1] if isinstance(result, tuple) else []
        hidden = result[0] if isinstance(result, tuple) else result
        inputs, outputs = seen.inputs, _completed(seen.inputs, seen.outputs)
        known = [] if embedding is None else [embedding]
        described = Described(captured, len(capture), self._rows, [*inputs.values(), *outputs.values(), *known])
        read, made = list(inputs), list(outputs)
        seen.release()

        def late(number: int) -> dict[str, Any]:
            fields, printed = described.fields()
            kept = iter(printed)
            return {
                **seen.rows.fields(),
                "lengths": seen.lengths,
                "tokens": batch.numbers(seen.tokens),
                "captured": fields,
                "inputs": {str(layer): next(kept) for layer in read},
                "outputs": {str(layer): next(kept) for layer in made},
                "embedding": next(kept, None),
                **self._stored(number, seen),
            }

        self.target = self.recorder.write(
            "target",
            late,
            rank=self.rank,
            model=type(model).__name__,
            mode=seen.mode,
            rows=hidden.shape[0],
            width=hidden.shape[-1],
            dtype=dtype_name(hidden),
            layers=len(model.layers),
            capture=capture,
        )
        self._captured = len(capture) if isinstance(result, tuple) else 0
        self._unpacked = seen

    @guarded
    def after_packing(self, result: torch.Tensor | None, *_args: Any, **_kwargs: Any) -> None:
        """Write what the logits processor keeps for the drafter; a drafter's own call is not of interest."""
        seen, self._unpacked = self._unpacked, None
        if seen is None or result is None:
            return  # nobody asked for the states of this forward
        described = Described(result, self._captured, self._rows)
        rows = result.shape[0]
        origin = seen.rows if sum(seen.lengths or ()) == rows else seen.rows._replace(positions=None)

        def late(_number: int) -> dict[str, Any]:
            return {**described.fields()[0], **origin.fields()}

        self.recorder.write("packed", late, target=self.target, rows=rows, dtype=dtype_name(result))

    # --- hooks on modules

    @guarded
    def on_embedding(self, _module: object, _args: object, output: torch.Tensor) -> None:
        """A forward hook of the target's embedding; some models embed before their forward begins."""
        self._embedding = None if capturing() else first_rows(output, self._rows)

    @guarded
    def on_layer_with_residual(
        self, number: int, parameters: list[str], _layer: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A pre-hook of a decoder layer that is handed its residual (before 0.5.23): its input is the sum."""
        if self._forward is None:
            return
        values = {**dict(zip(parameters, args)), **kwargs}  # noqa: B905 - trailing parameters have defaults
        self._input(number, values["hidden_states"], values["residual"])

    @guarded
    def on_attention_of_stream(
        self, number: int, _attention: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A pre-hook of a layer's attention where the residual lives on the batch (0.5.23).

        By then the layer has summed its input and kept it as the residual: what capture takes too.
        """
        if self._forward is None:
            return
        forward_batch = kwargs.get("forward_batch")
        if forward_batch is None:
            forward_batch = next(value for value in args if hasattr(value, "residual_stream"))
        self._input(number, forward_batch.residual_stream.residual, None)

    @guarded
    def on_layer_done(self, number: int, _layer: object, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook of a decoder layer: hidden state and residual, where the engine has them summed up."""
        if self._forward is None:
            return
        stream = getattr(self._forward.batch, "residual_stream", None)
        if stream is None:  # the engine hands the residual from layer to layer
            hidden, residual = output[0], output[1]
            if getattr(hidden, "_sglang_needs_allreduce_fusion", False):
                return  # a share of the sum
        elif stream.pending is None:
            hidden, residual = stream.residual, None
        elif stream.pending.owed is None and stream.pending.update.is_plain_add:
            hidden, residual = stream.pending.value, stream.residual
        else:
            return  # the next layer completes the sum
        self._forward.outputs.setdefault(number, _sum(hidden, residual, self._rows))

    @guarded
    def on_final_norm(self, last: int, _norm: object, args: tuple[Any, ...]) -> None:
        """A pre-hook of the final norm: what it is given is the last layer's output."""
        forward = self._forward
        if forward is None or not args[0].shape[0]:
            return
        residual = args[1] if len(args) > 1 else None
        forward.outputs[last] = _sum(args[0], residual, self._rows)
        if forward.whole is not None:
            forward.whole.take(last + 1, args[0] if residual is None else args[0] + residual)

    # --- pieces

    def _watch_layer(self, number: int, layer: Any) -> None:
        parameters = list(inspect.signature(type(layer).forward).parameters)[1:]
        if "residual" in parameters:
            hook = functools.partial(self.on_layer_with_residual, number, parameters)
            layer.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            hook = functools.partial(self.on_attention_of_stream, number)
            layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
        layer.register_forward_hook(functools.partial(self.on_layer_done, number))

    def _input(self, number: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Note a layer's input; of a batch that is run in two halves the first half counts."""
        forward = self._forward
        if forward is None or not hidden.shape[0] or number in forward.inputs:
            return
        forward.inputs[number] = _sum(hidden, residual, self._rows)
        if forward.replay and not forward.left_out:
            self._keep_whole(forward, number, hidden if residual is None else hidden + residual)

    def _keep_whole(self, forward: Forward, number: int, state: torch.Tensor) -> None:
        """Copy all rows of a layer's input to the host, or note why not."""
        if forward.whole is None:
            room = self._shelf.reserve(self._layers, state)
            if isinstance(room, str):
                forward.left_out = room
                return
            forward.whole = room
        forward.whole.take(number, state)

    def _stored(self, number: int, seen: Forward) -> dict[str, Any]:
        """Write the whole states of a replay: the fields that tell of it."""
        if not seen.replay:
            return {"tensors": None}
        whole, seen.whole = seen.whole, None
        why = seen.left_out or ("no layer was seen" if whole is None else whole.lack)
        lengths = seen.lengths
        tokens, positions = seen.all_tokens.arrived(), seen.all_positions.arrived()
        if whole is None or why or lengths is None or tokens.shape[0] != whole.states.shape[1]:
            return {"tensors": None, "tensors_left_out": why or "the rows are not those of the requests"}
        beside = {"input_ids": tokens, "positions": positions, "lengths": torch.tensor(lengths)}
        about = {
            "schema": str(SCHEMA),
            "n": str(number),
            "rank": str(self.rank),
            "requests": json.dumps(seen.rows.requests),
            "mode": seen.mode,
            "sglang": importlib.metadata.version("sglang"),
        }
        try:
            return {"tensors": self._shelf.store(number, whole, beside, about)}
        except OSError as error:
            return {"tensors": None, "tensors_left_out": str(error)[:300]}


def _is_target(model: object) -> bool:
    return f"{type(model).__module__}.{type(model).__qualname__}" in TARGETS


def _sum(hidden: torch.Tensor, residual: torch.Tensor | None, rows: int) -> torch.Tensor:
    """The first rows of a state of the residual stream."""
    if residual is None:
        return first_rows(hidden, rows)
    return hidden + residual if hidden.shape[0] <= rows else hidden[:rows] + residual[:rows]


def _completed(inputs: dict[int, torch.Tensor], outputs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Every layer's output by layer; one that the engine left to the next layer is that layer's input."""
    found = {layer: outputs.get(layer, inputs.get(layer + 1)) for layer in inputs}
    return {layer: state for layer, state in found.items() if state is not None}
