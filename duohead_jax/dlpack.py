"""Torch tensors as JAX arrays on the same memory."""

from __future__ import annotations

import sys
from typing import Any

import jax

DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "int16", "int8", "uint8", "bool")
#: what JAX holds only where jax_enable_x64 is set, and the torch call that makes what it always holds
WIDE = {"float64": "tensor.float()", "int64": "tensor.int()"}
#: bytes: XLA shares only memory that begins at a multiple of this on the CPU
ALIGNMENT = 64


def from_torch(tensor: Any) -> jax.Array:
    """The JAX array on a torch tensor's memory: nothing is copied.

    JAX takes arrays for constant, so do not write to the tensor while the array lives, and do not donate the array.
    It carries no gradient between the frameworks.

    Args:
        tensor: a dense ``torch.Tensor`` without gradient, contiguous or a transposed view of a contiguous one, on a
            device that JAX has too. ``int64`` and ``float64`` need ``jax_enable_x64``.

    Raises:
        TypeError: no ``torch.Tensor``, or of a type that JAX cannot share.
        ValueError: the tensor requires gradient, has strides or an address that JAX cannot share, or lies on a device
            that this JAX does not have.

    >>> import torch
    >>> from_torch(torch.arange(3.0)).tolist()
    [0.0, 1.0, 2.0]
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor: must be a torch.Tensor, got {type(tensor).__module__}.{type(tensor).__name__}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(f"tensor: must be one of {', '.join(DTYPES)}, got {dtype}")
    if dtype in WIDE and not jax.config.read("jax_enable_x64"):
        raise TypeError(f"tensor: JAX holds no {dtype} unless jax_enable_x64 is set; pass {WIDE[dtype]}, which copies")
    if tensor.requires_grad:
        raise ValueError("tensor: requires gradient, which JAX does not carry on; pass tensor.detach()")
    _check_device(tensor.device.type)
    _check_layout(tensor, torch)
    array = jax.numpy.from_dlpack(tensor, copy=False)
    if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise ValueError("tensor: JAX could not share its memory")
    return array


def _check_device(kind: str) -> None:
    platform = {"cpu": "cpu", "cuda": "gpu"}.get(kind)
    try:
        found = platform is not None and bool(jax.devices(platform))
    except RuntimeError:
        found = False
    if not found:
        raise ValueError(f"tensor: lies on a {kind} device, which this JAX ({jax.__version__}) does not have")


def _check_layout(tensor: Any, torch: Any) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor: must be dense, got the layout {tensor.layout}; pass tensor.to_dense()")
    if not _is_compact(tensor):
        raise ValueError(
            f"tensor: must be contiguous or a transposed view of a contiguous tensor, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}; pass tensor.contiguous(), which copies"
        )
    if tensor.device.type == "cpu" and tensor.numel() and tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"tensor: its memory must begin at a multiple of {ALIGNMENT} bytes, this one (a slice?) does not; pass "
            "tensor.clone(), which copies"
        )


def _is_compact(tensor: Any) -> bool:
    """Whether the tensor fills its memory without gaps or repeats, in some order of its axes."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
