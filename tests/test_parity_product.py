"""PyTorch against JAX, and both against the float64 oracle.

Over the product of {every loss alone, every pair, all} × dtypes × {mask, no mask} × {softcap, scale}.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from every_loss import as_config, every_loss, random_inputs, relative_rms
from helpers import to_jax, to_torch

import duohead_jax
import duohead_torch
from duohead.reference import Reference, reference
from duohead_jax import xla

DTYPES = ("float32", "bfloat16", "float16", "float64")
NUMPY_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}
#: relative rms between the frameworks, and of either to the oracle
BETWEEN = {"float32": 1e-6, "bfloat16": 1e-6, "float16": 1e-6, "float64": 1e-13}
TO_ORACLE = {"float32": 3e-6, "bfloat16": 3e-6, "float16": 3e-6, "float64": 1e-12}
#: half a unit in the last place, relative: what rounding the exact gradient once may cost
HALF_PLACE = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
BENDS: dict[str, dict[str, float]] = {"softcap": {"final_logit_softcap": 3.0}, "scale": {"logits_scale_factor": 0.7}}
LOSSES = every_loss()
SETS = [
    *((name,) for name in LOSSES),
    *itertools.combinations(LOSSES, 2),
    tuple(LOSSES),
]


class Answer(NamedTuple):
    """The numbers of one call as float64, and the gradient in its own dtype too."""

    scalars: np.ndarray
    metrics: np.ndarray
    gradient: np.ndarray
    raw_gradient: np.ndarray


def make_inputs(dtype: str, masked: bool, bend: str) -> dict[str, Any]:
    """The logits are exactly representable in ``dtype``, so that the oracle sees the same ones."""
    inputs = random_inputs(3, **BENDS[bend])
    if masked:
        mask = np.ones(len(inputs["labels"]), bool)
        mask[1] = False
        inputs["mask"] = mask
        for array in (inputs["logits"], inputs["teacher_logits"]["teacher"], inputs["old_logprobs"]):
            array[1] = np.nan
    kept = NUMPY_DTYPES[dtype]
    compute = np.float64 if dtype == "float64" else np.float32
    for name in ("advantages", "old_logprobs", "ref_logprobs", "importance_weights"):
        inputs[name] = inputs[name].astype(compute).astype(np.float64)
    inputs["logits"] = inputs["logits"].astype(kept).astype(np.float64)
    inputs["teacher_logits"] = {"teacher": inputs["teacher_logits"]["teacher"].astype(kept).astype(np.float64)}
    return inputs


def by_torch(names: tuple[str, ...], inputs: dict[str, Any], bend: Mapping[str, float]) -> Answer:
    rest = dict(inputs)
    logits = rest.pop("logits")
    losses = {name: LOSSES[name] for name in names}
    (loss, aux), gradient = duohead_torch.monolithic_loss_and_grad(
        logits, losses, implementation="eager", **rest, **bend
    )
    bits = gradient.view(torch.int16).numpy() if gradient.element_size() == 2 else gradient.numpy()
    return Answer(
        np.array([float(loss), *(float(aux.losses[name]) for name in names)]),
        np.array([float(aux.metrics[name]) for name in sorted(aux.metrics)]),
        gradient.double().numpy(),
        bits,
    )


def by_jax(names: tuple[str, ...], inputs: dict[str, Any], bend: Mapping[str, float]) -> Answer:
    rest = dict(inputs)
    logits = rest.pop("logits")
    losses = {name: LOSSES[name] for name in names}
    (loss, aux), gradient = duohead_jax.monolithic_loss_and_grad(logits, losses, implementation="xla", **rest, **bend)
    raw = np.asarray(gradient)
    return Answer(
        np.array([float(loss), *(float(aux.losses[name]) for name in names)]),
        np.array([float(aux.metrics[name]) for name in sorted(aux.metrics)]),
        np.asarray(gradient, np.float64),
        raw.view(np.int16) if raw.itemsize == 2 else raw,
    )


def by_oracle(names: tuple[str, ...], alone: Mapping[str, Reference]) -> tuple[np.ndarray, np.ndarray]:
    """The oracle combines nothing: a set's loss and gradient are the weighted sums of its losses'."""
    weights = {name: float(LOSSES[name].weight) for name in names}
    values = [alone[name].losses[name] for name in names]
    total = sum(weights[name] * value for name, value in zip(names, values, strict=True))
    gradient = sum(weights[name] * (alone[name].logits_grad / weights[name]) for name in names)
    return np.array([total, *values]), np.asarray(gradient)


def places_apart(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance in units of the last place between the bits of two arrays of a 16-bit float type."""

    def ordered(bits: np.ndarray) -> np.ndarray:
        wide = bits.astype(np.int32)
        return np.where(wide < 0, -(wide & 0x7FFF), wide)

    return int(np.abs(ordered(a) - ordered(b)).max())


