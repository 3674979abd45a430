"""Vocabulary shards and split sequences over process groups: one all-gather a forward, whatever the losses.

The packed rows of a read travel in one buffer with a header that says which columns the rank holds. Whatever may
differ between ranks is decided from the gathered headers, so every rank decides alike and none waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from duohead.checks import RANGED, RangeFault, check_logits
from duohead.metrics import Part, combine_packed, finish, pack
from duohead.statistics import Columns
from duohead_torch import namespace
from duohead_torch.runner import Setting

#: A header number is sent as two floats (n // BASE, n % BASE): exact in float32 up to 2^44.
BASE = 1 << 20


class Group(NamedTuple):
    """A process group by name, with this process's place in it: hashable, so that programs are cached by it."""

    name: str
    rank: int
    ranks: int


class Shards(NamedTuple):
    """The engine's collectives over process groups; None where nothing is split."""

    vocab: Group | None
    sequence: Group | None
    start: int
    size: int

    @property
    def sequence_ranks(self) -> int:
        return 1 if self.sequence is None else self.sequence.ranks

    def gather(self, xp: Any, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every rank's rows, and the columns that it holds; shards that do not fit together make them NaN."""
        packed, header = _exchange(rows, (self.start, width, self.size), self.vocab)
        starts, widths, sizes = header.unbind(1)
        fits = _fits(starts, starts + widths, sizes)
        return torch.where(fits, packed, xp.nan), starts, starts + widths

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows added in the order of the ranks, so that every rank has the same bits."""
        assert self.vocab is not None
        return _all_gather(rows.reshape(-1), self.vocab).sum(0).reshape(rows.shape)

    def sum_sequences(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.sequence is not None
        return _all_reduce(rows, self.sequence)


class CheckedShards:
    """The same in eager mode with its checks: faults travel with the collectives, ``check`` raises them at the end.

    A rank that raised at once would leave the others waiting in a collective.
    """

    def __init__(self, shards: Shards, fault: RangeFault | None, num_segments: int) -> None:
        self.shards, self.fault, self.num_segments = shards, fault, num_segments
        self.found: list[str] = [] if fault is None else [fault.message(shards.size, num_segments)]

    @property
    def sequence_ranks(self) -> int:
        return self.shards.sequence_ranks

    def gather(self, xp: Any, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shards = self.shards
        code, got = (0, 0) if self.fault is None else (1 + RANGED.index(self.fault.argument), self.fault.got)
        packed, header = _exchange(rows, (shards.start, width, shards.size, code, got), shards.vocab)
        self.found = _faults(header.tolist(), self.num_segments)
        return packed, header[:, 0], header[:, 0] + header[:, 1]

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        return self.shards.add(rows)

    def sum_sequences(self, rows: torch.Tensor) -> torch.Tensor:
        flag = rows.new_full((1,), 1.0 if self.found else 0.0)
        summed = self.shards.sum_sequences(torch.cat([rows.reshape(-1), flag]))
        if summed[-1] > 0 and not self.found:
            self.found = ["sequence_group: another rank's labels, segment_ids, preference_pairs or shards are wrong"]
        return summed[:-1].reshape(rows.shape)

    def check(self) -> None:
        """Raises what any rank found; call it when all collectives have run.

        Raises:
            ValueError: the same on every rank of the group.
        """
        if self.found:
            raise ValueError("; ".join(self.found))

    def verify(self, width: int, like: torch.Tensor) -> None:
        """The checks alone, in collectives of their own: for programs that cannot raise."""
        if self.shards.vocab is not None:
            self.gather(namespace, like.new_zeros(0), width)
        if self.shards.sequence is not None:
            self.sum_sequences(like.new_zeros(0))
        self.check()


def _all_gather(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """``[n]`` → ``[ranks, n]``: a functional collective, so that torch.compile traces it."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(flat.contiguous(), group.ranks, group.name)
    return torch.ops._c10d_functional.wait_tensor(gathered).reshape(group.ranks, -1)


def _all_reduce(array: torch.Tensor, group: Group) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(array.contiguous(), "sum", group.name)
    )


