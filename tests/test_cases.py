"""Every hand-made case on every implementation: loss, each loss, gradient and metrics, in the case's own
tolerance, with no input written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from helpers import case_names, load_case, numbers, to_jax, to_torch

import duohead_jax
import duohead_torch
from duohead import engine, numpy_namespace
from duohead.prepare import check_arguments, make_passes
from duohead.spec import HeadSpec
from duohead.statistics import Columns, Inputs

#: a compile costs seconds, so a few cases that between them hold every kind of loss and trouble
COMPILED = ("everything", "jsd_0.5", "masked_row_nan", "softcap_odd_vocab", "ce_sharp_bf16", "two_scales")


class Found(NamedTuple):
    """What an implementation gave, as NumPy arrays."""

    loss: Any
    losses: dict[str, Any]
    metrics: dict[str, Any]
    gradient: np.ndarray


def head_and_inputs(case: Mapping[str, Any], *, per_loss: bool) -> tuple[HeadSpec, dict[str, Any], tuple[str, ...]]:
    """The case's head, its inputs, and the head metrics that it expects."""
    wanted = tuple(name.removeprefix("head/") for name in case["expected"]["metrics"] if name.startswith("head/"))
    body = dict(case["head"])
    if per_loss:
        body["loss_implementation"] = "per_loss"
    return HeadSpec.from_dict(body), dict(case["inputs"]), wanted


def as_float64(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return value.detach().double().numpy()
    return np.asarray(value, np.float64)


def all_float64(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: as_float64(value) for name, value in values.items()}


def assert_expected(case: Mapping[str, Any], found: Found) -> None:
    expected = case["expected"]
    tolerance = {"rtol": case["rtol"], "atol": case["atol"]}
    np.testing.assert_allclose(found.loss, expected["loss"], err_msg="loss", **tolerance)
    assert found.losses.keys() == expected["losses"].keys()
    for part, wanted in ((found.losses, expected["losses"]), (found.metrics, expected["metrics"])):
        for name, value in wanted.items():
            np.testing.assert_allclose(part[name], value, err_msg=name, **tolerance)
    gradient = np.array(numbers(expected["logits_grad"]), np.float64)
    np.testing.assert_allclose(found.gradient, gradient.reshape(found.gradient.shape), err_msg="gradient", **tolerance)


def run_torch(case: Mapping[str, Any], implementation: str) -> tuple[Found, Found]:
    """By autograd, and by ``monolithic_loss_and_grad``."""
    head, inputs, metrics = head_and_inputs(case, per_loss=implementation == "per_loss")
    inputs = to_torch(inputs, case["dtype"])
    kept = to_torch(case["inputs"], case["dtype"])
    leaf = inputs.pop("logits").requires_grad_()
    loss, aux = duohead_torch.monolithic_loss(leaf, head, metrics=metrics, implementation=implementation, **inputs)
    loss.backward()
    (second, second_aux), gradient = duohead_torch.monolithic_loss_and_grad(
        leaf.detach(), head, metrics=metrics, implementation=implementation, **inputs
    )
    assert not second.requires_grad
    assert leaf.grad is not None
    assert leaf.grad.dtype == gradient.dtype == leaf.dtype
    assert loss.dtype == (torch.float64 if leaf.dtype == torch.float64 else torch.float32)
    assert_untouched({"logits": leaf.detach(), **inputs}, kept)
    return (
        Found(as_float64(loss), all_float64(aux.losses), all_float64(aux.metrics), as_float64(leaf.grad)),
        Found(
            as_float64(second), all_float64(second_aux.losses), all_float64(second_aux.metrics), as_float64(gradient)
        ),
    )


def assert_untouched(inputs: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Inputs are never written."""
    for name, value in kept.items():
        if isinstance(value, Mapping):
            assert_untouched(inputs[name], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(torch.nan_to_num(inputs[name]), torch.nan_to_num(value)), name


def run_jax(case: Mapping[str, Any], implementation: str) -> Found:
    head, inputs, metrics = head_and_inputs(case, per_loss=implementation == "per_loss")
    inputs = to_jax(inputs, case["dtype"])
    logits = inputs.pop("logits")

    def value(logits: jax.Array) -> Any:
        return duohead_jax.monolithic_loss(logits, head, metrics=metrics, implementation=implementation, **inputs)

    (loss, aux), gradient = jax.value_and_grad(value, has_aux=True)(logits)
    assert gradient.dtype == logits.dtype
    return Found(as_float64(loss), all_float64(aux.losses), all_float64(aux.metrics), as_float64(gradient))


def run_numpy(case: Mapping[str, Any]) -> Found:
    """The engine itself, with neither framework: the terms bound to NumPy, in float64."""
    head, inputs, metrics = head_and_inputs(case, per_loss=False)
    logits = inputs.pop("logits")
    arguments: dict[str, Any] = {
        **dict.fromkeys(
            (
                "labels",
                "mask",
                "teacher_logits",
                "advantages",
                "old_logprobs",
                "ref_logprobs",
                "importance_weights",
                "segment_ids",
                "preference_pairs",
                "num_segments",
                "num_tokens",
                "num_sequences",
                "num_pairs",
                "final_logit_softcap",
                "vocab_size",
            )
        ),
        "logits_scale_factor": 1.0,
        "tokens": (),
        "implementation": "auto",
        **inputs,
    }
    checked = check_arguments(logits, losses=head, metrics=metrics, **arguments)
    (one,) = make_passes(checked)
    size = checked.vocab_size or logits.shape[-1]
    valid = np.ones(logits.shape[:-1], bool) if checked.labels is None else checked.labels >= 0
    valid = valid if checked.mask is None else valid & checked.mask
    settings = (
        one.plan,
        [np.float64(number) for number in one.hyper],
        logits,
        Inputs(
            checked.labels,
            valid,
            one.teachers,
            one.tokens,
            checked.segment_ids,
            checked.preference_pairs,
            checked.num_segments,
        ),
        Columns(0, size, size < logits.shape[-1]),
    )
    with np.errstate(all="ignore"):
        found = engine.evaluate(numpy_namespace, *settings)
        gradient = engine.gradient(numpy_namespace, *settings, found.normalisers, found.coefficients, np.float64(1.0))
    return Found(found.loss, found.aux.losses, found.aux.metrics, gradient)


@pytest.mark.parametrize("name", case_names())
def test_numpy_engine(name: str) -> None:
    case = load_case(name)
    # In float64 where the case rounds its logits to less: the rounded values are what the case is about.
    logits = to_torch({"logits": case["inputs"]["logits"]}, case["dtype"])["logits"].double().numpy()
    case["inputs"]["logits"] = logits
    assert_expected(case, run_numpy(case))


@pytest.mark.parametrize("name", case_names())
@pytest.mark.parametrize("implementation", ["eager", "per_loss"])
def test_torch(name: str, implementation: str) -> None:
    case = load_case(name)
    for found in run_torch(case, implementation):
        assert_expected(case, found)


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compiled(name: str) -> None:
    case = load_case(name)
    for found in run_torch(case, "compiled"):
        assert_expected(case, found)


@pytest.mark.parametrize("name", case_names())
@pytest.mark.parametrize("implementation", ["xla", "per_loss"])
def test_jax(name: str, implementation: str) -> None:
    case = load_case(name)
    assert_expected(case, run_jax(case, implementation))
