"""The JAX adapter's launches, in Triton's interpreter: a stand-in for jax-triton runs the kernel on the host.

The stand-in keeps jax-triton's contract: arrays and integers in order, fresh outputs after them (here NaN), outputs
that take over an input's memory, everything else compile-time constants.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import load_case, numbers, to_jax, to_torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from triton_interpreter.sets import SETS, check, oracle, random_inputs, rounded

import duohead_jax
import duohead_torch
from duohead.spec import HeadSpec
from duohead_jax import triton, triton_launch
from duohead_jax.sharding import varying

CASES = (
    "ce_sharp_bf16",
    "grpo_kl_k3",
    "masked_row_nan",
    "padded_vocab",
    "softcap_odd_vocab",
    "vocab_one",
    "gspo_masked_token",
    "dpo_pairs",
)


def _tensor(array: Any) -> torch.Tensor:
    array = np.array(array)
    if array.dtype == jnp.bfloat16:
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array)


def _array(tensor: torch.Tensor, dtype: Any) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy().astype(dtype)


def _poisoned(shape: Any) -> torch.Tensor:
    """What a launch must overwrite: NaN, or integers that are no index."""
    dtype = _tensor(np.zeros(0, shape.dtype)).dtype
    return torch.full(shape.shape, float("nan") if dtype.is_floating_point else -12345678, dtype=dtype)


def triton_call(
    *arguments: Any,
    kernel: Any,
    out_shape: list[Any],
    grid: int,
    num_warps: int,
    input_output_aliases: dict[int, int],
    **constants: Any,
) -> Any:
    assert grid > 0
    assert num_warps > 0

    def on_host(*given: Any) -> list[np.ndarray]:
        arrays = [_tensor(array) for array in given]
        remaining = iter(arrays)
        inputs = [item if isinstance(item, int) else next(remaining) for item in arguments]
        outputs = [_poisoned(shape) for shape in out_shape]
        for source, target in input_output_aliases.items():
            assert arrays[source].shape == outputs[target].shape
            assert arrays[source].dtype == outputs[target].dtype
            outputs[target] = arrays[source]
        kernel[(grid,)](*inputs, *outputs, **constants)
        return [_array(output, shape.dtype) for output, shape in zip(outputs, out_shape, strict=True)]

    return jax.pure_callback(on_host, list(out_shape), *(item for item in arguments if not isinstance(item, int)))


@pytest.fixture(autouse=True)
def jax_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("jax_triton")
    module.triton_call = triton_call  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("jax_triton", None)
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    monkeypatch.setattr(triton, "GPU_BACKENDS", ("cpu",))


def run(head: HeadSpec, arrays: dict[str, Any]) -> Any:
    """(loss, aux, gradient), which must not depend on the entry point."""
    arrays = dict(arrays)
    logits = arrays.pop("logits")
    (loss, aux), gradient = duohead_jax.monolithic_loss_and_grad(logits, head, implementation="triton", **arrays)

    def scaled(x: Any) -> Any:
        value, found = duohead_jax.monolithic_loss(x, head, implementation="triton", **arrays)
        return value * 1.0, found

    (other, _), same = jax.value_and_grad(scaled, has_aux=True)(logits)
    np.testing.assert_array_equal(other, loss)
    np.testing.assert_array_equal(same.astype(jnp.float32), gradient.astype(jnp.float32))
    return loss, aux, gradient


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = load_case(name)
    loss, aux, gradient = run(HeadSpec.from_dict(case["head"]), to_jax(case["inputs"], case["dtype"]))
    expected, tolerance = case["expected"], {"rtol": case["rtol"], "atol": case["atol"]}
    np.testing.assert_allclose(loss, expected["loss"], **tolerance)
    for key, value in expected["metrics"].items():
        np.testing.assert_allclose(aux.metrics[key], value, err_msg=key, **tolerance)
    wanted = np.array(numbers(expected["logits_grad"]))
    np.testing.assert_allclose(np.asarray(gradient, np.float64), wanted, **tolerance)


@pytest.mark.parametrize(("name", "dtype"), [(name, "float32") for name in SETS] + [("grpo", "bfloat16")])
def test_against_the_oracle_and_torch(name: str, dtype: str) -> None:
    head, inputs = HeadSpec.from_dict(SETS[name]), rounded(random_inputs(name, 300), dtype)
    loss, aux, gradient = run(head, to_jax(inputs, dtype))
    check(dtype, oracle(name, inputs), loss, aux.losses, aux.metrics, np.asarray(gradient, np.float64))
    arrays = to_torch(inputs, dtype)
    logits = arrays.pop("logits")
    (same, same_aux), theirs = duohead_torch.monolithic_loss_and_grad(logits, head, implementation="triton", **arrays)
    np.testing.assert_array_equal(loss, same)
    for key, value in same_aux.metrics.items():
        np.testing.assert_array_equal(aux.metrics[key], value)
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), theirs.float())


def test_results_in_one_vector_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    head, inputs = HeadSpec.from_dict(SETS["sequences"]), random_inputs("sequences", 300)
    loss, aux, _ = run(head, to_jax(inputs, "float32"))
    jax.clear_caches()
    monkeypatch.setattr(triton_launch, "MAX_LEAVES", 0)
    same, other, _ = run(head, to_jax(inputs, "float32"))
    np.testing.assert_array_equal(loss, same)
    for found, wanted in zip(jax.tree.leaves(other), jax.tree.leaves(aux), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("folder", ["", "/some/cache", None])
def test_the_import_leaves_triton_its_cache_folder(folder: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        os.environ["TRITON_CACHE_DIR"] = ""
        return name

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setenv("TRITON_CACHE_DIR", folder or "")
    if folder is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    assert triton_launch._jax_triton.__wrapped__() == "jax_triton"
    assert os.environ.get("TRITON_CACHE_DIR") == (folder or None)


@pytest.mark.parametrize("name", ["ce_z", "sequences"])
def test_inside_shard_map(name: str) -> None:
    """A launch's results vary along the mesh as its inputs do, whatever jax-triton types them as."""
    arrays = to_jax(random_inputs(name, 300), "float32")
    head, logits = HeadSpec.from_dict(SETS[name]), arrays.pop("logits")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    tokens = {key: value for key, value in arrays.items() if value.shape[:1] == logits.shape[:1]}
    others = {key: value for key, value in arrays.items() if key not in tokens}
    seen: list[Any] = []

    def loss_of(x: Any, tokens: Any, others: Any, implementation: str = "auto") -> Any:
        seen.append((triton.is_local(x), varying(x)))
        loss, aux = duohead_jax.monolithic_loss(x, head, implementation=implementation, **tokens, **others)
        return jax.lax.psum(loss, "data") if implementation == "auto" else loss, aux.losses

    wanted, exact = jax.value_and_grad(loss_of, has_aux=True)(logits, tokens, others, "triton")
    seen.clear()
    rows, every = P("data"), P()
    specs = {"mesh": mesh, "in_specs": (rows, rows, every)}

    def inside(x: Any, tokens: Any, others: Any) -> Any:
        (loss, losses), gradient = jax.value_and_grad(loss_of, has_aux=True)(x, tokens, others)
        assert all(varying(value) == {"data"} for value in losses.values())
        return loss, gradient

    loss, gradient = jax.jit(jax.shard_map(inside, **specs, out_specs=(every, rows)))(logits, tokens, others)
    np.testing.assert_array_equal(loss, wanted[0])
    np.testing.assert_array_equal(gradient, exact)
    outside = jax.shard_map(lambda *given: loss_of(*given)[0], **specs, out_specs=every)
    loss, gradient = jax.jit(jax.value_and_grad(outside))(logits, tokens, others)
    np.testing.assert_array_equal(loss, wanted[0])
    np.testing.assert_array_equal(gradient, exact)
    assert seen
    assert all(item == (True, {"data"}) for item in seen)


