"""What a head costs and what it asks for: one exponential per softmax in the read and one in the write, no more."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
import torch
from helpers import to_jax, to_torch
from policy_inputs import assert_close, make_inputs, run
from torch.utils._python_dispatch import TorchDispatchMode

import duohead_jax
import duohead_torch
from duohead import (
    DPO,
    GRPO,
    GSPO,
    KTO,
    ORPO,
    CrossEntropy,
    Distillation,
    EntropyLoss,
    SimPO,
    ZLoss,
    token_loss,
)
from duohead.terms.policy import grpo_clip

ALONE = {"ce": CrossEntropy()}
WITHOUT_TEACHER: dict[str, Any] = {
    "ce": CrossEntropy(label_smoothing=0.1),
    "z": ZLoss(weight=0.1),
    "h": EntropyLoss(weight=-0.1),
    "grpo": GRPO(beta=0.1),
    "sapo": GRPO(objective="sapo"),
    "gspo": GSPO(beta=0.1),
    "dpo": DPO(),
    "simpo": SimPO(),
    "kto": KTO(),
}
EVERYTHING = {
    **WITHOUT_TEACHER,
    "kl": Distillation(loss_type="forward_kl"),
    "reverse": Distillation(loss_type="reverse_kl"),
    "soft": Distillation(loss_type="cross_entropy"),
}
HEAD_METRICS = ("entropy", "accuracy", "perplexity", "mean_logprob", "num_tokens")
#: exponentials over [tokens, vocabulary]: one per softmax
READS = [(ALONE, 1), (WITHOUT_TEACHER, 1), (EVERYTHING, 2)]
PASSES = ("exp", "exp2", "expm1", "log", "tanh", "logistic", "erf", "pow")


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    return make_inputs(0)


def in_jaxpr(jaxpr: Any, shape: tuple[int, ...], found: Counter[str]) -> Counter[str]:
    """Primitives whose result has the logits' shape, in the program and in all that it calls."""
    for equation in jaxpr.eqns:
        if any(getattr(out.aval, "shape", None) == shape for out in equation.outvars):
            found[equation.primitive.name] += 1
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                in_jaxpr(inner, shape, found)
    return found


def jaxpr_of(losses: Any, inputs: dict[str, Any], gradient: bool, **more: Any) -> Any:
    arrays = to_jax(inputs, "float32")
    logits, count = arrays.pop("logits"), arrays.pop("num_segments")

    def call(x: jax.Array, rest: dict[str, Any]) -> Any:
        arguments = {**rest, "num_segments": count, **more}
        if gradient:
            return duohead_jax.monolithic_loss_and_grad(x, losses, **arguments)
        return duohead_jax.monolithic_loss(x, losses, **arguments)

    return jax.make_jaxpr(call)(logits, {key: value for key, value in arrays.items() if value is not None})


def passes_in_jax(losses: Any, inputs: dict[str, Any], gradient: bool) -> dict[str, int]:
    found = in_jaxpr(jaxpr_of(losses, inputs, gradient, metrics=HEAD_METRICS).jaxpr, inputs["logits"].shape, Counter())
    return {name: found[name] for name in PASSES if found[name]}


