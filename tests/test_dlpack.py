"""The zero-copy bridge between the frameworks, and the refusal of the other framework's arrays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import duohead_jax
import duohead_torch
from duohead import Distillation

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int32", "int64")


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_torch_memory_is_shared(dtype: str) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    array = duohead_jax.from_torch(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert str(array.dtype) == dtype
    np.testing.assert_array_equal(np.asarray(array, np.float64), tensor.double().numpy())


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_jax_memory_is_shared(dtype: str) -> None:
    array = jnp.arange(12).reshape(3, 4).astype(dtype)
    tensor = duohead_torch.from_jax(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert str(tensor.dtype) == f"torch.{dtype}"
    np.testing.assert_array_equal(tensor.double().numpy(), np.asarray(array, np.float64))


def test_shared_memory_outlives_its_first_owner() -> None:
    array = duohead_jax.from_torch(torch.arange(1000.0))
    tensor = duohead_torch.from_jax(jnp.arange(1000.0, dtype=jnp.float32))
    _ = [torch.full((1000,), -1.0) for _ in range(20)]
    assert float(array.sum()) == float(tensor.sum()) == 499500.0


def test_a_transposed_view_is_shared() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    array = duohead_jax.from_torch(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(array, tensor.numpy())


def test_no_elements() -> None:
    assert duohead_jax.from_torch(torch.zeros(0, 3)).shape == (0, 3)
    assert duohead_torch.from_jax(jnp.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: np.ones(3), TypeError, r"must be a torch\.Tensor, got numpy\.ndarray"),
        (lambda: jnp.ones(3), TypeError, r"must be a torch\.Tensor, got jaxlib"),
        (lambda: torch.ones(3, dtype=torch.complex64), TypeError, "must be one of float32.*got complex64"),
        (lambda: torch.ones(3, requires_grad=True), ValueError, r"requires gradient.*tensor\.detach\(\)"),
        (lambda: torch.ones(3, 4)[:, :2], ValueError, r"strides \(4, 1\); pass tensor\.contiguous\(\)"),
        (lambda: torch.ones(4).expand(3, 4), ValueError, r"strides \(0, 1\); pass tensor\.contiguous\(\)"),
        (lambda: torch.ones(65)[1:], ValueError, r"multiple of 64 bytes.*tensor\.clone\(\)"),
        (lambda: torch.ones(2, 2).to_sparse(), ValueError, r"must be dense.*to_dense\(\)"),
        (lambda: torch.ones(3, device="meta"), ValueError, "lies on a meta device"),
    ],
    ids=["numpy", "jax", "complex", "requires_grad", "strided", "expanded", "unaligned", "sparse", "device"],
)
def test_what_jax_cannot_share(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        duohead_jax.from_torch(make())


def test_wide_types_without_x64() -> None:
    with jax.enable_x64(False):
        with pytest.raises(TypeError, match=r"no int64 unless jax_enable_x64 is set; pass tensor\.int\(\)"):
            duohead_jax.from_torch(torch.arange(3))
        with pytest.raises(TypeError, match=r"no float64 unless jax_enable_x64 is set; pass tensor\.float\(\)"):
            duohead_jax.from_torch(torch.ones(3, dtype=torch.float64))


def _donated() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


def _on_two_devices() -> jax.Array:
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    return jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: np.ones(3), TypeError, r"must be a jax\.Array, got numpy\.ndarray"),
        (lambda: torch.ones(3), TypeError, r"must be a jax\.Array, got torch\.Tensor"),
        (lambda: jax.random.key(0), TypeError, "must be one of float32"),
        (lambda: jnp.ones(3, jnp.int4), TypeError, "got int4"),
        (_donated, ValueError, "donated or deleted"),
        (_on_two_devices, ValueError, "must lie on one device, got 2"),
    ],
    ids=["numpy", "torch", "key", "int4", "deleted", "sharded"],
)
def test_what_torch_cannot_share(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        duohead_torch.from_jax(make())


def test_a_traced_array_has_no_memory() -> None:
    with pytest.raises(TypeError, match="is traced"):
        jax.jit(lambda x: duohead_torch.from_jax(x))(jnp.ones(3))


def test_the_same_loss_on_the_same_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(8, 32, generator=generator), torch.arange(8)
    torch_loss = duohead_torch.monolithic_loss(logits, labels=labels, implementation="eager").loss
    jax_loss = duohead_jax.monolithic_loss(
        duohead_jax.from_torch(logits), labels=duohead_jax.from_torch(labels.int())
    ).loss
    np.testing.assert_allclose(float(torch_loss), float(jax_loss), rtol=1e-6)


CALLS = ("monolithic_loss", "monolithic_loss_and_grad")


def test_token_statistics_refuse_too() -> None:
    with pytest.raises(TypeError, match=r"logits: must be a torch tensor, got jaxlib.*duohead_torch\.from_jax"):
        duohead_torch.token_statistics(jnp.zeros((2, 4)))
    with pytest.raises(TypeError, match=r"labels: must be a JAX array, got torch\.Tensor; duohead_jax\.from_torch"):
        duohead_jax.token_statistics(jnp.zeros((2, 4)), torch.tensor([0, 1]))


@pytest.mark.parametrize("call", CALLS)
def test_torch_refuses_jax_arrays(call: str) -> None:
    function = getattr(duohead_torch, call)
    logits, labels = torch.zeros(2, 4), torch.tensor([0, 1])
    with pytest.raises(TypeError, match=r"logits: must be a torch tensor, got jaxlib.*duohead_torch\.from_jax"):
        function(jnp.zeros((2, 4)), labels=labels)
    with pytest.raises(TypeError, match=r"labels: must be a torch tensor, got jaxlib.*duohead_torch\.from_jax"):
        function(logits, labels=jnp.array([0, 1]))
    with pytest.raises(TypeError, match=r"logits: must be a torch tensor, got numpy\.ndarray$"):
        function(np.zeros((2, 4)), labels=labels)
    with pytest.raises(TypeError, match=r"teacher_logits\['teacher'\]: must be a torch tensor.*from_jax"):
        function(logits, {"kd": Distillation()}, labels=labels, teacher_logits={"teacher": jnp.zeros((2, 4))})


@pytest.mark.parametrize("call", CALLS)
def test_jax_refuses_torch_tensors(call: str) -> None:
    function = getattr(duohead_jax, call)
    logits, labels = jnp.zeros((2, 4)), jnp.array([0, 1])
    with pytest.raises(TypeError, match=r"logits: must be a JAX array, got torch\.Tensor; duohead_jax\.from_torch"):
        function(torch.zeros(2, 4), labels=labels)
    with pytest.raises(TypeError, match=r"labels: must be a JAX array, got torch\.Tensor; duohead_jax\.from_torch"):
        function(logits, labels=torch.tensor([0, 1]))
    with pytest.raises(TypeError, match=r"teacher_logits: must be a JAX array.*duohead_jax\.from_torch"):
        function(logits, {"kd": Distillation()}, labels=labels, teacher_logits=torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("adapter", "other", "helper", "value"),
    [("duohead_torch", "jax", "from_jax", "np.ones(3)"), ("duohead_jax", "torch", "from_torch", "np.ones(3)")],
)
def test_the_bridge_imports_nothing(adapter: str, other: str, helper: str, value: str) -> None:
    program = (
        f"import sys, numpy as np, {adapter}\n"
        f"assert {other!r} not in sys.modules, 'imported'\n"
        f"try: {adapter}.{helper}({value})\n"
        f"except TypeError as error: print(error)\n"
        f"assert {other!r} not in sys.modules, 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "got numpy.ndarray" in done.stdout
