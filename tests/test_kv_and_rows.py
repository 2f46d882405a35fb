"""The KV cache and the layout of packed rows: what was kept stays, and nothing else is ever seen."""

import pytest
import torch
from tiny_models import WINDOW, tiny_family, tiny_target
from torch import Tensor

from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import COLUMN_BUCKET, PackedRows
from specdoctor.engine.target import Target
from specdoctor.kernels.attention import HIDDEN, matmul_attention

CPU = torch.device("cpu")
HEADS, WIDTH = 2, 4


def marked(values: list[float]) -> tuple[Tensor, Tensor]:
    """Keys and values [heads, N, width] that carry a number each, so a column tells where it came from."""
    k = torch.tensor(values, dtype=torch.float32)[None, :, None].expand(HEADS, -1, WIDTH)
    return k, k + 0.5


def write(cache: KVCache, slots: list[int], values: list[list[float]]) -> tuple[Tensor, Tensor, PackedRows]:
    starts = [cache.lengths[slot] for slot in slots]
    rows = PackedRows(slots, starts, [len(one) for one in values], CPU)
    k, v = cache.write(0, *marked([x for one in values for x in one]), rows)
    return k, v, rows


def columns(k: Tensor, r: int, n: int) -> list[float]:
    return k[r, 0, :n, 0].tolist()


# The cache ------------------------------------------------------------------------------------------------------------


def test_append_and_keep_a_prefix() -> None:
    cache = KVCache(CPU)
    slot = cache.open()
    k, v, _ = write(cache, [slot], [[1, 2, 3]])
    assert columns(k, 0, 3) == [1, 2, 3] and columns(v, 0, 3) == [1.5, 2.5, 3.5]
    assert k.shape == (1, HEADS, COLUMN_BUCKET, WIDTH)
    cache.keep(slot, range(2))
    k, _, _ = write(cache, [slot], [[7, 8]])
    assert cache.lengths[slot] == 2
    assert columns(k, 0, 4) == [1, 2, 7, 8]


def test_keep_rows_that_are_no_prefix_closes_the_gaps_in_every_layer() -> None:
    cache = KVCache(CPU)
    slot = cache.open()
    write(cache, [slot], [[1, 2]])
    rows = PackedRows([slot], [0], [2], CPU)
    cache.write(1, *marked([10, 20]), rows)
    cache.keep(slot, range(2))
    rows = PackedRows([slot], [2], [5], CPU)
    cache.write(0, *marked([3, 4, 5, 6, 7]), rows)
    cache.write(1, *marked([30, 40, 50, 60, 70]), rows)
    cache.keep(slot, [0, 2, 4])  # an accepted path of a tree
    after = PackedRows([slot], [5], [1], CPU)
    k0, v0 = cache.write(0, *marked([9]), after)
    k1, v1 = cache.write(1, *marked([90]), after)
    assert columns(k0, 0, 6) == [1, 2, 3, 5, 7, 9]
    assert columns(v0, 0, 6) == [1.5, 2.5, 3.5, 5.5, 7.5, 9.5]
    assert columns(k1, 0, 6) == [10, 20, 30, 50, 70, 90]
    assert columns(v1, 0, 6) == [10.5, 20.5, 30.5, 50.5, 70.5, 90.5]


def test_keep_nothing() -> None:
    cache = KVCache(CPU)
    slot = cache.open()
    write(cache, [slot], [[1]])
    cache.keep(slot, [])
    assert cache.lengths[slot] == 0


def test_a_closed_slot_is_taken_again_and_begins_empty() -> None:
    cache = KVCache(CPU)
    first, second = cache.open(), cache.open()
    write(cache, [first, second], [[1, 2, 3], [4, 5]])
    cache.keep(first, range(3))
    cache.keep(second, range(2))
    cache.close(first)
    again = cache.open()
    assert again == first and cache.lengths[again] == 0
    k, _, rows = write(cache, [again, second], [[8], [9]])
    assert columns(k, 0, 1) == [8]
    assert columns(k, 1, 3) == [4, 5, 9]
    assert (rows.mask()[0, 0, 0] == 0).sum() == 1  # the stale columns of the earlier owner are behind the mask