class Executed(TorchDispatchMode):
    """Counts the operations that are run with a result of one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.found = shape, Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if getattr(result, "shape", None) == self.shape:
            self.found[operation.overloadpacket.__name__] += 1
        return result


def passes_in_torch(losses: Any, inputs: dict[str, Any], gradient: bool) -> dict[str, int]:
    arrays = to_torch(inputs, "float32")
    logits = arrays.pop("logits")

    call = duohead_torch.monolithic_loss_and_grad if gradient else duohead_torch.monolithic_loss
    with Executed(logits.shape) as executed:
        call(logits, losses, **arrays, metrics=HEAD_METRICS, implementation="eager")
    return {name: executed.found[name] for name in (*PASSES, "sigmoid") if executed.found[name]}


@pytest.mark.parametrize(("losses", "softmaxes"), READS)
@pytest.mark.parametrize("passes", [passes_in_jax, passes_in_torch])
def test_one_exponential_in_the_read_and_one_in_the_write(
    losses: Any, softmaxes: int, passes: Any, inputs: dict[str, Any]
) -> None:
    assert passes(losses, inputs, False) == {"exp": softmaxes}
    assert passes(losses, inputs, True) == {"exp": 2 * softmaxes}


def test_another_scale_is_another_softmax(inputs: dict[str, Any]) -> None:
    losses = {"a": CrossEntropy(), "b": CrossEntropy(logits_scale_factor=2.0), "c": GRPO(logits_scale_factor=2.0)}
    assert passes_in_jax(losses, inputs, True) == {"exp": 4}


@token_loss
def same_as_clip(logprob, old_logprobs, advantages, importance_weights, epsilon_low, epsilon_high, delta):  # type: ignore[no-untyped-def]
    return grpo_clip(logprob, old_logprobs, advantages, importance_weights, epsilon_low, epsilon_high, delta)


def test_no_metrics_cost_nothing(inputs: dict[str, Any]) -> None:
    """metrics="none" is, operation for operation, the program of the term alone."""
    delta = 1.5
    quiet = jaxpr_of({"rl": GRPO(delta=delta, metrics="none")}, inputs, True)
    bare = jaxpr_of({"rl": same_as_clip(epsilon_low=0.2, epsilon_high=0.2, delta=delta)}, inputs, True)
    assert str(quiet) == str(bare)
    assert str(quiet) != str(jaxpr_of({"rl": GRPO(delta=delta, metrics="basic")}, inputs, True))


def test_metrics_are_what_was_asked_for(inputs: dict[str, Any]) -> None:
    def reported(loss: Any) -> set[str]:
        return {name.removeprefix("it/") for name in run("torch eager", {"it": loss}, inputs).metrics}

    for make in (GRPO, GSPO):
        assert reported(make()) == set(make.metric_names)
        assert reported(make(metrics="basic")) == set(make.metric_names) - {"entropy"}
        assert reported(make(metrics="none")) == set()
    for loss in (DPO(), SimPO(), ORPO(), KTO()):
        assert reported(loss) == set(loss.metric_names)


# -------------------------------------------------------------------------------------------------------- zero weight


@pytest.mark.parametrize("implementation", ["torch eager", "torch per_loss", "jax eager"])
def test_a_zero_weight_loss_reports_and_writes_nothing(implementation: str, inputs: dict[str, Any]) -> None:
    watched = {"rl": GRPO(beta=0.1), "seq": GSPO(), "dpo": DPO(), "kto": KTO(), "h": EntropyLoss()}
    silent = {name: type(loss)(**{**vars(loss), "weight": 0.0}) for name, loss in watched.items()}
    heard = run(implementation, {**ALONE, **watched}, inputs)
    result = run(implementation, {**ALONE, **silent}, inputs)
    alone = run(implementation, ALONE, inputs)
    assert result.losses == pytest.approx(heard.losses, rel=1e-14)
    assert result.metrics == pytest.approx(heard.metrics, rel=1e-14)
    assert result.loss == pytest.approx(alone.loss, rel=1e-15)
    assert_close(result.gradient, alone.gradient, 1e-15)
    assert not run(implementation, silent, inputs).gradient.any()


@pytest.mark.parametrize("implementation", ["torch eager", "jax eager"])
def test_also_where_its_value_is_infinite(implementation: str, inputs: dict[str, Any]) -> None:
    """A label at −inf: cross-entropy, k2 and DPO are infinite, and with weight 0 only said to be."""
    logits = inputs["logits"].copy()
    row = int(np.flatnonzero(inputs["segment_ids"] == 0)[0])  # in the chosen sequence
    logits[row, inputs["labels"][row]] = -np.inf
    cut = {**inputs, "logits": logits, "preference_pairs": np.array([[0, 1]])}
    silent = {
        "ce": CrossEntropy(weight=0.0),
        "rl": GRPO(weight=0.0, beta=1.0, kl_estimator="k2"),
        "dpo": DPO(weight=0.0),
    }
    result = run(implementation, {**silent, "z": ZLoss()}, cut)
    assert all(result.losses[name] == np.inf for name in silent)
    alone = run(implementation, {"z": ZLoss()}, cut)
    assert result.loss == alone.loss
    np.testing.assert_array_equal(result.gradient, alone.gradient)


# ----------------------------------------------------------------------------------------------------- missing inputs


def test_absent_inputs_matter_only_where_they_are_used(inputs: dict[str, Any]) -> None:
    few = {name: inputs[name] for name in ("logits", "labels", "mask", "advantages")}
    plain = run("torch eager", {"rl": GRPO(objective="reinforce")}, few)
    assert {name.removeprefix("rl/") for name in plain.metrics} == {
        "new_logprobs",
        "advantage",
        "advantage_min",
        "advantage_max",
        "entropy",
        "num_tokens",
    }
    more = {**few, "old_logprobs": inputs["old_logprobs"]}
    assert "rl/ratio_new_old" in run("torch eager", {"rl": GRPO(objective="reinforce")}, more).metrics
    ones = {**more, "importance_weights": np.ones_like(inputs["advantages"])}
    assert run("torch eager", {"rl": GRPO()}, ones).loss == run("torch eager", {"rl": GRPO()}, more).loss
    free = run("torch eager", {"d": DPO()}, {**inputs, "ref_logprobs": None, "advantages": None, "old_logprobs": None})
    assert np.isfinite(free.loss)


@pytest.mark.parametrize(
    ("loss", "absent", "message"),
    [
        (GRPO(), "old_logprobs", r"old_logprobs: loss 'it' \(grpo\) needs it"),
        (GRPO(objective="reinforce"), "advantages", r"advantages: loss 'it' \(grpo\) needs it"),
        (GRPO(objective="reinforce", metrics="basic"), "old_logprobs", "old_logprobs: metrics='basic' of a grpo loss"),
        (GRPO(beta=0.1), "ref_logprobs", r"ref_logprobs: loss 'it' \(grpo\) needs it"),
        (GRPO(reduction="sequence_mean_token_mean"), "segment_ids", "segment_ids: loss 'it' .* needs it for reduction"),
        (GSPO(), "segment_ids", r"segment_ids: loss 'it' \(gspo\) needs it"),
        (DPO(), "preference_pairs", r"preference_pairs: loss 'it' \(dpo\) needs it"),
        (DPO(), "segment_ids", r"segment_ids: loss 'it' \(dpo\) needs it"),
        (DPO(reference_model="ref"), "ref_logprobs", r"ref_logprobs: loss 'it' \(dpo\) needs it"),
        (KTO(), "advantages", r"advantages: loss 'it' \(kto\) needs it"),
        (GRPO(), "labels", r"labels: loss 'it' \(grpo\) needs them"),
        (SimPO(), "labels", r"labels: loss 'it' \(simpo\) needs them"),
    ],
)
@pytest.mark.parametrize("implementation", ["torch eager", "jax eager"])
def test_what_is_missing_is_named(
    loss: Any, absent: str, message: str, implementation: str, inputs: dict[str, Any]
) -> None:
    given = {**inputs, absent: None}
    if absent == "segment_ids":
        given["num_segments"] = None
    with pytest.raises(ValueError, match=message):
        run(implementation, {"it": loss}, given)


def test_ranges_are_checked_where_they_can_be(inputs: dict[str, Any]) -> None:
    ids = inputs["segment_ids"].copy()
    ids[0] = 5
    with pytest.raises(ValueError, match="segment_ids: must be < num_segments = 5"):
        run("torch eager", {"it": GSPO()}, {**inputs, "segment_ids": ids})
    with pytest.raises(ValueError, match="preference_pairs: must be < num_segments = 5"):
        run("torch eager", {"it": DPO()}, {**inputs, "preference_pairs": np.array([[0, 9]])})
    # where nothing may be read back, the loss shows it
    shown = run("jax eager", {"it": GSPO(), "d": DPO()}, {**inputs, "segment_ids": ids})
    assert np.isnan(shown.losses["it"])
    assert np.isnan(shown.losses["d"])
    wrong = run("jax eager", {"it": GSPO(), "d": DPO()}, {**inputs, "preference_pairs": np.array([[0, 9], [0, 1]])})
    assert np.isnan(wrong.losses["d"])
    assert np.isfinite(wrong.losses["it"])
