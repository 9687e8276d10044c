"""Evaluates an EAGLE-3 drafter on recorded states of its target: what would be accepted with another wiring or part.

For the engine's interpreter: standard library, torch and safetensors, no SGLang; it writes nothing. It reaches a host
as one program (``pivot.program``). It reads the tensors files of the debug probe and the drafter's directory. The
drafter is computed as SGLang's classes compute it (`classes`); a sequence is drafted along the recorded greedy tokens
with a chain of `steps`, and acceptance is counted as SGLang counts it. A layer is named by its input: the input of
layer 0 is the embedding.

Its one argument: '{"tensors": [file or directory, ...], "drafter": directory, "target": directory or null,
    "steps": 3, "topk": 1, "sequences": [{"id": text, "rid": text, "prompt_tokens": number, "tokens": number}, ...],
    "candidates": [{"name": text, "layers": [number, ...], "repair": {...}}, ...], "device": "cpu", "threads": 0,
    "since": "2026-11-29T20:00:00Z"}'
With "do": "read sample" or "match sample" it compares a stored training sample with the recorded states instead:
    '{"do": ..., "sample": file, "target": directory, "tensors": [...], "count": 2, "longest": 256}'
It prints one JSON object; with a sentence under "failed" it exits with 3.
"""

import os

# waiting threads spin by default: beside a busy server the evaluation takes ten times as long then, and slows it down
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
