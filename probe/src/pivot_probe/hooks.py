"""The hooks: what is read where, and how the pieces of one target forward become one record."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import pkgutil
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pivot_probe.prints import DIMENSIONS, SEED, fingerprints, norms
from pivot_probe.record import SCHEMA, Recorder

MODELS = "sglang.srt.models"
# the classes that run a target's decoder layers; Kimi-K2.5 wraps the first
TARGETS = (f"{MODELS}.deepseek_v2.DeepseekV2Model", f"{MODELS}.llama.LlamaModel")
# the classes that hold a drafter's `fc`
DRAFTERS = (f"{MODELS}.llama_eagle3.LlamaModel", f"{MODELS}.kimi_k25_eagle3.Eagle3MLAModel")
PACKING = "sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store"


def install(recorder: Recorder, version: str) -> None:
    """Register every hook whose target this SGLang has, and write the header, which names those it has not."""
    observer = Observer(recorder)
    wanted: list[tuple[str, Callable[..., None]]] = []
    for name in TARGETS:
        wanted.append((f"{name}.__init__", observer.after_target_init))
        wanted.append((f"{name}.forward", observer.after_target_forward))
    wanted.append((PACKING, observer.after_packing))
    wanted.extend((f"{name}.__init__", observer.after_drafter_init) for name in DRAFTERS)
    state: dict[str, str] = {}
    for target, hook in wanted:
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            state[target] = f"missing: {type(error).__name__}: {error}"[:200]
            continue
        HookRegistry.register(target, hook, HookType.AFTER)
        state[target] = "registered"
    recorder.write(
        "header",
        schema=SCHEMA,
        probe=version,
        pid=os.getpid(),
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        sglang=importlib.metadata.version("sglang"),
        torch=torch.__version__,
        rows=recorder.settings.rows,
        dimensions=DIMENSIONS,
        seed=SEED,
        hooks=state,
    )


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """An Observer method as a hook that never raises, never changes a result, and keeps out of graph capture."""

    @functools.wraps(method)
    def hook(observer: Observer, *args: Any, **kwargs: Any) -> None:
        if observer.recorder.ended or _capturing():
            return
        try:
            method(observer, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a probe does wrong, the request goes on
            observer.recorder.failure(method.__name__, error)

    return hook


def _capturing() -> bool:
    """True while a CUDA graph is captured or a graph compiled: nothing may be read then."""
    if torch.compiler.is_compiling():
        return True
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class Observer:
    """Collects what belongs to one target forward, and writes it as records. One per process."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._rows = recorder.settings.rows
        self._embedding: torch.Tensor | None = None
        self._inputs: dict[int, torch.Tensor] = {}
        self._target = 0  # the number of the last target record
        self._slices = 0  # how many states that forward captured
        self._unpacked = False  # that forward's states have not been packed yet
        self._received: torch.Tensor | None = None

    # --- the target

    @guarded
    def after_target_init(self, _result: object, model: Any, *_args: Any, **_kwargs: Any) -> None:
        """Watch the embedding and the input of every decoder layer of a new target model."""
        if f"{type(model).__module__}.{type(model).__qualname__}" not in TARGETS:
            return  # a subclass that only borrows the layers, such as another drafter
        if isinstance(model.embed_tokens, torch.nn.Module):
            model.embed_tokens.register_forward_hook(self.on_embedding)
        for number, layer in enumerate(model.layers):
            if "forward" not in vars(type(layer)):
                continue  # a layer of another pipeline stage
            parameters = list(inspect.signature(type(layer).forward).parameters)[1:]
            if "residual" in parameters:
                hook = functools.partial(self.on_layer_with_residual, number, parameters)
                layer.register_forward_pre_hook(hook, with_kwargs=True)
            else:
                hook = functools.partial(self.on_attention_of_stream, number)
                layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)

    @guarded
    def on_embedding(self, _module: object, _args: object, output: torch.Tensor) -> None:
        """A forward hook of the target's embedding."""
        self._embedding = self._first_rows(output)

    @guarded
    def on_layer_with_residual(
        self, number: int, parameters: list[str], _layer: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A pre-hook of a decoder layer that is handed its residual (up to 0.5.2x): its input is the sum."""
        values = {**dict(zip(parameters, args)), **kwargs}  # noqa: B905 - trailing parameters have defaults
        hidden, residual = values["hidden_states"], values["residual"]
        first = self._first_rows(hidden)
        self._keep(number, first if residual is None else first + self._first_rows(residual))

    @guarded
    def on_attention_of_stream(
        self, number: int, _attention: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A pre-hook of a layer's attention where the residual lives on the batch (0.5.23).

        By then the layer has summed its input and kept it as the residual: what capture takes too.
        """
        batch = kwargs.get("forward_batch")
        if batch is None:
            batch = next(value for value in args if hasattr(value, "residual_stream"))
        self._keep(number, self._first_rows(batch.residual_stream.residual))

    @guarded
    def after_target_forward(self, result: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Write what one forward of the target saw and captured."""
        if f"{type(model).__module__}.{type(model).__qualname__}" not in TARGETS:
            return
        inputs, self._inputs = self._inputs, {}
        embedding, self._embedding = self._embedding, None
        if not inputs:
            return  # an idle batch
        wanted = [int(number) for number in model.layers_to_capture]
        captured = _slices(result[1], len(wanted)) if isinstance(result, tuple) else []
        firsts = [state[: self._rows] for state in captured]
        known = [] if embedding is None else [embedding]
        printed = fingerprints([*inputs.values(), *firsts, *known])
        layers, rest = printed[: len(inputs)], printed[len(inputs) :]
        hidden = result[0] if isinstance(result, tuple) else result
        batch = next((value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode")), None)
        self._target = self.recorder.write(
            "target",
            rank=_rank(),
            model=type(model).__name__,
            mode=None if batch is None else batch.forward_mode.name,
            rows=hidden.shape[0],
            width=hidden.shape[-1],
            dtype=_dtype(hidden),
            layers=len(model.layers),
            capture=wanted,
            captured=_described(captured, rest[: len(captured)]),
            embedding=rest[len(captured)] if known else None,
            inputs={str(number): text for number, text in zip(inputs, layers, strict=True)},
        )
        self._slices, self._unpacked = len(captured), True

    # --- the hand-over

    @guarded
    def after_packing(self, result: torch.Tensor | None, *_args: Any, **_kwargs: Any) -> None:
        """Write what the logits processor keeps for the drafter; a drafter's own call is not of interest."""
        if not self._unpacked:
            return
        self._unpacked = False
        if result is None:
            return  # nobody asked for the states of this forward
        states = _slices(result, self._slices)
        printed = fingerprints([state[: self._rows] for state in states])
        self.recorder.write(
            "packed", target=self._target, rows=result.shape[0], dtype=_dtype(result), **_described(states, printed)
        )

    # --- the drafter

    @guarded
    def after_drafter_init(self, _result: object, model: Any, *_args: Any, **_kwargs: Any) -> None:
        """Watch what a new drafter receives and what its `fc` is fed."""
        count = int(getattr(model, "num_aux_hidden_states", 3))
        normalised = any(getattr(model, name, None) is not None for name in ("input_norm", "fc_norm"))
        if normalised:
            model.register_forward_pre_hook(self.on_drafter, with_kwargs=True)
        model.fc.register_forward_pre_hook(functools.partial(self.on_fc, count, normalised))

    @guarded
    def on_drafter(self, _model: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pre-hook of a drafter that normalises before `fc`: keep what it was given."""
        batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "spec_info"))
        self._received = batch.spec_info.hidden_states

    @guarded
    def on_fc(self, count: int, normalised: bool, _module: object, args: tuple[torch.Tensor, ...]) -> None:
        """A pre-hook of `fc`: write its input, slice by slice."""
        states = _slices(args[0], count)
        printed = fingerprints([state[: self._rows] for state in states])
        received = None
        if normalised and self._received is not None:
            given = _slices(self._received, count)
            received = fingerprints([state[: self._rows] for state in given])
        self._received = None
        self.recorder.write(
            "fc",
            rank=_rank(),
            target=self._target,
            rows=args[0].shape[0],
            dtype=_dtype(args[0]),
            received=received,
            **_described(states, printed),
        )

    def _first_rows(self, state: torch.Tensor) -> torch.Tensor:
        """A copy of the rows that are recorded: engines reuse these buffers within the forward."""
        return state.detach()[: self._rows].clone()

    def _keep(self, number: int, state: torch.Tensor) -> None:
        """Note a layer's input; of a batch that is run in two halves the first half counts."""
        if state.shape[0]:
            self._inputs.setdefault(number, state)


def _slices(states: Any, count: int) -> list[torch.Tensor]:
    """Captured states as a list, whether they come packed ([rows, count * width]) or as a list already."""
    if not isinstance(states, torch.Tensor):
        return list(states)
    if count > 1 and states.shape[-1] % count == 0:
        return list(states.chunk(count, dim=-1))
    return [states]


def _described(states: list[torch.Tensor], printed: list[str]) -> dict[str, Any]:
    """The fields that every recorded set of states has. width: of one slice."""
    return {
        "count": len(states),
        "width": states[0].shape[-1] if states else 0,
        "norms": norms(states),
        "prints": printed,
    }


def _dtype(state: torch.Tensor) -> str:
    return str(state.dtype).removeprefix("torch.")


def _rank() -> int:
    """This process's rank, 0 where nothing is distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return 0
