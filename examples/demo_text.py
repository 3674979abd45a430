"""Text for the demo: a corpus that every machine has, and a vocabulary made from it."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np

#: a line break with the next line's indent; a word, a digit or a run of signs with at most one space before it; a gap
PIECE = re.compile(r"\n *| ?[A-Za-z]+| ?_+| ?[0-9]| ?[^\sA-Za-z0-9_]+|\s+")
BYTES = 256


def standard_library() -> str:
    """The source of the Python standard library's modules and first-level packages, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]) if _is_library(path.relative_to(root))]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def _is_library(path: Path) -> bool:
    return not set(path.parts) & {"site-packages", "dist-packages", "test", "tests", "idlelib"}


class Vocabulary:
    """All bytes, then a corpus' most frequent pieces; a piece that it lacks is spelt in bytes."""

    def __init__(self, text: str, size: int) -> None:
        counts = Counter(PIECE.findall(text))
        ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))[: size - BYTES]
        self.ids = {piece: BYTES + i for i, piece in enumerate(ranked)}

    def __len__(self) -> int:
        return BYTES + len(self.ids)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int32."""
        ids: list[int] = []
        for piece in PIECE.findall(text):
            found = self.ids.get(piece)
            ids += piece.encode() if found is None else (found,)
        return np.array(ids, np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids."""
        pieces = list(self.ids)
        spelt = [bytes([i]) if i < BYTES else pieces[i - BYTES].encode() for i in ids.tolist()]
        return b"".join(spelt).decode(errors="replace")


def batches(tokens: np.ndarray, count: int, rows: int, length: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """``count`` pairs (inputs, labels), each ``[rows, length]``; a label is the next token."""
    random = np.random.default_rng(seed)
    if len(tokens) < length + 2:
        raise ValueError(f"the text has {len(tokens)} tokens, a row takes {length + 1}")
    found = []
    for _ in range(count):
        starts = random.integers(0, len(tokens) - length - 1, rows)
        windows = tokens[starts[:, None] + np.arange(length + 1)]
        found.append((windows[:, :-1].copy(), windows[:, 1:].copy()))
    return found
