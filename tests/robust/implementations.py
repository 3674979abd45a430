"""Every implementation as one function: a head's configuration and NumPy inputs → loss, losses, metrics, gradient.

Inputs are float64 arrays whose numbers are exact in ``dtype`` (logits, teachers) or in its compute dtype (the rest).
Results are float64, so that one comparison serves all.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from helpers import to_jax, to_torch
from torch.utils._pytree import tree_map_only

from duohead_jax import api as jax_api
from duohead_jax import namespace as jax_namespace
from duohead_jax.xla import hyper_vector
from duohead_torch import api as torch_api
from duohead_torch import namespace as torch_namespace
from duohead_torch.hyper import hyper_tensors
from robust.core_runs import Arguments, Head, Outcome, Run, cuts_of, head_spec, numpy_shards, outcome, run_core


def of_torch(loss: torch.Tensor, aux: Any, gradient: Any) -> Outcome:
    """torch has no bfloat16 in NumPy."""
    return outcome(loss.detach().cpu(), _on("cpu", aux), gradient.detach().to("cpu", torch.float64))


def _on(device: str, value: Any) -> Any:
    """The value with its tensors on a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


# --- shards in one process ---


def shards_torch(shards: int) -> Run:
    """The vocabulary in shards of torch tensors, merged in one process."""

    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        given = to_torch(dict(inputs), dtype)
        cuts = cuts_of(given["logits"].shape[-1], shards)
        ones = lambda shape: torch.ones(shape, dtype=torch.bool)  # noqa: E731
        return run_core(torch_namespace, head, given, hyper_tensors, cuts, ones, torch.tensor)

    return run


def shards_jax(shards: int) -> Run:
    """The vocabulary in shards of JAX arrays, merged in one process, op by op."""

    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        given = to_jax(dict(inputs), dtype)
        cuts = cuts_of(given["logits"].shape[-1], shards)
        ones = lambda shape: jnp.ones(shape, bool)  # noqa: E731
        return run_core(jax_namespace, head, given, hyper_vector, cuts, ones, jnp.asarray)

    return run


# --- PyTorch ---


def torch_autograd(implementation: str, device: str = "cpu") -> Run:
    """``monolithic_loss`` and ``backward``."""

    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        given = {name: _on(device, value) for name, value in to_torch(dict(inputs), dtype).items()}
        logits = given.pop("logits").requires_grad_()
        with np.errstate(all="ignore"):  # Triton's interpreter computes in NumPy
            loss, aux = torch_api.monolithic_loss(logits, head_spec(head), **given, implementation=implementation)
            loss.backward()
        return of_torch(loss, aux, logits.grad)

    return run


# --- JAX ---


def jax_jit(implementation: str) -> Run:
    """``value_and_grad`` of ``monolithic_loss``: compiled for every plan and shape."""

    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        given = to_jax(dict(inputs), dtype)
        logits = given.pop("logits")

        def loss_of(values: Any) -> Any:
            return jax_api.monolithic_loss(values, head_spec(head), **given, implementation=implementation)

        (loss, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(logits)
        return outcome(loss, aux, gradient)

    return run


def run_jax_eager(head: Head, inputs: Arguments, dtype: str) -> Outcome:
    """Op by op: a random plan costs no compilation of its own."""
    given = to_jax(dict(inputs), dtype)
    logits = given.pop("logits")
    with jax.disable_jit():
        (loss, aux), gradient = jax_api.monolithic_loss_and_grad(logits, head_spec(head), **given, implementation="xla")
    return outcome(loss, aux, gradient)


#: cheap ones, for many random plans
FAST: dict[str, Run] = {
    "numpy": numpy_shards(1),
    "numpy_4_shards": numpy_shards(4),
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
#: the kernel in the interpreter, in a process of its own (TRITON_INTERPRET=1), or on a GPU
TRITON: dict[str, Run] = {}
if os.environ.get("TRITON_INTERPRET") == "1":
    TRITON["torch_triton"] = torch_autograd("triton")
elif torch.cuda.is_available():
    TRITON["torch_triton"] = torch_autograd("triton", "cuda")
IMPLEMENTATIONS: dict[str, Run] = {**FAST, **SLOW, **TRITON}
