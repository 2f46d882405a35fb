"""Shapes of draft trees, and how their nodes lie in a forward.

Source: the first source document, part A (shared representation and draft trees); SpecInfer (Miao et al. 2023) for
static trees, EAGLE-2 (Li et al. 2024) for dynamic ones. A chain is the tree with one child a node.

A node's parent stands before it; siblings stand in the order in which they are to be tried. Nodes of a static tree lie
level by level.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from specdoctor.errors import SpecdoctorError
from specdoctor.kernels.tree_mask import tree_attention_mask, tree_depths, with_anchor

MOST_NODES = 256


@dataclass(frozen=True)
class StaticTree:
    """A tree of one fixed shape: `parents[i]` of node i, -1 the anchor. `sampled` draws siblings from the drafter's
    distribution without replacement (at temperature 0: its likeliest tokens); else siblings are always the likeliest.
    """

    parents: tuple[int, ...]
    sampled: bool = True

    @property
    def depth(self) -> int:
        return max(node_depths(self.parents), default=0)

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def label(self) -> str:
        """Short name of the shape: children a level where they are even, else the number of nodes."""
        depths = node_depths(self.parents)
        widths = [1, *(depths.count(depth) for depth in range(1, self.depth + 1))]
        branching = [wide // above for above, wide in pairwise(widths)]
        even = min(branching) > 0 and branching_parents(branching) == self.parents
        shape = "x".join(map(str, branching)) if even else f"{self.nodes}nodes"
        return shape if self.sampled else f"{shape}-likeliest"


@dataclass(frozen=True)
class DynamicTree:
    """The `nodes` likeliest nodes by cumulative draft probability, of a beam of `top_k` expanded `depth` levels deep.

    Siblings are the drafter's likeliest tokens, never samples: dropping a sampled token for its value would change
    the law of those that stay.
    """

    nodes: int
    depth: int
    top_k: int = 4

    @property
    def sampled(self) -> bool:
        return False

    @property
    def label(self) -> str:
        return f"best{self.nodes}-depth{self.depth}-top{self.top_k}"


Tree = StaticTree | DynamicTree


def parse_tree(text: str, sampled: bool = True) -> Tree:
    """A shape from the command line: `2,2,1` children a level; `[-1,-1,0]` parents; `nodes=16,depth=5,top_k=4`."""
    cleaned = text.strip().replace(" ", "")
    try:
        if cleaned.startswith("["):
            if not cleaned.endswith("]"):
                raise ValueError
            parents = tuple(int(part) for part in cleaned.strip("[]").split(",") if part)
            check_parents(parents, text)
            return StaticTree(parents, sampled)
        if "=" in cleaned:
            pairs = dict(part.split("=", 1) for part in cleaned.split(","))
            wrong = sorted(set(pairs) - {"nodes", "depth", "top_k"})
            if wrong or not {"nodes", "depth"} <= set(pairs):
                raise ValueError
            tree = DynamicTree(**{key: int(value) for key, value in pairs.items()})
            if min(tree.nodes, tree.depth, tree.top_k) < 1 or tree.nodes > MOST_NODES or tree.depth > tree.nodes:
                raise ValueError
            return tree
        return StaticTree(branching_parents([int(part) for part in cleaned.split(",")]), sampled)
    except ValueError:
        raise SpecdoctorError(
            f"--tree {text}: expected children a level such as 2,2,1, parents such as [-1,-1,0], or "
            f"nodes=16,depth=5,top_k=4 (at most {MOST_NODES} nodes, depth no more than nodes)"
        ) from None


def branching_parents(branching: Seq[int]) -> tuple[int, ...]:
    """Parents of the tree in which every node of level d has `branching[d]` children. Raises ValueError."""
    parents: list[int] = []
    level = [-1]
    for width in branching:
        if width < 1 or len(parents) + width * len(level) > MOST_NODES:
            raise ValueError(branching)
        first = len(parents)
        parents += [parent for parent in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return tuple(parents)


def check_parents(parents: Seq[int], where: str) -> None:
    """Raise unless each parent stands before its child and nodes lie level by level."""
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise SpecdoctorError(
                f"{where}: parent of node {node} is {parent}, expected -1 (the anchor) or a node before it"
            )
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if node and depths[node] < depths[node - 1]:
            raise SpecdoctorError(
                f"{where}: node {node} has depth {depths[node]} after one of depth {depths[node - 1]}; expected nodes "
                "level by level"
            )
    if not 0 < len(parents) <= MOST_NODES:
        raise SpecdoctorError(f"{where}: {len(parents)} nodes, expected 1 to {MOST_NODES}")


@lru_cache(maxsize=4096)
def node_depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of each node, 1 for children of the anchor."""
    return tuple(depth + 1 for depth in tree_depths(parents))


@lru_cache(maxsize=256)
def rows_visible(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """Which rows [n + 1, n + 1] of [anchor, nodes...] see which: each its ancestors, the anchor and itself."""
    return tree_attention_mask(with_anchor(parents), device)
