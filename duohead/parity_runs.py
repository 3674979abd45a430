"""Runs one head on the same inputs in every implementation of both frameworks, and in the float64 reference."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from duohead.kernels.eligible import why_not
from duohead.parity_inputs import BIG, INTEGERS, compute_dtype
from duohead.reference import reference
from duohead.spec import HeadSpec

Array = np.ndarray


class Outcome(NamedTuple):
    """What one implementation gave, as float64."""

    name: str
    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    gradient: Array


class Implementation(NamedTuple):
    """One way to run a head; ``missing`` is why this machine cannot, or None."""

    name: str
    missing: str | None
    run: Callable[[HeadSpec, Mapping[str, Any], str], Outcome]


class Found(NamedTuple):
    """What is on this machine: a line for each framework, and every implementation."""

    frameworks: dict[str, str]
    implementations: list[Implementation]


def installed(name: str) -> bool:
    """Whether a package can be imported here."""
    return importlib.util.find_spec(name) is not None


def find(head: HeadSpec, dtype: str, device: str) -> Found:
    """Every implementation, present or not; ``device`` is ``auto``, ``cpu`` or ``cuda``."""
    frameworks: dict[str, str] = {}
    implementations: list[Implementation] = []
    for framework, look in (("torch", _find_torch), ("jax", _find_jax)):
        if not installed(framework):
            frameworks[framework] = "not installed"
            continue
        frameworks[framework], found = look(head, dtype, device)
        implementations += found
    return Found(frameworks, implementations)


def _kernel_fault(head: HeadSpec, dtype: str) -> str | None:
    if not installed("triton"):
        return "triton is not installed"
    if dtype == "float64":
        return "the kernel computes in float32"
    for name, reason in why_not(head.losses).items():
        return f"the kernel cannot take {name}: {reason}"
    return None


# ---------------------------------------------------------------------------------------------------------- torch


def _find_torch(head: HeadSpec, dtype: str, device: str) -> tuple[str, list[Implementation]]:
    import torch

    from duohead_torch.compiled import compiler_fault

    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        return f"{torch.__version__}: no CUDA device", []
    where = "cuda" if gpu and device != "cpu" else "cpu"
    fault = compiler_fault() if where == "cpu" else None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kernel = _kernel_fault(head, dtype)
    if kernel is None and where == "cpu" and not interpreted:
        kernel = "no CUDA device (TRITON_INTERPRET=1 runs the kernel's source on the CPU)"

    def implementation(name: str, missing: str | None = None) -> Implementation:
        def run(spec: HeadSpec, inputs: Mapping[str, Any], run_dtype: str) -> Outcome:
            return _run_torch(name, where, spec, inputs, run_dtype)

        return Implementation(f"torch {name}", missing, run)

    return f"{torch.__version__} on {where}", [
        implementation("eager"),
        implementation("compiled", None if fault is None else f"no C++ compiler: {fault}"),
        implementation("per_loss"),
        implementation("triton", kernel),
    ]


def _run_torch(name: str, device: str, head: HeadSpec, inputs: Mapping[str, Any], dtype: str) -> Outcome:
    import torch

    from duohead_torch import monolithic_loss

    def convert(key: str, array: Array) -> Any:
        return torch.tensor(array, device=device).to(getattr(torch, _held_in(key, array, dtype)))

    given = _convert_all(inputs, convert)
    logits = given.pop("logits").requires_grad_()
    loss, aux = monolithic_loss(logits, head, implementation=name, **given)
    loss.backward()
    return _outcome(f"torch {name}", loss.detach(), aux, logits.grad.double().cpu().numpy())


# ------------------------------------------------------------------------------------------------------------ jax


def _find_jax(head: HeadSpec, dtype: str, device: str) -> tuple[str, list[Implementation]]:
    import jax

    try:
        platform = jax.devices("cpu" if device == "cpu" else None)[0].platform
    except RuntimeError as error:
        return f"{jax.__version__}: {error}", []
    if device == "cuda" and platform == "cpu":
        return f"{jax.__version__}: no CUDA device", []
    kernel = _kernel_fault(head, dtype)
    if kernel is None and platform == "cpu":
        kernel = "no CUDA device"
    if kernel is None and not installed("jax_triton"):
        kernel = "jax-triton is not installed"

    def implementation(name: str, missing: str | None = None) -> Implementation:
        def run(spec: HeadSpec, inputs: Mapping[str, Any], run_dtype: str) -> Outcome:
            with jax.default_device(jax.devices(platform)[0]):
                return _run_jax(name, spec, inputs, run_dtype)

        return Implementation(f"jax {name}", missing, run)

    return f"{jax.__version__} on {platform}", [
        implementation("xla"),
        implementation("per_loss"),
        implementation("triton", kernel),
    ]


def _run_jax(name: str, head: HeadSpec, inputs: Mapping[str, Any], dtype: str) -> Outcome:
    import jax
    import jax.numpy as jnp

    from duohead_jax import monolithic_loss

    def convert(key: str, array: Array) -> Any:
        return jnp.asarray(array, _held_in(key, array, dtype))

    wide = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", wide or dtype == "float64")
    try:
        given = _convert_all(inputs, convert)
        logits = given.pop("logits")

        def call(x: Any) -> Any:
            return monolithic_loss(x, head, implementation=name, **given)

        (loss, aux), gradient = jax.value_and_grad(call, has_aux=True)(logits)
        widest = "float64" if dtype == "float64" else "float32"
        return _outcome(f"jax {name}", loss, aux, np.asarray(gradient.astype(widest), np.float64))
    finally:
        jax.config.update("jax_enable_x64", wide)


# ----------------------------------------------------------------------------------------------------------- both


def _held_in(key: str, array: Array, dtype: str) -> str:
    if array.dtype.kind == "f":
        return dtype if key in BIG else compute_dtype(dtype)
    return "int32" if key in INTEGERS else "bool"


def _convert_all(inputs: Mapping[str, Any], convert: Callable[[str, Array], Any]) -> dict[str, Any]:
    done: dict[str, Any] = {}
    for key, value in inputs.items():
        if isinstance(value, Mapping):
            done[key] = {name: convert(key, array) for name, array in value.items()}
        else:
            done[key] = convert(key, value) if isinstance(value, np.ndarray) else value
    return done


def _outcome(name: str, loss: Any, aux: Any, gradient: Array) -> Outcome:
    return Outcome(
        name,
        float(loss),
        {key: float(value) for key, value in aux.losses.items()},
        {key: float(value) for key, value in aux.metrics.items()},
        gradient,
    )


def run_reference(head: HeadSpec, inputs: Mapping[str, Any], implementations: list[Implementation]) -> Outcome:
    """The float64 reference; for loss types that it does not know, a present implementation in float64."""
    own = [loss.type for loss in head.losses.values() if not type(loss).__module__.startswith("duohead.")]
    if own:
        chosen = next(item for item in implementations if item.missing is None and "triton" not in item.name)
        return chosen.run(head, inputs, "float64")._replace(
            name=f"{chosen.name} in float64 (the reference does not know {', '.join(sorted(set(own)))})"
        )
    arguments = {key: value for key, value in inputs.items() if key != "logits"}
    found = reference(inputs["logits"], head.to_dict(), vocab_size=head.vocab_size, **arguments)
    return Outcome("duohead.reference in float64", found.loss, found.losses, found.metrics, found.logits_grad)
