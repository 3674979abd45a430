"""What both adapters check of a call before anything runs: shapes, dtypes, and which arguments are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from duohead.fields import Rule, nearest
from duohead.loss import Loss
from duohead.plan import HEAD_METRICS, TOKENS, Given

SCALE = Rule("logits_scale_factor", "multiplies all logits", 1.0, above=0.0)
SOFTCAP = Rule("final_logit_softcap", "c of c·tanh(logit / c)", None, above=0.0, optional=True)
FLOATS = ("float32", "bfloat16", "float16", "float64")


def dtype_name(array: Any) -> str:
    """``"float32"`` for torch.float32, jnp.float32 and np.float32 alike."""
    return str(array.dtype).removeprefix("torch.")


def describe(array: Any) -> str:
    return f"{dtype_name(array)} of shape {tuple(array.shape)}"


def check_logits(logits: Any, vocab_size: int | None) -> None:
    if not hasattr(logits, "shape") or not hasattr(logits, "dtype"):
        raise TypeError(f"logits: must be an array (*tokens, V), got {type(logits).__name__}")
    if dtype_name(logits) not in FLOATS:
        raise TypeError(f"logits: must be one of {', '.join(FLOATS)}, got {describe(logits)}")
    if len(logits.shape) < 1:
        raise ValueError(f"logits: must have shape (*tokens, V), got {describe(logits)}")
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size: must be at least 1, got {vocab_size}")


def check_vocab(logits: Any, vocab_size: int | None) -> None:
    """The same for logits that hold the whole vocabulary."""
    if logits.shape[-1] < 1:
        raise ValueError(f"logits: the vocabulary (last dimension) is empty, got {describe(logits)}")
    if vocab_size is not None and vocab_size > logits.shape[-1]:
        raise ValueError(f"vocab_size: must be at most the logits' last dimension {logits.shape[-1]}, got {vocab_size}")


def check_tokens(name: str, array: Any, logits: Any, *, integer: bool = False, boolean: bool = False) -> None:
    """One value per token, of the right kind."""
    tokens = tuple(logits.shape[:-1])
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"{name}: must be an array of shape {tokens}, got {type(array).__name__}")
    if tuple(array.shape) != tokens:
        raise ValueError(f"{name}: must have the logits' token shape {tokens}, got {describe(array)}")
    kind = dtype_name(array)
    if integer and "int" not in kind:
        raise TypeError(f"{name}: must be integer, got {describe(array)}")
    if boolean and kind != "bool":
        raise TypeError(f"{name}: must be bool, got {describe(array)}")
    if not integer and not boolean and "float" not in kind:
        raise TypeError(f"{name}: must be floating point, got {describe(array)}")


def check_rows(labels: Any, mask: Any, logits: Any) -> None:
    """What says which rows exist."""
    if labels is not None:
        check_tokens("labels", labels, logits, integer=True)
    if mask is not None:
        check_tokens("mask", mask, logits, boolean=True)


def check_teachers(teachers: Mapping[str, Any], logits: Any) -> None:
    for model, array in teachers.items():
        check_teacher(model, array, logits)


def check_teacher(model: str, array: Any, logits: Any) -> None:
    name = f"teacher_logits[{model!r}]"
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"{name}: must be an array, got {type(array).__name__}")
    if tuple(array.shape) != tuple(logits.shape):
        raise ValueError(f"{name}: must have the logits' shape {tuple(logits.shape)}, got {describe(array)}")
    if "float" not in dtype_name(array):
        raise TypeError(f"{name}: must be floating point, got {describe(array)}")


def check_names(what: str, names: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"{what}: must be a sequence of names, got the string {names!r}")
    for name in names:
        if name not in allowed:
            raise ValueError(f"{what}: got {name!r}{nearest(str(name), allowed)}")
    return tuple(names)


def check_losses(losses: Mapping[str, Any]) -> None:
    if not isinstance(losses, Mapping):
        raise TypeError(f"losses: must be a mapping from name to loss or a HeadSpec, got {type(losses).__name__}")
    for name, loss in losses.items():
        if not isinstance(name, str) or not name or "/" in name or name == "head":
            raise ValueError(f"losses: a name is a non-empty string without '/', and not 'head', got {name!r}")
        if not isinstance(loss, Loss):
            raise TypeError(f"losses[{name!r}]: must be a loss such as CrossEntropy(), got {type(loss).__name__}")


def by_name(argument: str, value: Any, wanted: Sequence[str]) -> dict[str, Any]:
    """``teacher_logits`` as a mapping; a bare array goes to the one name that is wanted."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    names = sorted(set(wanted))
    if len(names) > 1:
        raise ValueError(
            f"{argument}: a bare array where the losses name several models ({', '.join(names)}): pass a mapping"
        )
    return {names[0]: value} if names else {}