def test_the_lowest_free_slot_is_taken_first() -> None:
    cache = KVCache(CPU)
    slots = [cache.open() for _ in range(4)]
    for slot in (3, 1, 2):
        cache.close(slots[slot])
    assert [cache.open(), cache.open(), cache.open(), cache.open()] == [1, 2, 3, 4]


@pytest.mark.parametrize("steps", [[63, 1, 1, 70, 200], [64, 64, 1], [1] * 5 + [300]])
def test_growth_over_bucket_borders_loses_nothing(steps: list[int]) -> None:
    cache = KVCache(CPU)
    slots = [cache.open(), cache.open()]
    expected: list[list[float]] = [[], []]
    number = 1.0
    for n in steps:
        new = [[number + i for i in range(n)], [-number - i for i in range(min(n, 3))]]
        number += n
        k, v, _ = write(cache, slots, new)
        assert k.shape[2] % COLUMN_BUCKET == 0
        for r in range(2):
            expected[r] += new[r]
            cache.keep(slots[r], range(len(new[r])))
            assert columns(k, r, len(expected[r])) == expected[r]
            assert columns(v, r, len(expected[r])) == [x + 0.5 for x in expected[r]]


def test_growth_by_a_new_slot_keeps_the_old_ones() -> None:
    cache = KVCache(CPU)
    first = cache.open()
    write(cache, [first], [[1, 2]])
    cache.keep(first, range(2))
    second = cache.open()
    k, _, _ = write(cache, [first, second], [[3], [4]])
    assert columns(k, 0, 3) == [1, 2, 3] and columns(k, 1, 1) == [4]


@pytest.mark.parametrize("order", [[2, 0], [0, 2], [2, 1, 0], [1, 2]])
def test_slots_in_any_order(order: list[int]) -> None:
    cache = KVCache(CPU)
    slots = [cache.open() for _ in range(3)]
    write(cache, slots, [[1], [2], [3]])
    for slot in slots:
        cache.keep(slot, range(1))
    k, _, _ = write(cache, order, [[10.0 + slot] for slot in order])
    assert [columns(k, r, 2) for r in range(len(order))] == [[slot + 1, slot + 10] for slot in order]


def test_bytes_counts_all_layers() -> None:
    cache = KVCache(CPU)
    slot = cache.open()
    write(cache, [slot], [[1]])
    assert cache.bytes() == 2 * HEADS * COLUMN_BUCKET * WIDTH * 4


# Masks ----------------------------------------------------------------------------------------------------------------


def seen(mask: Tensor, r: int, j: int) -> list[int]:
    return (mask[r, 0, j] == 0).nonzero().flatten().tolist()


