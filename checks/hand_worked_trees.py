"""The trees worked out by hand that ship as data, and the rules of the engine applied to them.

Contract: everything expected comes from the file, nothing is computed for it here; what is computed is what specdoctor
itself would do with the same tree, to be compared. The format of the files is in their README.
"""

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from specdoctor.engine.draft import Draft
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.verify import verify
from specdoctor.kernels.tree_mask import tree_depths

SEEN = "1"


@dataclass(frozen=True)
class Acceptance:
    """The target's greedy choices, and what they accept by hand."""

    after_anchor: list[int]  # by request
    after_node: list[int]
    path: list[list[int]]  # by request: accepted nodes, root first
    committed: list[list[int]]  # by request: their tokens, then the target's own next one


@dataclass(frozen=True)
class HandWorkedTree:
    """One tree of n nodes and all that follows from it, by hand."""

    name: str
    about: str
    parents: tuple[int, ...]
    requests: tuple[int, ...]  # [n] the request of each node
    starts: tuple[int, ...]  # position of each request's first draft token
    visible: Tensor  # bool [n, n]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    acceptance: tuple[Acceptance, ...]

    @classmethod
    def of(cls, content: dict[str, Any]) -> "HandWorkedTree":
        """From a file's content."""
        parents = tuple(content["parents"])
        return cls(
            content["name"],
            content["about"],
            parents,
            tuple(content.get("requests", [0] * len(parents))),
            tuple(content["starts"]),
            torch.tensor([[mark == SEEN for mark in row] for row in content["visible"]]),
            tuple(content["positions"]),
            tuple(content["tokens"]),
            tuple(Acceptance(**case) for case in content["acceptance"]),
        )

    @property
    def members(self) -> list[list[int]]:
        """Nodes of each request, in the order of the list."""
        return members(self.requests)


def load_hand_worked_trees() -> list[HandWorkedTree]:
    """All trees that ship, by file name."""
    folder = files("specdoctor.data") / "trees"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
    return [HandWorkedTree.of(json.loads((folder / name).read_text("utf-8"))) for name in names]


def members(requests: Seq[int]) -> list[list[int]]:
    """Nodes of each request, in the order of the list."""
    found: list[list[int]] = [[] for _ in range(max(requests) + 1)]
    for node, request in enumerate(requests):
        found[request].append(node)
    return found


def local_parents(parents: Seq[int], nodes: Seq[int]) -> tuple[int, ...]:
    """Parents of some nodes, closed under parents, numbered by their place in `nodes`."""
    place = {node: index for index, node in enumerate(nodes)}
    return tuple(-1 if parents[node] == -1 else place[parents[node]] for node in nodes)


def engine_acceptance(tree: HandWorkedTree, case: Acceptance) -> tuple[list[list[int]], list[list[int]]]:
    """Accepted path and committed tokens of each request by the engine's own greedy verification.

    The engine wants parents before children, so each request's nodes go to it level by level and come back renumbered.
    """
    depths = tree_depths(tree.parents)
    rows, drafts, orders = [], [], []
    for request, nodes in enumerate(tree.members):
        order = sorted(nodes, key=depths.__getitem__)
        tokens = torch.tensor([tree.tokens[node] for node in order])
        drafts.append(Draft(tokens, local_parents(tree.parents, order)))
        rows += [case.after_anchor[request], *(case.after_node[node] for node in order)]
        orders.append(order)
    logits = torch.nn.functional.one_hot(torch.tensor(rows)).float()
    sequences = [Sequence([0], max_new_tokens=len(tree.parents) + 1) for _ in drafts]
    verdicts = verify(sequences, drafts, logits)
    paths = [[order[node] for node in verdict.path] for order, verdict in zip(orders, verdicts, strict=True)]
    return paths, [verdict.tokens for verdict in verdicts]
