"""Tree masks: every form is the same relation, on random trees and forests; parent lists that are none."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdoctor.errors import SpecdoctorError
from specdoctor.kernels.attention import matmul_attention
from specdoctor.kernels.tree_mask import (
    WORD_BITS,
    additive_mask,
    ancestor_bits,
    checked_parents,
    mask_of_bits,
    tree_attention_mask,
    tree_block_mask,
    tree_depths,
    tree_mask_mod,
    tree_positions,
    with_anchor,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@st.composite
def forests(draw: st.DrawFn, largest: int = 80) -> tuple[int, ...]:
    """Parents of a random forest, its nodes in any order."""
    n = draw(st.integers(1, largest))
    ordered = [draw(st.integers(-1, node - 1)) for node in range(n)]
    names = draw(st.permutations(range(n)))
    parents = [-1] * n
    for node, parent in enumerate(ordered):
        parents[names[node]] = -1 if parent == -1 else names[parent]
    return tuple(parents)


def path_to_root(parents: tuple[int, ...], node: int) -> list[int]:
    path = []
    while node != -1:
        path.append(node)
        node = parents[node]
    return path


@given(forests())
def test_every_form_is_the_ancestor_relation(parents: tuple[int, ...]) -> None:
    n = len(parents)
    expected = torch.zeros(n, n, dtype=torch.bool)
    for node in range(n):
        expected[node, path_to_root(parents, node)] = True
    assert torch.equal(tree_attention_mask(parents), expected)
    bits = ancestor_bits(parents)
    assert bits.shape == (n, -(-n // WORD_BITS)) and bits.dtype == torch.long
    assert torch.equal(mask_of_bits(bits), expected)
    index = torch.arange(n)
    nothing = torch.zeros((), dtype=torch.long)
    assert torch.equal(tree_mask_mod(bits)(nothing, nothing, index[:, None], index[None, :]), expected)
    for dtype in DTYPES:
        added = additive_mask(expected, dtype)
        assert added.dtype == dtype and added.isfinite().all()
        assert torch.equal(added == 0, expected) and added.min() in (0, torch.finfo(dtype).min)
    assert tree_depths(parents) == [len(path_to_root(parents, node)) - 1 for node in range(n)]
    assert tree_positions(parents, 7).tolist() == [7 + depth for depth in tree_depths(parents)]


@given(forests(largest=12), st.integers(0, 5))
def test_the_anchor_stands_above_all(parents: tuple[int, ...], start: int) -> None:
    lifted = with_anchor(parents)
    mask = tree_attention_mask(lifted)
    assert mask[:, 0].all() and not mask[0, 1:].any()
    assert torch.equal(mask[1:, 1:], tree_attention_mask(parents))
    assert tree_positions(lifted, start).tolist() == [start, *(start + 1 + depth for depth in tree_depths(parents))]


@given(forests(largest=9), st.integers(0, 6))
def test_flex_attention_equals_matmul_attention(parents: tuple[int, ...], context: int) -> None:
    from torch.nn.attention.flex_attention import create_mask, flex_attention

    n, L = len(parents), context + len(parents)
    visible = torch.cat([torch.ones(n, context, dtype=torch.bool), tree_attention_mask(parents)], dim=1)
    mod = tree_mask_mod(ancestor_bits(parents), context)
    assert torch.equal(create_mask(mod, 1, 1, n, L, device="cpu")[0, 0], visible)  # type: ignore[arg-type]
    q, k, v = torch.randn(1, 2, n, 16), torch.randn(1, 2, L, 16), torch.randn(1, 2, L, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not compiled: it is the numbers that matter here
        flexed = flex_attention(q, k, v, block_mask=tree_block_mask(parents, context))
    plain = matmul_attention(q, k, v, additive_mask(visible, torch.float32)[None, None], 16**-0.5)
    torch.testing.assert_close(flexed, plain, atol=1e-5, rtol=1e-5)


def test_the_sign_bit_is_a_node_too() -> None:
    chain = tuple(range(-1, 2 * WORD_BITS))
    bits = ancestor_bits(chain)
    assert bits[63, 0] == -1 and bits[62, 0] > 0 and bits[63, 1] == 0
    assert torch.equal(mask_of_bits(bits), torch.ones(len(chain), len(chain), dtype=torch.bool).tril())


def test_float16_hides_by_its_lowest_finite_number() -> None:
    mask = additive_mask(tree_attention_mask((-1, 0, 0)), torch.float16)
    assert mask.unique().tolist() == [-65504.0, 0.0]


def test_a_row_that_sees_nothing_is_refused() -> None:
    visible = tree_attention_mask((-1, 0, 0))
    visible[1] = False
    with pytest.raises(SpecdoctorError, match="row 1 sees no column"):
        additive_mask(visible, torch.float16)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0], r"nodes 0 -> 0 form a cycle"),
        ([-1, 2, 3, 1], r"nodes 1 -> 2 -> 3 -> 1 form a cycle"),
        ([2, 2, 3, 2], r"nodes 2 -> 3 -> 2 form a cycle"),  # reached from outside the cycle
        ([-1, 2], r"parent of node 1 is 2, expected -1 \(a root\) or a node from 0 to 1"),
        ([-2], r"parent of node 0 is -2"),
        ([-1, 0.0], r"parent of node 1 is 0.0, expected a whole number"),
        ([-1, False], r"parent of node 1 is False, expected a whole number"),
        (["-1"], r"parent of node 0 is '-1', expected a whole number"),
    ],
)
def test_what_is_no_list_of_trees(parents: list[object], message: str) -> None:
    with pytest.raises(SpecdoctorError, match=rf"here: .*{message}"):
        checked_parents(parents, "here")


@given(forests())
def test_forests_are_accepted(parents: tuple[int, ...]) -> None:
    assert checked_parents(list(parents)) == parents
