"""JAX arrays as torch tensors on the same memory."""

from __future__ import annotations

import sys
from typing import Any

import torch

DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "int16", "int8", "uint8", "bool")


def from_jax(array: Any) -> torch.Tensor:
    """The torch tensor on a JAX array's memory: nothing is copied.

    JAX arrays do not change and the tensor must not either: write to neither. What JAX does to the array later (donate
    it, say) the tensor cannot see. It carries no gradient between the frameworks.

    Args:
        array: a ``jax.Array`` on one device that torch has too, of a floating, integer or bool type of 8 bits or more.

    Raises:
        TypeError: no ``jax.Array``, a traced one (it has no memory), or a type that torch cannot share.
        ValueError: spread over several devices, donated or deleted, or on a device that this torch does not have.

    >>> import jax.numpy as jnp
    >>> from_jax(jnp.arange(3, dtype=jnp.float32))
    tensor([0., 1., 2.])
    """
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(array, jax.Array):
        raise TypeError(f"array: must be a jax.Array, got {type(array).__module__}.{type(array).__name__}")
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            "array: is traced (inside jit, grad, vmap or scan) and has no memory to share; call from_jax outside of it"
        )
    if str(array.dtype) not in DTYPES:
        raise TypeError(f"array: must be one of {', '.join(DTYPES)}, got {array.dtype}")
    if array.is_deleted():
        raise ValueError("array: its memory was donated or deleted")
    devices = sorted(array.devices(), key=str)
    if len(devices) != 1:
        raise ValueError(f"array: must lie on one device, got {len(devices)} ({', '.join(map(str, devices))})")
    _check_device(devices[0].platform)
    tensor = torch.from_dlpack(array)
    if tensor.numel() and tensor.data_ptr() != array.unsafe_buffer_pointer():
        raise ValueError("array: torch could not share its memory")
    return tensor


def _check_device(platform: str) -> None:
    if platform == "cpu" or (platform in ("gpu", "cuda", "rocm") and torch.cuda.is_available()):
        return
    raise ValueError(f"array: lies on a {platform} device, which this torch ({torch.__version__}) does not have")