def given_inputs(arrays: Mapping[str, Any], teachers: Mapping[str, Any], references: Mapping[str, Any]) -> Given:
    """Which inputs a call has."""
    present = {name for name, array in arrays.items() if array is not None}
    if references:
        present.add("ref_logprobs")
    return Given(frozenset(present), tuple(teachers), tuple(references))


def check_requests(metrics: Sequence[str], tokens: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return check_names("metrics", metrics, HEAD_METRICS), check_names("tokens", tokens, TOKENS)


def check_scale(logits_scale_factor: Any, final_logit_softcap: Any) -> None:
    SCALE.check(logits_scale_factor, "")
    SOFTCAP.check(final_logit_softcap, "")


def check_pairs(pairs: Any) -> None:
    if not hasattr(pairs, "shape") or not hasattr(pairs, "dtype"):
        raise TypeError(f"preference_pairs: must be an array (pairs, 2), got {type(pairs).__name__}")
    if len(pairs.shape) != 2 or pairs.shape[1] != 2:
        raise ValueError(f"preference_pairs: must have shape (pairs, 2), got {describe(pairs)}")
    if "int" not in dtype_name(pairs):
        raise TypeError(f"preference_pairs: must be integer, got {describe(pairs)}")


GRAD_SCALE = Rule("grad_scale", "multiplies the gradient", 1.0)


def check_gradient(logits: Any, grad_scale: Any, out: Any, accumulate: bool) -> None:
    """The arguments that ``monolithic_loss_and_grad`` has beside the loss's."""
    GRAD_SCALE.check(grad_scale, "")
    if out is None:
        if accumulate:
            raise ValueError("accumulate: needs out, the array that the gradient is added to")
        return
    if not hasattr(out, "shape") or not hasattr(out, "dtype"):
        raise TypeError(f"out: must be an array of the logits' shape, got {type(out).__name__}")
    shape = tuple(getattr(logits, "shape", ()))
    if tuple(out.shape) != shape:
        raise ValueError(f"out: must have the logits' shape {shape}, got {describe(out)}")
    if dtype_name(out) not in FLOATS:
        raise TypeError(f"out: must be one of {', '.join(FLOATS)}, got {describe(out)}")


def check_count(name: str, count: Any) -> None:
    if count is not None:
        Rule(name, "", None, minimum=0.0).check(count, "")


def is_per_segment(array: Any, logits: Any) -> bool:
    """Advantages that are not one per token are one per segment."""
    return (
        hasattr(array, "shape")
        and len(array.shape) == 1
        and tuple(array.shape) != tuple(logits.shape[:-1])
        and "float" in dtype_name(array)
    )


def token_count(logits: Any) -> int:
    count = 1
    for size in logits.shape[:-1]:
        count = count * size
    return count


class RangeFault(NamedTuple):
    """A value that would show as NaN: which argument it is in, and the largest such value."""

    argument: str
    got: int

    def message(self, vocab_size: int, num_segments: int) -> str:
        if self.argument == "labels":
            return f"labels: must be < {vocab_size} (the vocabulary), got {self.got}"
        limit = f"{self.argument}: must be < num_segments = {num_segments}"
        if self.argument == "segment_ids":
            return f"{limit} (default: the number of tokens), got {self.got}; pass num_segments"
        return f"{limit}, got {self.got}"


RANGED = ("labels", "segment_ids", "preference_pairs")


def range_fault(
    labels: Any, mask: Any, segment_ids: Any, pairs: Any, vocab_size: int, num_segments: int
) -> RangeFault | None:
    """Reads the arrays (a device sync on an accelerator) and returns what would show as NaN."""
    if labels is not None and labels.shape != () and _size(labels):
        wrong = labels >= vocab_size
        if mask is not None:
            wrong = wrong & mask
        if bool(wrong.any()):
            return RangeFault("labels", int(labels[wrong].max()))
    if segment_ids is not None and _size(segment_ids) and int(segment_ids.max()) >= num_segments:
        return RangeFault("segment_ids", int(segment_ids.max()))
    if pairs is not None and _size(pairs) and int(pairs.max()) >= num_segments:
        return RangeFault("preference_pairs", int(pairs.max()))
    return None


def check_ranges(labels: Any, mask: Any, segment_ids: Any, pairs: Any, vocab_size: int, num_segments: int) -> None:
    """Refuses what ``range_fault`` finds."""
    fault = range_fault(labels, mask, segment_ids, pairs, vocab_size, num_segments)
    if fault is not None:
        raise ValueError(fault.message(vocab_size, num_segments))


def _size(array: Any) -> int:
    count = 1
    for size in array.shape:
        count *= size
    return count