def test_auto_leaves_what_may_be_sharded_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under plain jit with several devices XLA would gather the logits for a kernel that it cannot split."""
    assert jax.device_count() > 1
    logits, labels = jnp.ones((4, 8), jnp.float32), jnp.arange(4)
    used: list[bool] = []
    original = triton.takes

    def spy(*arguments: Any) -> bool:
        used.append(original(*arguments))
        return used[-1]

    monkeypatch.setattr(triton, "takes", spy)

    def loss(x: Any, implementation: str = "auto") -> Any:
        return duohead_jax.monolithic_loss(x, labels=labels, implementation=implementation).loss

    loss(logits)
    jax.jit(loss)(logits)
    jax.jit(lambda x: loss(x, "triton"))(logits)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.device_put(logits, NamedSharding(mesh, P("data")))
    loss(sharded)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    jax.jit(lambda x: loss(x) + 0.0)(logits)
    assert used == [True, False, True, False, True]


def test_upstream_accumulate_and_vmap() -> None:
    arrays = to_jax(random_inputs("ce_z", 300), "float32")
    head = HeadSpec.from_dict(SETS["ce_z"])
    logits, labels = arrays["logits"], arrays["labels"]

    def loss_of(x: Any, factor: float = 1.0) -> Any:
        return factor * duohead_jax.monolithic_loss(x, head, labels=labels, implementation="triton").loss

    gradient = jax.grad(loss_of)(logits)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss_of))(logits, 2.0), 2.0 * gradient)
    _, total = duohead_jax.monolithic_loss_and_grad(
        logits, head, labels=labels, implementation="triton", out=jnp.ones_like(logits), accumulate=True
    )
    np.testing.assert_allclose(total, gradient + 1.0, rtol=0, atol=3e-7)
    many = jnp.stack([logits, logits[:, ::-1]])
    mapped = jax.vmap(jax.grad(loss_of))(many)
    np.testing.assert_array_equal(mapped[0], gradient)
    np.testing.assert_array_equal(mapped[1], jax.grad(loss_of)(many[1]))


def test_no_tokens() -> None:
    loss, _, gradient = run(
        HeadSpec.from_dict(SETS["ce_z"]), {"logits": jnp.zeros((0, 5)).astype("float32"), "labels": jnp.zeros(0, int)}
    )
    assert loss == 0
    assert gradient.shape == (0, 5)


def test_refusals_and_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = jnp.zeros((1, 5), "float32"), jnp.zeros(1, int)
    with pytest.raises(RuntimeError, match="float64 logits: the kernel computes in float32"):
        duohead_jax.monolithic_loss(logits.astype("float64"), labels=labels, implementation="triton")
    monkeypatch.setattr(triton, "GPU_BACKENDS", ("gpu",))
    with pytest.raises(RuntimeError, match="it needs a CUDA device, JAX runs on cpu"):
        duohead_jax.monolithic_loss(logits, labels=labels, implementation="triton")
    assert duohead_jax.monolithic_loss(logits, labels=labels, implementation="auto").loss > 1.6
    monkeypatch.delitem(sys.modules, "jax_triton")
    with pytest.raises(RuntimeError, match=r"jax-triton is not installed: pip install duohead\[jax-triton\]"):
        duohead_jax.monolithic_loss(logits, labels=labels, implementation="triton")