def _exchange(rows: torch.Tensor, numbers: tuple[int, ...], group: Group | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(every rank's rows ``[ranks, *rows]``, every rank's numbers ``[ranks, numbers]``) in one all-gather."""
    assert group is not None
    digits = [rows.new_full((1,), float(digit)) for number in numbers for digit in divmod(number, BASE)]
    gathered = _all_gather(torch.cat([*digits, rows.reshape(-1)]), group)
    pairs = gathered[:, : len(digits)].to(torch.int64).reshape(group.ranks, -1, 2)
    packed = gathered[:, len(digits) :].reshape(group.ranks, *rows.shape)
    return packed, pairs[..., 0] * BASE + pairs[..., 1]


def _fits(starts: torch.Tensor, ends: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Whether the shards, padding cut off, hold every column exactly once."""
    size = sizes[0]
    starts, ends = torch.minimum(starts, size), torch.minimum(ends, size)
    shared = torch.minimum(ends[:, None], ends[None]) - torch.maximum(starts[:, None], starts[None])
    # The diagonal holds the widths; anything beside it is an overlap.
    return (shared.clamp(min=0).sum() == size) & ((ends - starts).sum() == size) & (sizes == size).all()


def _faults(headers: list[list[int]], num_segments: int) -> list[str]:
    """What is wrong with the gathered headers, in words that are the same on every rank."""
    sizes = [header[2] for header in headers]
    if len(set(sizes)) > 1:
        return [f"vocab_group: the ranks disagree about the size of the vocabulary, {sizes}; pass the same vocab_size"]
    size = sizes[0]
    shards = [(start, start + width) for start, width, *_ in headers]
    end = 0
    for start, stop in sorted((min(start, size), min(stop, size)) for start, stop in shards):
        if start == stop:
            continue
        if start != end:
            break
        end = stop
    if end != size or sum(min(stop, size) - min(start, size) for start, stop in shards) != size:
        held = ", ".join(f"[{start}, {stop})" for start, stop in shards)
        return [
            f"vocab_group: the shards must hold each of the {size} columns once, the ranks hold {held}; "
            "pass vocab_size and, where shards are uneven, vocab_start"
        ]
    faults = [(rank, code, got) for rank, (*_, code, got) in enumerate(headers) if code > 0]
    return [
        f"{RangeFault(RANGED[code - 1], got).message(size, num_segments)} (rank {rank} of vocab_group)"
        for rank, code, got in faults[:1]
    ]


# --- a call's groups --------------------------------------------------------------------------------------------------


def find_group(argument: str, group: Any) -> Group | None:
    """The process group of an argument; None for a group of one, over which nothing is split.

    ``group`` is a ProcessGroup, its name, a DeviceMesh of one dimension, or ``(DeviceMesh, dimension)``.
    """
    if group is None:
        return None
    found = _process_group(argument, group)
    # The methods, not dist.get_rank: torch.compile knows them in every version.
    rank, ranks = found.rank(), found.size()
    if rank < 0:
        raise ValueError(f"{argument}: this process (rank {dist.get_rank()}) is not a member of the group")
    return None if ranks == 1 else Group(found.group_name, rank, ranks)


def _process_group(argument: str, group: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{argument}: torch.distributed is not initialised; call init_process_group first")
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(cast(Any, group))
    if isinstance(group, dist.DeviceMesh) and group.ndim == 1:
        return group.get_group()
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], dist.DeviceMesh):
        return group[0].get_group(group[1])
    if isinstance(group, int):
        # What new_group returns to processes outside of the group.
        raise ValueError(f"{argument}: this process (rank {dist.get_rank()}) is not a member of the group")
    raise TypeError(
        f"{argument}: must be a ProcessGroup, its name, a DeviceMesh of one dimension or (DeviceMesh, dimension), "
        f"got {group!r}"
    )