def test_causal_rows_of_two_slots_of_different_length() -> None:
    mask = PackedRows([0, 1], [4, 0], [2, 3], CPU).mask()
    assert mask.shape == (2, 1, 3, COLUMN_BUCKET)
    assert seen(mask, 0, 0) == [0, 1, 2, 3, 4]
    assert seen(mask, 0, 1) == [0, 1, 2, 3, 4, 5]
    assert [seen(mask, 1, j) for j in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert mask.min() == HIDDEN and torch.isfinite(mask).all()


def test_a_block_sees_all_of_itself_unless_a_layer_is_causal() -> None:
    rows = PackedRows([0], [3], [3], CPU, visible="all")
    assert [seen(rows.mask(), 0, j) for j in range(3)] == [[0, 1, 2, 3, 4, 5]] * 3
    assert [seen(rows.mask(causal=True), 0, j) for j in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


def test_the_window_counts_positions_on_both_sides() -> None:
    rows = PackedRows([0], [5], [4], CPU, visible="all")
    assert seen(rows.mask(window=3), 0, 0) == [3, 4, 5, 6, 7]
    assert seen(rows.mask(window=3), 0, 3) == [6, 7, 8]
    assert seen(rows.mask(window=3, causal=True), 0, 0) == [3, 4, 5]
    assert seen(rows.mask(window=1, causal=True), 0, 2) == [7]


def test_no_row_is_blind_padding_rows_included() -> None:
    """A row that sees nothing would be NaN in a kernel that uses -inf, and an average of stale values here."""
    rows = PackedRows([0, 1], [20, 0], [1, 6], CPU)
    for window in (None, 1, 4):
        assert ((rows.mask(window) == 0).sum(-1) > 0).all()


def test_masks_are_made_once_a_forward() -> None:
    rows = PackedRows([0], [5], [4], CPU)
    assert rows.mask(3) is rows.mask(3)
    assert rows.mask(3) is not rows.mask(4)


def test_spread_and_gather_are_inverse() -> None:
    for counts in ([3], [2, 2], [1, 4, 2]):
        rows = PackedRows(list(range(len(counts))), [0] * len(counts), counts, CPU)
        x = torch.randn(HEADS, sum(counts), WIDTH)
        spread = rows.spread(x)
        assert spread.shape == (len(counts), HEADS, max(counts), WIDTH)
        assert torch.equal(rows.gather(spread), x.transpose(0, 1))


# Columns that must not matter -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen3", "Mistral"])
@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_stale_columns_change_nothing(family: str, attention: str) -> None:
    """Rejected rows, an earlier owner and a neighbour leave huge values behind; the next forward is as fresh."""
    ids = torch.arange(12) * 5 % 64
    fresh = Target(tiny_family(family), attention=attention)
    expected = fresh.forward(PackedRows([fresh.open()], [0], [12], CPU), ids).logits
    target = Target(tiny_family(family), attention=attention)
    old, other = target.open(), target.open()
    target.forward(PackedRows([old, other], [0, 0], [30, 30], CPU), torch.arange(60) % 64)
    target.cache.keep(old, range(30))
    with torch.inference_mode():
        for keys, values in target.cache._layers.values():
            keys.mul_(1e3)
            values.mul_(1e6)
    target.close(old)
    slot = target.open()
    assert slot == old
    found = []
    for start in (0, 4, 8):  # each round writes 4 rows that are kept and 3 that are not
        draft = torch.cat([ids[start : start + 4], torch.tensor([63, 62, 61])])
        found.append(target.forward(PackedRows([slot], [start], [7], CPU), draft).logits[:4])
        target.cache.keep(slot, range(4))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_unused_columns_give_no_nan(attention: str) -> None:
    target = Target(tiny_target(64), attention=attention)
    slots = [target.open() for _ in range(3)]
    rows = PackedRows(slots, [0, 0, 0], [1, 65, 9], CPU)
    assert torch.isfinite(target.forward(rows, torch.arange(75) % 64).logits).all()
    target.cache.keep(slots[1], range(65))
    rows = PackedRows(slots, [0, 65, 0], [2, 1, 70], CPU)
    assert torch.isfinite(target.forward(rows, torch.arange(73) % 64).logits).all()


def test_attention_survives_a_score_range_of_millions() -> None:
    q = torch.full((1, 1, 2, 4), 1e3)
    k = torch.cat([torch.full((1, 1, 1, 4), -1e3), torch.zeros(1, 1, 2, 4)], dim=2)
    mask = torch.tensor([[0.0, HIDDEN, HIDDEN], [0.0, 0.0, HIDDEN]])[None, None]
    v = torch.tensor([1.0, 2.0, 99.0])[None, None, :, None].expand(-1, -1, -1, 4)
    out = matmul_attention(q, k, v, mask, 1.0)
    assert out[0, 0, :, 0].tolist() == [1.0, 2.0]


# Trees ----------------------------------------------------------------------------------------------------------------

# anchor -> a, b; a -> c, d; c -> e; b -> f. Row 0 is the anchor, row i + 1 is node i.
PARENTS = (-1, -1, 0, 0, 2, 1)


def ancestor_matrix(parents: tuple[int, ...]) -> tuple[Tensor, list[int], list[list[int]]]:
    """Visibility [n, n] of anchor and nodes, depth of each row, and each row's root path (itself last)."""
    paths = [[0]]
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], node + 1])
    n = len(paths)
    visible = torch.zeros(n, n, dtype=torch.bool)
    for row, path in enumerate(paths):
        visible[row, path] = True
    return visible, [len(path) - 1 for path in paths], paths


