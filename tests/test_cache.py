"""The KV cache against a list of what each slot should hold and a brute-force walk to each token's root."""

import random

import pytest
import torch
from torch import Tensor

from specdec_lab.errors import ModelError
from specdec_lab.models.cache import Block, KVCache

LAYERS, HEADS, WIDTH, MAX_LEN = 2, 3, 4, 16


def make(lengths: list[int]) -> KVCache:
    """A cache with `lengths[row]` committed tokens per row, every slot filled with its own number."""
    cache = KVCache(LAYERS, len(lengths), HEADS, MAX_LEN, WIDTH)
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        rows = torch.arange(len(lengths)).view(-1, 1, 1, 1)
        k[:] = 1000 * layer + 100 * rows + torch.arange(MAX_LEN).view(1, 1, -1, 1)
        v[:] = -k
    cache.advance(lengths)
    return cache


def content(cache: KVCache, layer: int, row: int) -> list[float]:
    """The committed numbers of a row, after checking that heads, widths and values agree with them."""
    k, v = (t[layer][row, :, : cache.lengths[row]] for t in (cache.keys, cache.values))
    assert torch.equal(v, -k)
    assert torch.equal(k, k[:1, :, :1].expand_as(k))
    return k[0, :, 0].tolist()


def write(cache: KVCache, numbers: list[list[int]], parents: Tensor | None = None) -> Block:
    """Write a block whose token i of row r carries numbers[r][i] in layer 0, 1000 more in layer 1."""
    block = cache.block(len(numbers[0]), parents)
    for layer in range(LAYERS):
        k = (torch.tensor(numbers) + 1000.0 * layer)[:, None, :, None].expand(-1, HEADS, -1, WIDTH)
        keys, values = cache.write(layer, k, -k, block)
        assert keys.shape == values.shape == (cache.rows, HEADS, block.upto, WIDTH)
        assert torch.equal(keys.gather(2, block.slots[:, None, :, None].expand_as(k)), k)
    return block


def ancestors(parents: list[int], i: int) -> list[int]:
    """Token i and those above it, nearest first."""
    path = [i]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


@pytest.mark.parametrize("lengths", [[3, 5], [4, 4]], ids=["ragged", "even"])
def test_write_goes_behind_each_rows_own_length(lengths: list[int]) -> None:
    cache = make(lengths)
    before = [content(cache, 1, row) for row in range(2)]
    write(cache, [[51, 52], [61, 62]])
    assert cache.lengths == lengths, "a block is scratch until it is committed"
    cache.advance([2, 1])
    assert content(cache, 1, 0) == before[0] + [1051, 1052]
    assert content(cache, 1, 1) == before[1] + [1061]


def test_rollback_forgets_and_the_next_write_overwrites() -> None:
    cache = make([6, 2])
    cache.rollback([3, 2])
    write(cache, [[51], [61]])
    cache.advance([1, 1])
    assert content(cache, 0, 0) == [0, 1, 2, 51]
    assert content(cache, 0, 1) == [100, 101, 61]


@pytest.mark.parametrize("lengths", [[7, 2], [6, -1], [6, 3]])
def test_rollback_cannot_grow_a_row(lengths: list[int]) -> None:
    cache = make([6, 2])
    with pytest.raises(ModelError, match="cannot roll row"):
        cache.rollback(lengths)
    assert cache.lengths == [6, 2]


@pytest.mark.parametrize("path", [[], [0], [1, 3], [0, 2, 4], [4], [0, 1, 2, 3, 4]])
def test_commit_moves_one_branch_behind_the_prefix(path: list[int]) -> None:
    cache = make([3, 5])
    write(cache, [[50, 51, 52, 53, 54], [60, 61, 62, 63, 64]])
    cache.commit([path, [0, 1]])
    for layer in range(LAYERS):
        assert content(cache, layer, 0) == [1000 * layer + x for x in [0, 1, 2, *(50 + i for i in path)]]
        assert content(cache, layer, 1)[5:] == [1000 * layer + x for x in (60, 61)]
    assert cache.lengths == [3 + len(path), 7]


@pytest.mark.parametrize("row", [0, 1, 2])
def test_drop_lets_the_last_row_take_the_place(row: int) -> None:
    cache = make([2, 3, 4])
    rows = [content(cache, 1, r) for r in range(3)]
    expected = rows[:2] if row == 2 else [rows[2] if r == row else rows[r] for r in range(2)]
    cache.drop(row)
    assert [content(cache, 1, r) for r in range(cache.rows)] == expected
    write(cache, [[51], [61]])
    cache.advance([1, 1])
    assert content(cache, 0, 1)[-1] == 61


def test_drop_to_the_last_row() -> None:
    cache = make([2, 3])
    cache.drop(0)
    cache.drop(0)
    assert cache.rows == 0
    assert cache.lengths == []


def test_overflow_is_an_error_that_names_the_room() -> None:
    cache = make([MAX_LEN - 2, 1])
    cache.block(2)
    with pytest.raises(ModelError, match=f"room for {MAX_LEN} tokens a row; {MAX_LEN + 1} were asked for"):
        cache.block(3)


def test_nbytes() -> None:
    assert make([0, 0]).nbytes == 2 * LAYERS * 2 * HEADS * MAX_LEN * WIDTH * 4


def test_one_token_of_even_rows_needs_no_mask() -> None:
    block = make([3, 3]).block(1)
    assert block.mask is None
    assert block.positions.tolist() == [[3], [3]]
    assert block.upto == 4


@pytest.mark.parametrize("seed", range(6))
def test_mask_and_positions_follow_the_ancestors(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(2, 6)
    lengths = [rng.randint(0, 8)] * 3 if seed % 2 else [rng.randint(0, 8) for _ in range(3)]
    used = [n, rng.randint(1, n), rng.randint(0, n)]
    trees = [[rng.randint(-1, i - 1) if i < count else -2 for i in range(n)] for count in used]
    block = make(lengths).block(n, torch.tensor(trees))
    assert block.mask is not None
    for row, (length, tree, count) in enumerate(zip(lengths, trees, used, strict=True)):
        assert block.slots[row].tolist() == list(range(length, length + n))
        for i in range(count):
            above = ancestors(tree, i)
            seen = {*range(length), *(length + j for j in above)}
            assert block.mask[row, 0, i].nonzero()[:, 0].tolist() == sorted(seen)
            assert block.positions[row, i] == length + len(above) - 1
        assert block.mask[row, 0].any(-1).all(), "padding must see something, or its softmax is NaN"


@pytest.mark.parametrize("lengths", [[2, 5], [4, 4]], ids=["ragged", "even"])
def test_a_chain_is_the_tree_of_one_branch(lengths: list[int]) -> None:
    chain = make(lengths).block(3)
    tree = make(lengths).block(3, torch.tensor([[-1, 0, 1]] * 2))
    assert chain.mask is not None
    assert tree.mask is not None
    assert torch.equal(chain.mask, tree.mask)
    assert torch.equal(chain.positions, tree.positions)