def assert_same(dtype: str, ours: Answer, theirs: Answer, what: Any) -> None:
    limit = BETWEEN[dtype]
    assert relative_rms(ours.scalars, theirs.scalars) <= limit, what
    assert ours.metrics.shape == theirs.metrics.shape
    # Rewards and KLs are differences of log-probabilities of about 1, so that is the least that they are compared to.
    assert (np.abs(ours.metrics - theirs.metrics) <= limit * np.maximum(1.0, np.abs(theirs.metrics))).all(), what
    if dtype in HALF_PLACE:
        assert places_apart(ours.raw_gradient, theirs.raw_gradient) <= 1, what
    else:
        assert relative_rms(ours.gradient, theirs.gradient) <= limit, what


def assert_true(dtype: str, found: Answer, expected: tuple[np.ndarray, np.ndarray], what: Any) -> None:
    scalars, gradient = expected
    assert relative_rms(found.scalars, scalars) <= TO_ORACLE[dtype], what
    if dtype in HALF_PLACE:
        size = np.abs(gradient)
        error = np.abs(found.gradient - gradient)
        # One rounding, and the float32 computation's own error; 2^-25 is half of float16's smallest number.
        allowed = HALF_PLACE[dtype] * size + TO_ORACLE[dtype] * size.max() + 2.0**-25
        assert (error <= allowed).all(), what
    else:
        assert relative_rms(found.gradient, gradient) <= TO_ORACLE[dtype], what


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("masked", [False, True], ids=["all_rows", "masked"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_product(dtype: str, masked: bool, bend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX op by op: compiling 3056 programs would take an hour. The compiled ones are tested below."""
    monkeypatch.setattr(xla, "loss_and_grad", xla.loss_and_grad.__wrapped__)
    inputs = make_inputs(dtype, masked, bend)
    torch_inputs, jax_inputs = to_torch(inputs, dtype), to_jax(inputs, dtype)
    alone = {
        name: reference(**inputs, **BENDS[bend], head={"losses": {name: as_config(loss)}})
        for name, loss in LOSSES.items()
    }
    for names in SETS:
        ours = by_torch(names, torch_inputs, BENDS[bend])
        assert_same(dtype, ours, by_jax(names, jax_inputs, BENDS[bend]), names)
        assert_true(dtype, ours, by_oracle(names, alone), names)


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_under_jit(name: str) -> None:
    inputs = make_inputs("float32", True, "softcap")
    ours = by_torch((name,), to_torch(inputs, "float32"), BENDS["softcap"])
    theirs = by_jax((name,), to_jax(inputs, "float32"), BENDS["softcap"])
    assert_same("float32", ours, theirs, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_losses_under_jit(dtype: str) -> None:
    inputs = make_inputs(dtype, False, "scale")
    names = tuple(LOSSES)
    ours = by_torch(names, to_torch(inputs, dtype), BENDS["scale"])
    theirs = by_jax(names, to_jax(inputs, dtype), BENDS["scale"])
    assert_same(dtype, ours, theirs, dtype)


def test_random_inputs_meet_both_sides_of_the_clip_band() -> None:
    """The product would prove little if no ratio were clipped."""
    inputs = make_inputs("float64", False, "scale")
    found = reference(**inputs, **BENDS["scale"], head={"losses": {"clip": as_config(LOSSES["clip"])}})
    assert found.metrics["clip/clip_low_fraction"] > 0
    assert found.metrics["clip/clip_high_fraction"] > 0
    assert jax.config.read("jax_enable_x64")
