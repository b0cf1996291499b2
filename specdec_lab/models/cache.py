"""The KV cache: one kind for single sequences, ragged batches and token trees.

Keys and values are allocated once per layer, `[rows, kv_heads, max_len, head_dim]`, with a length per row.
Writing goes to each row's own slots behind its length, rolling back sets a length, committing a branch of a
tree is an index copy inside a row. Nothing is concatenated or cropped. It knows neither models nor text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_lab.errors import ModelError


@dataclass(frozen=True)
class Block:
    """Where a block of n new tokens per row goes, and what each of them sees."""

    slots: Tensor  # [rows, n] cache slot of each token
    positions: Tensor  # [rows, n] position of each token in its sequence (prefix length + depth in the tree)
    upto: int  # number of leading slots that attention reads
    mask: Tensor | None  # bool [rows, 1, n, upto], True = seen; None = every slot below `upto` is seen
    start: int | None  # common first slot when all rows are equally long, else None


class KVCache:
    """Preallocated keys and values for up to `rows` sequences of up to `max_len` tokens.

    `keys[layer]` and `values[layer]` are `[rows, kv_heads, max_len, head_dim]`. `lengths[row]` counts the
    committed tokens of each row; whatever lies behind it is scratch space for the block in flight. Rows that
    finished are dropped: the last active row takes their place, so the active rows are always the first ones.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (rows, kv_heads, max_len, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.max_len = max_len
        self.lengths = [0] * rows

    @property
    def rows(self) -> int:
        """Number of active rows."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def block(self, n: int, parents: Tensor | None = None, behind: int = 0) -> Block:
        """Plan a block of n tokens per row.

        parents: LongTensor [rows, n], each token's parent inside the block (a lower index), -1 for the
            committed prefix, -2 for padding; None for a chain. Padding comes last, so no real token sees it.
        behind: how many tokens of the same tree, not committed, are in the cache already; parents then holds theirs,
            too: [rows, behind + n]. A tree grows level by level so.
        Raises ModelError when the block does not fit.
        """
        device = self.keys[0].device
        lengths = torch.tensor(self.lengths, device=device)  # [rows]
        n += behind
        upto = max(self.lengths) + n
        if upto > self.max_len:
            raise ModelError(f"the cache has room for {self.max_len} tokens a row; {upto} were asked for")
        slots = lengths[:, None] + torch.arange(n, device=device)  # [rows, n]
        start = self.lengths[0] if min(self.lengths) == max(self.lengths) else None
        if n == 1 and start is not None:
            return Block(slots, slots, upto, None, start)  # behind is 0
        ancestors, depth = _ancestry(n, parents, device)  # [rows|1, n, n], [rows|1, n]
        mask = torch.zeros(self.rows, n, upto, dtype=torch.bool, device=device)
        mask |= torch.arange(upto, device=device) < lengths[:, None, None]  # the committed prefix
        if start is not None:
            mask[:, :, start:] = ancestors
        else:
            index = slots[:, None, :].expand(self.rows, n, n)
            mask.scatter_(2, index, ancestors.expand(self.rows, n, n))
        positions = lengths[:, None] + depth
        if behind:
            slots, positions, mask = slots[:, behind:], positions[:, behind:], mask[:, behind:]
            start = None if start is None else start + behind
        return Block(slots, positions, upto, mask[:, None], start)

    def write(self, layer: int, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Store a block's keys and values `[rows, kv_heads, n, head_dim]`; return views up to `block.upto`."""
        keys, values = self.keys[layer], self.values[layer]
        rows, n = k.shape[0], k.shape[2]
        if block.start is not None:
            keys[:rows, :, block.start : block.start + n] = k
            values[:rows, :, block.start : block.start + n] = v
        else:
            row = torch.arange(rows, device=k.device)[:, None]
            keys[row, :, block.slots] = k.transpose(1, 2)
            values[row, :, block.slots] = v.transpose(1, 2)
        return keys[:rows, :, : block.upto], values[:rows, :, : block.upto]

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the first `counts[row]` tokens of the block just written (a chain, a prefill chunk)."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one branch per row of the block just written.

        paths: per row the block indices that stay, ascending; the others are forgotten. The branch moves to
        the slots right behind the committed prefix.
        """
        for row, path in enumerate(paths):
            moved = [(i, source) for i, source in enumerate(path) if i != source]
            if moved:
                length, device = self.lengths[row], self.keys[0].device
                target = torch.tensor([length + i for i, _ in moved], device=device)
                source = torch.tensor([length + s for _, s in moved], device=device)
                for cached in (*self.keys, *self.values):
                    cached[row, :, target] = cached[row, :, source]
        self.advance([len(path) for path in paths])

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget committed tokens behind `lengths[row]`. Raises ModelError when a row would grow."""
        for row, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)):
            if not 0 <= new <= old:
                raise ModelError(f"cannot roll row {row} back from {old} to {new} tokens")
        self.lengths = list(lengths)

    def drop(self, row: int) -> None:
        """Remove a finished row; the last active row takes its index."""
        last = self.rows - 1
        if row != last:
            length = self.lengths[last]
            for cached in (*self.keys, *self.values):
                cached[row, :, :length] = cached[last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()


def _ancestry(n: int, parents: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tokens of a block each token sees (itself and its ancestors), and its depth.

    Returns bool [rows, n, n] and long [rows, n] (rows = 1 for a chain).
    """
    if parents is None:
        return torch.ones(1, n, n, dtype=torch.bool, device=device).tril(), torch.arange(n, device=device)[None]
    index = torch.arange(n, device=device)
    # a token reaches itself and its parent in one hop; squaring doubles the hops
    seen = (index[:, None] == index) | (parents[..., None] == index)  # [rows, n, n]
    for _ in range((n - 1).bit_length()):
        reach = seen.float()
        seen = reach @ reach > 0
    return seen, seen.sum(-1) - 1
