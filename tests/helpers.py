"""Shared by the tests: case files, and the same inputs for every implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CASES = Path(__file__).parent / "cases"
INTEGERS = ("labels", "segment_ids", "preference_pairs")


def numbers(value: Any) -> Any:
    """JSON's "nan", "inf" and "-inf" as floats."""
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return float(value) if isinstance(value, str) else value


def case_names() -> list[str]:
    return sorted(path.stem for path in CASES.glob("*.json"))


def load_case(name: str) -> dict[str, Any]:
    """A case with its inputs as float64 / int64 / bool NumPy arrays."""
    case = json.loads((CASES / f"{name}.json").read_text())
    inputs: dict[str, Any] = {}
    for key, value in case["inputs"].items():
        if key == "teacher_logits":
            inputs[key] = {model: np.array(numbers(array), np.float64) for model, array in value.items()}
        elif key in INTEGERS:
            inputs[key] = np.array(value, np.int64).reshape(-1, 2) if key == "preference_pairs" else np.array(value)
        elif isinstance(value, list):
            inputs[key] = np.array(value, bool) if key == "mask" else np.array(numbers(value), np.float64)
        else:
            inputs[key] = value
    case["inputs"] = inputs
    return case


def to_torch(inputs: dict[str, Any], dtype: str) -> dict[str, Any]:
    """NumPy inputs as torch tensors: logits and teachers in ``dtype``, per-token floats in its compute dtype."""
    import torch

    compute = torch.float64 if dtype == "float64" else torch.float32

    def convert(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: convert(key, item) for name, item in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.kind == "f":
            return torch.tensor(value).to(getattr(torch, dtype) if key in ("logits", "teacher_logits") else compute)
        return torch.tensor(value)

    return {key: convert(key, value) for key, value in inputs.items()}


def to_jax(inputs: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The same as JAX arrays (float64 needs jax_enable_x64)."""
    import jax.numpy as jnp

    compute = jnp.float64 if dtype == "float64" else jnp.float32

    def convert(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: convert(key, item) for name, item in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.kind == "f":
            return jnp.asarray(value, getattr(jnp, dtype) if key in ("logits", "teacher_logits") else compute)
        return jnp.asarray(value)

    return {key: convert(key, value) for key, value in inputs.items()}