class Layout(NamedTuple):
    """Where the logits of a call lie: this rank's columns, and how a DTensor of them is put together again."""

    vocab: Group | None
    start: int
    size: int
    dtensor: Any = None

    def wrap(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient with the logits' layout."""
        if self.dtensor is None:
            return gradient
        from torch.distributed.tensor import DTensor

        like = self.dtensor
        return DTensor.from_local(
            gradient, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def is_dtensor(array: Any) -> bool:
    if not isinstance(array, torch.Tensor) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(array, DTensor)


def local(array: Any) -> Any:
    """A DTensor's part on this rank; mappings item by item, anything else as it is."""
    if array is None or type(array) is torch.Tensor:  # nearly always, and an isinstance of an ABC is slow
        return array
    if isinstance(array, Mapping):
        return {name: local(item) for name, item in array.items()}
    return array.to_local() if is_dtensor(array) else array


def find_layout(logits: Any, vocab_group: Any, vocab_start: int | None, vocab_size: int | None) -> Layout:
    """Which columns of which vocabulary these logits are.

    A shard begins at ``vocab_start`` where given, else at ``rank · max(width, ceil(vocab_size / ranks))``: shards that
    are equal, padding included, or all of ``ceil(vocab_size / ranks)`` columns but the last ones.
    """
    check_logits(logits, vocab_size)
    if is_dtensor(logits):
        if vocab_group is not None or vocab_start is not None:
            raise ValueError(
                "vocab_group, vocab_start: a DTensor of logits says itself how it is split; leave them out"
            )
        return _dtensor_layout(logits, vocab_size)
    group = find_group("vocab_group", vocab_group)
    width = logits.shape[-1]
    if group is None:
        if vocab_start is not None and (vocab_group is None or vocab_start != 0):
            raise ValueError(
                f"vocab_start: needs vocab_group, a group over which the vocabulary is split, got {vocab_start}"
            )
        return Layout(None, 0, width if vocab_size is None else vocab_size)
    size = group.ranks * width if vocab_size is None else vocab_size
    if vocab_start is not None:
        if vocab_start < 0:
            raise ValueError(f"vocab_start: must be at least 0, got {vocab_start}")
        return Layout(group, vocab_start, size)
    return Layout(group, group.rank * max(width, -(-size // group.ranks)), size)


def _dtensor_layout(logits: Any, vocab_size: int | None) -> Layout:
    columns, last = logits.shape[-1], logits.ndim - 1
    if any(placement.is_partial() for placement in logits.placements):
        raise ValueError(f"logits: a DTensor with a partial placement holds no logits yet, got {logits.placements}")
    found = [i for i, placement in enumerate(logits.placements) if placement.is_shard(last) or placement.is_shard(-1)]
    if len(found) > 1:
        raise ValueError(f"logits: the vocabulary must be split over one mesh dimension, got {logits.placements}")
    if vocab_size is not None and vocab_size > columns:
        raise ValueError(f"vocab_size: must be at most the logits' last dimension {columns}, got {vocab_size}")
    size = columns if vocab_size is None else vocab_size
    group = find_group("logits", (logits.device_mesh, found[0])) if found else None
    start = 0 if group is None else group.rank * -(-columns // group.ranks)
    return Layout(group, start, size, logits)


def check_same_layout(name: str, array: Any, layout: Layout) -> None:
    """A DTensor of a teacher's logits must be split as the logits are."""
    if not is_dtensor(array) or layout.dtensor is None:
        return
    if array.placements != layout.dtensor.placements or array.device_mesh != layout.dtensor.device_mesh:
        raise ValueError(
            f"{name}: must be split as the logits are, {layout.dtensor.placements}, got {array.placements}"
        )


def make_setting(layout: Layout, width: int, collectives: Any) -> Setting:
    """The static side of a call over shards."""
    padded = layout.start + width > layout.size
    return Setting(
        Columns(layout.start, layout.size, padded),
        collectives,
        layout.vocab is not None,
        collectives is not None and collectives.sequence_ranks > 1,
    )


# --- beside the losses ------------------------------------------------------------------------------------------------


def global_counts(
    labels: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    preference_pairs: torch.Tensor | None = None,
    *,
    group: Any = None,
    sequence_group: Any = None,
    num_segments: int | None = None,
) -> dict[str, torch.Tensor]:
    """``num_tokens``, ``num_sequences``, ``num_pairs`` of all ranks of a data-parallel group, in one all-reduce.

    Passed to ``monolithic_loss`` they make the ranks' losses and gradients add up to the whole batch's (so reduce
    gradients with a sum, not a mean). Counts that the arguments do not tell are left out. The same segment id on two
    ranks of ``group`` is two sequences; on two ranks of ``sequence_group`` it is one, which costs an all-reduce of
    ``num_segments + 1`` integers more. Groups as for ``monolithic_loss``; None: this rank alone.

    >>> counts = global_counts(torch.tensor([3, -100, 2]), segment_ids=torch.tensor([0, 1, 4]))
    >>> {name: int(count) for name, count in counts.items()}
    {'num_tokens': 2, 'num_sequences': 2}
    """
    if labels is None and mask is None:
        raise ValueError("labels, mask: one of them is needed to count tokens, none was given")
    valid = (mask if labels is None else labels >= 0).reshape(-1)  # type: ignore[union-attr]
    if labels is not None and mask is not None:
        valid = valid & mask.reshape(-1)
    split = find_group("sequence_group", sequence_group)
    if split is not None and segment_ids is not None and num_segments is None:
        raise ValueError("num_segments: needed where sequence_group splits the sequences, none was given")
    ids = valid.to(torch.int64) - 1 if segment_ids is None else torch.where(valid, segment_ids.reshape(-1), -1)
    lengths = _lengths(ids, num_segments if split is not None and segment_ids is not None else None)
    num_tokens = valid.sum()
    if split is not None:
        num_tokens, lengths = _split_first(_all_reduce(torch.cat([num_tokens[None], lengths]), split))
    counts = {"num_tokens": num_tokens}
    if segment_ids is not None:
        counts["num_sequences"] = (lengths > 0).sum()
    if preference_pairs is not None:
        counts["num_pairs"] = ((preference_pairs >= 0).all(-1) & (lengths > 0).any()).sum()
    found = find_group("group", group)
    if found is None:
        return counts
    return dict(zip(counts, _all_reduce(torch.stack(list(counts.values())), found).unbind(), strict=True))


def _split_first(array: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return array[0], array[1:]


def _lengths(ids: torch.Tensor, num_segments: int | None) -> torch.Tensor:
    """Something above 0 for each sequence that has a token: by id, or without a bound on the ids in sorted order."""
    if num_segments is not None:
        inside = (ids >= 0) & (ids < num_segments)
        counts = ids.new_zeros(num_segments + 1)
        return counts.index_add(0, torch.where(inside, ids, num_segments), inside.to(ids.dtype))[:-1]
    ordered = torch.sort(ids).values
    before = torch.cat([ordered.new_full((1,), -1), ordered[:-1]])
    return (ordered != before).to(ids.dtype) * (ordered >= 0)


def combine_metrics(parts: Mapping[str, Part], group: Any = None) -> dict[str, torch.Tensor]:
    """The whole batch's metrics from every rank's ``aux.parts``, exactly, in one all-gather.

    Sums, counts and weights add, minima and maxima are those of all ranks; one division at the end. ``group``: the
    ranks that hold different tokens (data-parallel, or the sequence group), never the vocabulary's.

    >>> from duohead.metrics import Mean
    >>> float(combine_metrics({"m": Mean(torch.tensor(3.0), torch.tensor(2.0))})["m"])
    1.5
    """
    found = find_group("group", group)
    if found is not None and parts:
        packed = pack(namespace, parts)
        parts = combine_packed(namespace, parts, _all_gather(packed.reshape(-1), found).reshape(-1, *packed.shape))
    return {name: finish(namespace, part) for name, part in parts.items()}
