"""With the global counts, micro-batches add up to the whole batch: losses, gradients, and metrics joined from parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from policy_inputs import (
    LOSSES,
    Run,
    assert_close,
    in_every_reduction,
    make_inputs,
    reductions_of,
    run,
    with_reduction,
)

import duohead_torch
from duohead import GRPO
from duohead.metrics import ExpMean, Maximum, Mean, Minimum, Total, combine, finish_all

PAIRS = np.array([[0, 1], [2, 1], [3, 4], [-1, -1], [4, 3]])
#: segments that share a pair stay together
FAMILIES = ({0, 1, 2}, {3, 4}, {5}, {6})
PER_TOKEN = ("labels", "mask", "advantages", "old_logprobs", "ref_logprobs", "importance_weights", "segment_ids")
HEAD_METRICS = ("entropy", "accuracy", "perplexity", "mean_logprob", "num_tokens")


def whole_batch(seed: int) -> dict[str, Any]:
    return {**make_inputs(seed, tokens=24, segments=8), "preference_pairs": PAIRS}


def exists(inputs: dict[str, Any]) -> np.ndarray:
    return inputs["mask"] & (inputs["labels"] >= 0)


def counts(inputs: dict[str, Any]) -> dict[str, int]:
    ids = inputs["segment_ids"][exists(inputs)]
    return {
        "num_tokens": int(exists(inputs).sum()),
        "num_sequences": len(set(ids[ids >= 0].tolist())),
        "num_pairs": int((inputs["preference_pairs"] >= 0).all(-1).sum()),
    }


def split(inputs: dict[str, Any], seed: int, parts: int) -> list[np.ndarray]:
    """Which rows go to which part; a part may be empty."""
    r = np.random.default_rng(seed)
    owner = r.integers(0, parts, len(inputs["labels"]))  # rows of no segment go anywhere
    for family in FAMILIES:
        owner[np.isin(inputs["segment_ids"], list(family))] = r.integers(0, parts)
    return [owner == part for part in range(parts)]


def pairs_of(inputs: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    """The pairs whose sequences are here; the others become padding."""
    here = set(inputs["segment_ids"][rows].tolist())
    return np.array([pair if set(pair.tolist()) <= here else [-1, -1] for pair in inputs["preference_pairs"]])


def sliced(inputs: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """A micro-batch of these rows alone."""
    part = {**inputs, "logits": inputs["logits"][rows], "preference_pairs": pairs_of(inputs, rows)}
    part["teacher_logits"] = {"teacher": inputs["teacher_logits"]["teacher"][rows]}
    return {**part, **{name: inputs[name][rows] for name in PER_TOKEN}}


def masked(inputs: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """The same with every row kept, the others masked: one shape for all parts."""
    return {**inputs, "mask": inputs["mask"] & rows, "preference_pairs": pairs_of(inputs, rows)}


def add_up(inputs: dict[str, Any], runs: list[Run], rows: list[np.ndarray]) -> Run:
    gradient = np.zeros_like(inputs["logits"])
    for one, mine in zip(runs, rows, strict=True):
        gradient[mine] += one.gradient if len(one.gradient) == mine.sum() else one.gradient[mine]
    losses = {name: sum(one.losses[name] for one in runs) for name in runs[0].losses}
    return Run(sum(one.loss for one in runs), losses, finish_all(combine([one.parts for one in runs])), {}, gradient)


def check_metrics(added: dict[str, float], whole: dict[str, float], tolerance: float) -> None:
    assert added.keys() == whole.keys()
    for name, value in whole.items():
        if name.endswith(("_min", "_max", "num_tokens", "num_segments", "accuracy", "fraction")):
            assert added[name] == value, name
        else:
            assert added[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
def test_all_losses_in_all_reductions(parts: int, dtype: str, tolerance: float) -> None:
    inputs = whole_batch(parts)
    losses = in_every_reduction()
    whole = run("torch eager", losses, inputs, dtype, metrics=HEAD_METRICS)
    rows = split(inputs, parts, parts)
    runs = [
        run("torch eager", losses, sliced(inputs, mine), dtype, metrics=HEAD_METRICS, **counts(inputs)) for mine in rows
    ]
    added = add_up(inputs, runs, rows)
    assert_close(added.loss, whole.loss, tolerance)
    for name, value in whole.losses.items():
        assert_close(added.losses[name], value, tolerance, name)
    assert_close(added.gradient, whole.gradient, tolerance)
    check_metrics(added.metrics, finish_all(whole.parts), 1e-12 if dtype == "float64" else 2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_by_itself(name: str) -> None:
    inputs = whole_batch(7)
    for turn, reduction in enumerate(reductions_of(LOSSES[name])):
        losses = {"it": with_reduction(LOSSES[name], reduction)}
        whole = run("torch eager", losses, inputs)
        rows = split(inputs, turn, 3)
        runs = [run("torch eager", losses, sliced(inputs, mine), **counts(inputs)) for mine in rows]
        added = add_up(inputs, runs, rows)
        assert added.loss == pytest.approx(whole.loss, rel=1e-12)
        assert_close(added.gradient, whole.gradient, 1e-12)
        check_metrics(added.metrics, finish_all(whole.parts), 1e-12)


@pytest.mark.parametrize("parts", [2, 5])
def test_in_jax(parts: int) -> None:
    inputs = whole_batch(parts + 20)
    whole = run("jax eager", LOSSES, inputs, metrics=HEAD_METRICS)
    rows = split(inputs, parts, parts)
    runs = [run("jax eager", LOSSES, masked(inputs, mine), metrics=HEAD_METRICS, **counts(inputs)) for mine in rows]
    added = add_up(inputs, runs, rows)
    assert_close(added.loss, whole.loss, 1e-12)
    for name, value in whole.losses.items():
        assert_close(added.losses[name], value, 1e-12, name)
    assert_close(added.gradient, whole.gradient, 1e-12)
    check_metrics(added.metrics, finish_all(whole.parts), 1e-12)


def test_accumulated_into_one_buffer() -> None:
    """The gradient of micro-batches that share their logits' rows is added up by ``accumulate``."""
    inputs = {key: torch.tensor(value) for key, value in make_inputs(3).items() if isinstance(value, np.ndarray)}
    logits, mask = torch.nan_to_num(inputs.pop("logits")), inputs.pop("mask")
    arguments = {**inputs, "num_segments": 5, "num_tokens": int((mask & (inputs["labels"] >= 0)).sum())}
    _, whole = duohead_torch.monolithic_loss_and_grad(
        logits, {"rl": GRPO()}, mask=mask, implementation="eager", **arguments
    )
    out = torch.zeros_like(logits)
    even = torch.arange(14) % 2 == 0
    for rows in (even, ~even):
        duohead_torch.monolithic_loss_and_grad(
            logits, {"rl": GRPO()}, mask=mask & rows, implementation="eager", out=out, accumulate=True, **arguments
        )
    torch.testing.assert_close(out, whole, rtol=1e-13, atol=1e-18)


