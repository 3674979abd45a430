"""Source text → a Triton kernel: registered with linecache, from where Triton's compiler reads it back."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """A kernel and its parameters by name, in order: inputs and scalars, then outputs; the rest is ``tl.constexpr``."""

    function: Any
    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[str, ...]
    source: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameters that are not compile-time constants."""
        return (*self.inputs, *self.scalars, *self.outputs)


def indent(lines: Iterable[str]) -> list[str]:
    """The lines one level deeper."""
    return ["    " + line for line in lines]


def make_kernel(
    name: str,
    inputs: Sequence[str],
    scalars: Sequence[str],
    outputs: Sequence[str],
    constants: Sequence[str],
    body: Sequence[str],
    names: Mapping[str, Any],
) -> Kernel:
    """A kernel of the given parameters and body; ``names`` are the globals that the body uses."""
    import triton  # here: what only writes source, or asks what a kernel would store, needs no Triton

    parameters = ", ".join([*inputs, *scalars, *outputs, *(f"{constant}: tl.constexpr" for constant in constants)])
    digest = hashlib.sha256("\n".join([parameters, *body]).encode()).hexdigest()[:12]
    full_name = f"duohead_{name}_{digest}"
    source = "\n".join([f"def {full_name}({parameters}):", *indent(body)]) + "\n"
    filename = f"<{full_name}>"
    # No modification time: linecache then never looks for the file.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": "duohead.kernels", **names}
    exec(compile(source, filename, "exec"), namespace)
    # Sizes and strides are not specialised on: their divisibility is the constant UNIT, and variants stay few.
    function = triton.jit(namespace[full_name], do_not_specialize=list(scalars))
    return Kernel(function, tuple(inputs), tuple(scalars), tuple(outputs), tuple(constants), source)