TREE_TARGETS = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 3},  # narrower than the tree: depth counts, not the order of the rows
    "Gemma3Text": {},
    "GptOss": {"sliding_window": 2},
}


@pytest.mark.parametrize("family", TREE_TARGETS)
@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_each_tree_node_equals_a_plain_forward_over_its_root_path(family: str, attention: str) -> None:
    visible, depths, paths = ancestor_matrix(PARENTS)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 64, (n,), generator=generator) for n in (WINDOW + 5, 2)]
    trees = [torch.randint(0, 64, (len(paths),), generator=generator) for _ in prompts]
    plain = tiny_family(family, **TREE_TARGETS[family])
    target = Target(tiny_family(family, **TREE_TARGETS[family]), attention=attention)
    slots = [target.open() for _ in prompts]
    counts = [len(prompt) for prompt in prompts]
    target.forward(PackedRows(slots, [0, 0], counts, CPU), torch.cat(prompts))
    for slot, count in zip(slots, counts, strict=True):
        target.cache.keep(slot, range(count))
    rows = PackedRows(slots, counts, [len(paths)] * 2, CPU, visible=[visible, visible], depths=[depths, depths])
    logits = target.forward(rows, torch.cat(trees)).logits.view(2, len(paths), -1)
    for r, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        for row, path in enumerate(paths):
            with torch.inference_mode():
                expected = plain(torch.cat([prompt, tree[path]])[None], use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[r, row], expected, atol=2e-5, rtol=1e-5)


def test_a_tree_beside_a_chain_and_the_kept_path_goes_on() -> None:
    visible, depths, paths = ancestor_matrix(PARENTS)
    plain = tiny_family("Mistral")
    target = Target(tiny_family("Mistral"))
    slots = [target.open(), target.open()]
    prompts = [torch.arange(11) % 64, torch.arange(20, 34) % 64]
    target.forward(PackedRows(slots, [0, 0], [11, 14], CPU), torch.cat(prompts))
    target.cache.keep(slots[0], range(11))
    target.cache.keep(slots[1], range(14))
    tree, chain = torch.tensor([40, 41, 42, 43, 44, 45, 46]), torch.tensor([50, 51, 52])
    chain_visible = torch.ones(3, 3, dtype=torch.bool).tril()
    rows = PackedRows(slots, [11, 14], [7, 3], CPU, visible=[visible, chain_visible], depths=[depths, [0, 1, 2]])
    logits = target.forward(rows, torch.cat([tree, chain])).logits
    with torch.inference_mode():
        expected = plain(torch.cat([prompts[1], chain])[None], use_cache=False).logits[0, -3:]
    torch.testing.assert_close(logits[7:], expected, atol=2e-5, rtol=1e-5)
    kept = paths[5]  # anchor, a, c, e: the rows of an accepted path
    assert kept == [0, 1, 3, 5]
    target.cache.keep(slots[0], kept)
    after = target.forward(PackedRows([slots[0]], [15], [1], CPU), torch.tensor([9])).logits[0]
    with torch.inference_mode():
        expected = plain(torch.cat([prompts[0], tree[kept], torch.tensor([9])])[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(after, expected, atol=2e-5, rtol=1e-5)


def test_a_further_slot_keeps_the_columns_that_were_held() -> None:
    """A slot added for a short text after a long one had made the columns grow in a leap."""
    cache = KVCache(torch.device("cpu"))
    first = cache.open()
    for count in (60, 60, 60):  # grows to twice what was asked for
        k = torch.randn(1, count, 4)
        cache.write(0, k, k, PackedRows([first], [cache.lengths[first]], [count], cache.device))
        cache.keep(first, range(count))
    second = cache.open()
    k = torch.randn(1, 3, 4)
    keys, _ = cache.write(0, k, k, PackedRows([second], [0], [3], cache.device))
    torch.testing.assert_close(keys[0, :, :3], k)
