"""Every implementation as one function: a head's configuration and NumPy inputs → loss, losses, metrics, gradient.

Inputs are float64 arrays whose numbers are exact in ``dtype`` (logits, teachers) or in its compute dtype (the rest).
Results are float64, so that one comparison serves all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from duohead import engine, numpy_namespace
from duohead.plan import Plan
from duohead.prepare import check_arguments, make_passes
from duohead.seam import seam
from duohead.spec import HeadSpec
from duohead.statistics import Columns, Inputs, add_jsd, finish, fold, merge, read, read_jsd, write
from duohead_jax import api as jax_api
from duohead_jax import namespace as jax_namespace
from duohead_jax import xla
from duohead_torch import api as torch_api
from duohead_torch import namespace as torch_namespace
from helpers import to_jax, to_torch


class Outcome(NamedTuple):
    """What one implementation gives, in float64."""

    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    gradient: np.ndarray


Head = Mapping[str, Any]
Arguments = Mapping[str, Any]
Run = Callable[[Head, Arguments, str], Outcome]

#: what the head's configuration holds beside its losses is given to the call
_DEFAULTS = {
    "labels": None,
    "mask": None,
    "teacher_logits": None,
    "advantages": None,
    "old_logprobs": None,
    "ref_logprobs": None,
    "importance_weights": None,
    "segment_ids": None,
    "preference_pairs": None,
    "num_segments": None,
    "num_tokens": None,
    "num_sequences": None,
    "num_pairs": None,
    "logits_scale_factor": 1.0,
    "final_logit_softcap": None,
    "vocab_size": None,
    "metrics": (),
    "tokens": (),
    "implementation": "auto",
}


def head_spec(head: Head) -> HeadSpec:
    """The HeadSpec of a configuration whose metrics are written as the oracle takes them, ``head/entropy`` too."""
    config = dict(head)
    config["metrics"] = tuple(name.removeprefix("head/") for name in head.get("metrics", ()))
    return HeadSpec.from_dict(config)


def compute_of(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


# --- the core under NumPy, whole or in shards --------------------------------------------------------------------------


def _passes(head: Head, inputs: Arguments) -> tuple[Any, list[Any]]:
    arguments = {**_DEFAULTS, **{key: value for key, value in inputs.items() if key != "logits"}}
    checked = check_arguments(inputs["logits"], losses=head_spec(head), **arguments)
    return checked, make_passes(checked)


def _valid(labels: Any, mask: Any, logits: Any, ones: Callable[[Any], Any]) -> Any:
    if labels is None:
        return ones(logits.shape[:-1]) if mask is None else mask
    return labels >= 0 if mask is None else (labels >= 0) & mask


@np.errstate(all="ignore")
def run_numpy(head: Head, inputs: Arguments, dtype: str) -> Outcome:
    """The core in float64 with no framework, whatever the dtype of the inputs."""
    return _run_core(numpy_namespace, head, inputs, lambda values, _: [np.float64(v) for v in values], (), np.ones)


def _run_core(
    xp: Any, head: Head, inputs: Arguments, hyper_of: Any, cuts: Sequence[int], ones: Callable[[Any], Any]
) -> Outcome:
    """One pass over the columns between ``cuts``: read by each shard, merged, and written by each shard."""
    logits = inputs["logits"]
    checked, passes = _passes(head, inputs)
    item = passes[0]
    size = logits.shape[-1] if checked.vocab_size is None else checked.vocab_size
    padded = size < logits.shape[-1]
    hyper = hyper_of(item.hyper, logits)
    valid = _valid(checked.labels, checked.mask, logits, ones)
    shards = _shards(item, checked, valid, logits, size, padded, cuts)
    evaluation = _evaluate_shards(xp, item.plan, hyper, shards)
    one = xp.ones_like(evaluation.loss)
    written = [
        engine.gradient(xp, item.plan, hyper, part, given, columns, evaluation.normalisers, evaluation.coefficients, one)
        for part, given, columns in shards
    ]
    gradient = xp.cast(xp.concatenate(written), logits.dtype)
    return _outcome(evaluation.loss, evaluation.aux, gradient)


def _shards(
    item: Any, checked: Any, valid: Any, logits: Any, size: int, padded: bool, cuts: Sequence[int]
) -> list[tuple[Any, Inputs, Columns]]:
    edges = [0, *cuts, logits.shape[-1]]
    return [
        (
            logits[..., a:b],
            Inputs(
                checked.labels,
                valid,
                tuple(teacher[..., a:b] for teacher in item.teachers),
                item.tokens,
                checked.segment_ids,
                checked.preference_pairs,
                checked.num_segments,
            ),
            Columns(a, size, padded),
        )
        for a, b in zip(edges, edges[1:], strict=False)
    ]


def _evaluate_shards(xp: Any, plan: Plan, hyper: Any, shards: Sequence[tuple[Any, Inputs, Columns]]) -> Any:
    part, inputs, columns = shards[0]
    if len(shards) == 1:
        return engine.evaluate(xp, plan, hyper, part, inputs, columns)
    packed = xp.stack([xp.stack(read(xp, plan, hyper, *shard)) for shard in shards])
    starts = np.array([columns.start for _, _, columns in shards])
    ends = starts + np.array([part.shape[-1] for part, _, _ in shards])
    own = {"torch": torch.tensor, "jax": jnp.asarray, "numpy": np.asarray}[xp.name]
    rows = merge(xp, plan, packed, inputs.labels, own(starts), own(ends))
    statistics, normalisers = finish(xp, plan, rows, inputs, columns)
    if plan.has_jsd:
        second = [read_jsd(xp, plan, hyper, *shard, normalisers) for shard in shards]
        add_jsd(plan, [xp.sum_first(xp.stack(list(row))) for row in zip(*second, strict=True)], statistics)
    result = seam(xp, plan, hyper, statistics, inputs)
    coefficients = fold(xp, plan, hyper, statistics, result.cotangents, columns)
    return engine.Evaluation(result.loss, result.aux, normalisers, coefficients)


def _outcome(loss: Any, aux: Any, gradient: Any) -> Outcome:
    if isinstance(gradient, torch.Tensor):
        gradient = gradient.detach().to(torch.float64).numpy()
        loss = loss.detach()
    return Outcome(float(loss), _numbers(aux.losses), _numbers(aux.metrics), np.asarray(gradient, np.float64))


def _cuts(columns: int, shards: int) -> list[int]:
    """Uneven edges: the first shard takes what is left over; no more shards than columns."""
    shards = min(shards, columns)
    width = columns // shards
    return [columns - width * k for k in range(shards - 1, 0, -1)]


def shards_torch(shards: int) -> Run:
    """The vocabulary in shards of torch tensors, merged in one process."""

    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        from duohead_torch.hyper import hyper_tensors

        given = to_torch(dict(inputs), dtype)
        cuts = _cuts(given["logits"].shape[-1], shards)
        ones = lambda shape: torch.ones(shape, dtype=torch.bool)  # noqa: E731
        return _run_core(torch_namespace, head, given, hyper_tensors, cuts, ones)

    return run


def shards_jax(shards: int) -> Run:
    """The vocabulary in shards of JAX arrays, merged in one process, op by op."""

    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        given = to_jax(dict(inputs), dtype)
        cuts = _cuts(given["logits"].shape[-1], shards)
        return _run_core(jax_namespace, head, given, xla.hyper_vector, cuts, lambda shape: jnp.ones(shape, bool))

    return run


def shards_numpy(shards: int) -> Run:
    """The same in shards."""

    @np.errstate(all="ignore")
    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        cuts = _cuts(inputs["logits"].shape[-1], shards)
        hyper_of = lambda values, _: [np.float64(value) for value in values]  # noqa: E731
        return _run_core(numpy_namespace, head, inputs, hyper_of, cuts, np.ones)

    return run


# --- PyTorch -----------------------------------------------------------------------------------------------------------


def torch_autograd(implementation: str) -> Run:
    """``monolithic_loss`` and ``backward``."""

    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        given = to_torch(dict(inputs), dtype)
        logits = given.pop("logits").requires_grad_()
        loss, aux = torch_api.monolithic_loss(logits, head_spec(head), **given, implementation=implementation)
        loss.backward()
        return _outcome(loss, aux, logits.grad)

    return run


# --- JAX ---------------------------------------------------------------------------------------------------------------


def jax_jit(implementation: str) -> Run:
    """``value_and_grad`` of ``monolithic_loss``: compiled for every plan and shape."""

    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        given = to_jax(dict(inputs), dtype)
        logits = given.pop("logits")

        def loss_of(values: Any) -> Any:
            return jax_api.monolithic_loss(values, head_spec(head), **given, implementation=implementation)

        (loss, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(logits)
        return _outcome(loss, aux, gradient)

    return run


def run_jax_eager(head: Head, inputs: Arguments, dtype: str) -> Outcome:
    """Op by op: a random plan costs no compilation of its own."""
    given = to_jax(dict(inputs), dtype)
    logits = given.pop("logits")
    with jax.disable_jit():
        (loss, aux), gradient = jax_api.monolithic_loss_and_grad(
            logits, head_spec(head), **given, implementation="xla"
        )
    return _outcome(loss, aux, gradient)


#: cheap ones, for many random plans
FAST: dict[str, Run] = {
    "numpy": run_numpy,
    "numpy_4_shards": shards_numpy(4),
    "torch_eager": torch_autograd("eager"),
    "torch_per_loss": torch_autograd("per_loss"),
    "torch_2_shards": shards_torch(2),
    "torch_4_shards": shards_torch(4),
    "jax_eager": run_jax_eager,
    "jax_2_shards": shards_jax(2),
}
#: compile each plan (seconds), for a chosen few
SLOW: dict[str, Run] = {
    "torch_compiled": torch_autograd("compiled"),
    "jax_xla": jax_jit("xla"),
    "jax_per_loss": jax_jit("per_loss"),
}
#: the kernel in the interpreter, in a process of its own (TRITON_INTERPRET=1); with interpretation off it needs a GPU
TRITON: dict[str, Run] = {}
if os.environ.get("TRITON_INTERPRET") == "1":
    TRITON["torch_triton"] = torch_autograd("triton")
IMPLEMENTATIONS: dict[str, Run] = {**FAST, **SLOW, **TRITON}
