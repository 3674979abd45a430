"""The engine's two halves under torch.compile: one graph each, one program per plan."""

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from duohead import engine
from duohead_torch import runner
from duohead_torch.runner import EagerRunner, Job, Setting, Written
from duohead_torch.triton import pick_triton


@functools.lru_cache(maxsize=256)
def _evaluate_program(plan: Any, setting: Setting) -> Callable[..., engine.Evaluation]:
    def run(logits: torch.Tensor, hyper: tuple[torch.Tensor, ...], inputs: Any) -> engine.Evaluation:
        return runner.evaluate(Job(plan, hyper, inputs), setting, logits)

    return compile_program(run)


@functools.lru_cache(maxsize=256)
def _gradient_program(plans: tuple[Any, ...], setting: Setting, accumulate: bool) -> Callable[..., None]:
    def run(logits: torch.Tensor, rest: Any, upstream: torch.Tensor, out: torch.Tensor) -> None:
        written = tuple(
            Written(Job(plan, hyper, inputs), normalisers, coefficients)
            for plan, (hyper, inputs, normalisers, coefficients) in zip(plans, rest, strict=True)
        )
        total = runner.gradient(written, setting, logits, upstream)
        out.copy_(out + total if accumulate else total)

    return compile_program(run)


def compile_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a copy of the function with a code object of its own: Dynamo counts recompiles per code object."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_serial)}")
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    # Without it each process picks its reductions by timing them, and ranks of one group could differ in the last bit.
    return torch.compile(copy, fullgraph=True, options={"deterministic": True})


_serial = itertools.count()


class CompiledRunner:
    """Runs both halves as compiled programs, cached per plan."""

    name = "compiled"

    def gives_gradient(self, jobs: tuple[Job, ...], setting: Setting) -> bool:
        """Whether one launch evaluates and writes the gradient: no, both halves read the logits."""
        return False

    def evaluate(self, jobs: tuple[Job, ...], setting: Setting, logits: torch.Tensor) -> list[engine.Evaluation]:
        return [_evaluate_program(job.plan, setting)(logits, job.hyper, job.inputs) for job in jobs]

    def gradient(
        self,
        written: tuple[Written, ...],
        setting: Setting,
        logits: torch.Tensor,
        upstream: torch.Tensor,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> torch.Tensor:
        """The gradient in the logits' dtype, rounded once; ``out`` takes (or adds) it in place."""
        target = torch.empty_like(logits) if out is None else out
        rest = tuple((item.job.hyper, item.job.inputs, item.normalisers, item.coefficients) for item in written)
        plans = tuple(item.job.plan for item in written)
        _gradient_program(plans, setting, accumulate)(logits, rest, upstream, target)
        return target


@functools.cache
def compiler_fault() -> str | None:
    """Why torch.compile cannot run on the CPU here, or None."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # inductor raises several types here
        return str(error).strip().split("\n")[0] or type(error).__name__
    return None


@functools.cache
def _warn_eager(reason: str) -> None:
    warnings.warn(
        f"duohead: no C++ compiler was found ({reason}); implementation='auto' runs eagerly on the CPU. "
        "Install g++ or clang++, or set CXX, to get the compiled path.",
        RuntimeWarning,
        stacklevel=4,
    )


def pick_runner(implementation: str, logits: torch.Tensor, jobs: tuple[Job, ...]) -> Any:
    """The runner of an implementation; inside a user's torch.compile the eager one is traced into the graph."""
    if implementation == "triton" or (implementation == "auto" and logits.device.type == "cuda"):
        found = pick_triton(implementation, logits, jobs)
        if found is not None:
            return found
    if torch.compiler.is_compiling() or implementation in ("eager", "per_loss"):
        return EagerRunner()
    fault = compiler_fault() if logits.device.type == "cpu" else None
    if implementation == "compiled" and fault is not None:
        raise RuntimeError(f"implementation='compiled' needs a C++ compiler on the CPU (g++ or clang++): {fault}")
    if fault is not None:
        _warn_eager(fault)
        return EagerRunner()
    return CompiledRunner()