# ------------------------------------------------------------------------------------------------------ combined parts


def test_every_kind_combines() -> None:
    first = {"a": Mean(1.0, 1.0), "b": Minimum(3.0, 1.0), "c": Maximum(3.0, 1.0), "d": Total(2.0, 1.0)}
    other = {"a": Mean(5.0, 3.0), "b": Minimum(2.0, 1.0), "c": Maximum(7.0, 1.0), "d": Total(0.5, 1.0)}
    assert finish_all(combine([first, other])) == {"a": 1.5, "b": 2.0, "c": 7.0, "d": 2.5}
    perplexity = combine([{"p": ExpMean(2.0, 1.0)}, {"p": ExpMean(1.0, 2.0)}])
    assert finish_all(perplexity)["p"] == pytest.approx(np.e)
    with pytest.raises(ValueError, match=r"parts: all must hold the same metrics, got \['a'\] and \['b'\]"):
        combine([{"a": Mean(0.0, 1.0)}, {"b": Mean(0.0, 1.0)}])


@pytest.mark.parametrize("make", [float, torch.tensor, np.float64])
def test_a_missing_value_stays_visible(make: Any) -> None:
    for values in ((np.nan, 1.0), (1.0, np.nan)):
        for kind in (Minimum, Maximum):
            joined = combine([{"m": kind(make(value), make(1.0))} for value in values])
            assert np.isnan(finish_all(joined)["m"])


def test_parts_combine_inside_jit() -> None:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def joined(a: jax.Array, b: jax.Array) -> Any:
        one = jnp.ones(())
        return combine([{"low": Minimum(x, one), "high": Maximum(x, one), "sum": Total(x, one)} for x in (a, b)])

    assert finish_all(joined(jnp.array(2.0), jnp.array(-1.0))) == {"low": -1.0, "high": 2.0, "sum": 1.0}
