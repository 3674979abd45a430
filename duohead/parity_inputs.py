"""The inputs of a parity run as NumPy arrays: drawn from a seed, or read from an ``.npz``.

Every framework and the float64 reference start from the same numbers, so logits and teachers are rounded to the
run's dtype here, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from duohead.checks import FLOATS
from duohead.fields import nearest
from duohead.spec import HeadSpec

Array = np.ndarray

HALF = ("bfloat16", "float16")
BIG = ("logits", "teacher_logits")
INTEGERS = ("labels", "segment_ids", "preference_pairs")
PER_TOKEN = ("advantages", "old_logprobs", "importance_weights")
COUNTS = ("num_segments", "num_tokens", "num_sequences", "num_pairs")
KEYS = ("logits", "teacher_logits", "ref_logprobs", "mask", *INTEGERS, *PER_TOKEN, *COUNTS)


def round_to(array: Any, dtype: str) -> Array:
    """The values of ``array`` rounded to ``dtype``, held in float64 (which has them all exactly)."""
    wide = np.asarray(array, np.float64)
    if dtype == "bfloat16":
        return _to_bfloat16(wide.astype(np.float32)).astype(np.float64)
    with np.errstate(over="ignore"):
        return wide.astype(dtype).astype(np.float64)


def _to_bfloat16(array: Array) -> Array:
    """Round to nearest, ties to even, on the upper 16 bits of a float32."""
    bits = array.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(array), rounded, array)


def compute_dtype(dtype: str) -> str:
    """What per-token inputs are held in."""
    return "float64" if dtype == "float64" else "float32"


def draw_inputs(head: HeadSpec, shape: tuple[int, ...], dtype: str, seed: int) -> dict[str, Any]:
    """Everything that the head's losses could need, for logits of this shape.

    Some labels are ignored, one row is masked and holds NaN, sequences differ in length, a token belongs to none, and
    old and reference log-probabilities lie near the true ones.
    """
    random = np.random.default_rng(seed)
    tokens, columns = shape[:-1], shape[-1]
    count = int(np.prod(tokens))
    vocab = columns if head.vocab_size is None else head.vocab_size
    if not 0 < vocab <= columns:
        raise ValueError(f"shape: {columns} columns are fewer than the configuration's vocab_size {vocab}")
    logits = round_to(random.normal(0.0, 2.0, (count, columns)), dtype)
    labels = np.where(random.random(count) < 0.5, logits[:, :vocab].argmax(-1), random.integers(0, vocab, count))
    true = _logprobs(head.logits_scale_factor * logits[:, :vocab], labels)
    segments = np.sort(random.integers(0, max(2, count // 4), count))
    inputs: dict[str, Any] = {
        "logits": logits,
        "labels": np.where(random.random(count) < 0.1, -100, labels),
        "mask": random.random(count) < 0.9,
        "advantages": random.normal(0.0, 1.0, count),
        "old_logprobs": true + random.normal(0.0, 0.2, count),
        "importance_weights": random.uniform(0.5, 1.5, count),
        "segment_ids": np.where(random.random(count) < 0.05, -1, segments),
        "teacher_logits": {
            loss.teacher[0]: 0.5 * logits + random.normal(0.0, 1.0, logits.shape)
            for loss in head.losses.values()
            if loss.teacher is not None
        },
        "ref_logprobs": {
            name: true + random.normal(0.0, 0.2, count)
            for name in sorted({loss.reference or "" for loss in head.losses.values()})
        },
    }
    if count > 2:
        _spoil_row(inputs, 1)
    inputs = {name: _per_token(value, tokens) for name, value in inputs.items()}
    ids = np.unique(segments)
    inputs["preference_pairs"] = ids[: len(ids) // 2 * 2].reshape(-1, 2)
    return _finished(inputs, dtype)


def _logprobs(scaled: Array, labels: Array) -> Array:
    shifted = scaled - scaled.max(-1, keepdims=True)
    picked = np.take_along_axis(shifted, labels[:, None], -1)[:, 0]
    return np.asarray(picked - np.log(np.exp(shifted).sum(-1)))


def _spoil_row(inputs: dict[str, Any], row: int) -> None:
    """A masked row does not exist, whatever it holds."""
    inputs["mask"][row] = False
    for value in inputs.values():
        for array in value.values() if isinstance(value, dict) else (value,):
            if array.dtype.kind == "f":
                array[row] = np.nan


def _per_token(value: Any, tokens: tuple[int, ...]) -> Any:
    if isinstance(value, dict):
        return {name: _per_token(array, tokens) for name, array in value.items()}
    return value.reshape(*tokens, *value.shape[1:])


def load_inputs(path: Path, dtype: str | None) -> tuple[dict[str, Any], str]:
    """The inputs of an ``.npz`` and their dtype: the logits' own unless one is asked for.

    Keys are the arguments' names; several teachers or references are ``teacher_logits/NAME``, ``ref_logprobs/NAME``.
    """
    try:
        with np.load(path) as file:
            stored = {name: file[name] for name in file.files}
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: not an .npz of plain arrays: {error}") from None
    inputs: dict[str, Any] = {}
    for key, stored_array in stored.items():
        name, slash, model = key.partition("/")
        if name not in KEYS or (slash and name not in ("teacher_logits", "ref_logprobs")):
            raise ValueError(f"{path}: {key}: no input of that name{nearest(name, KEYS)}")
        array = _unpacked(stored_array)
        if name in COUNTS:
            inputs[name] = array.item()
        elif slash:
            inputs.setdefault(name, {})[model] = array
        else:
            inputs[name] = array
    if "logits" not in inputs:
        raise ValueError(f"{path}: logits: missing")
    if dtype is None:
        dtype = "bfloat16" if stored["logits"].dtype.kind == "V" else str(stored["logits"].dtype)
    if dtype not in FLOATS:
        raise ValueError(f"{path}: logits: must be one of {', '.join(FLOATS)}, got {dtype}")
    return _finished(inputs, dtype), dtype


def _unpacked(array: Array) -> Array:
    """NumPy stores bfloat16 as raw 2-byte items: their value as float32."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def _finished(inputs: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Rounded to what the frameworks will hold; one unnamed teacher or reference is a bare array."""
    done: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, dict):
            made = {key: _converted(name, array, dtype) for key, array in value.items()}
            if made:
                done[name] = made[""] if set(made) == {""} else {key: made[key] for key in made if key}
        else:
            done[name] = _converted(name, value, dtype) if isinstance(value, np.ndarray) else value
    return done


def _converted(name: str, array: Array, dtype: str) -> Array:
    if name in BIG:
        return round_to(array, dtype)
    if name == "mask":
        return np.asarray(array, bool)
    if name in INTEGERS:
        if array.dtype.kind not in "iu":
            raise ValueError(f"{name}: must be integer, got {array.dtype}")
        return np.asarray(array, np.int32)
    return round_to(array, compute_dtype(dtype))
