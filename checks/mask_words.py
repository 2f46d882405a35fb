"""The words of findings on masks. Imports nothing, so that listing the checks stays instant."""

from collections.abc import Sequence as Seq

# Kinds of wrong entries: which columns a row sees.
ENTRY_KINDS = {
    "inverted boolean": "True and False (or 0 and the negative number) have changed places",
    "everything visible": "no mask: every row sees the whole tree",
    "transposed": "rows and columns have changed places: nodes see their descendants in place of their ancestors",
    "causal instead of tree": "each row sees all earlier rows, as a chain would",
    "shifted by one column": "each row has the pattern of the column beside it; the context may be off by one",
    "shifted by one row": "each row has the pattern of the row beside it; the anchor's row may be missing",
    "row sees nothing": "no column is visible, so softmax has nothing to choose from",
    "self hidden": "a node does not see itself",
    "ancestor hidden": "a node does not see one of its ancestors",
    "sibling visible": "a node sees another child of its parent, which is no part of its text",
    "descendant visible": "a node sees one below it, its own future",
    "other request visible": "a node sees one of another request",
    "other branch visible": "a node sees one of another branch, which is no part of its text",
    "context cut": "a row does not see all committed tokens",
    "beyond the window visible": "a row sees further back than the sliding window reaches",
    "padding visible": "a row sees columns beyond the tree, which hold nothing or what an earlier draft left there",
}

# Kinds of wrong numbers, whatever they should say.
VALUE_KINDS = {
    "NaN": "the mask itself is not a number",
    "sign flipped": "positive numbers raise the scores that they should hide",
    "does not hide": "a negative number near zero lowers a weight and does not make it zero",
    "0/1 numbers": "as an additive mask it hides nothing: 1 is added to some scores, 0 to the others",
    "all -inf row": "softmax of a row of -inf is NaN, and NaN only shows as low acceptance",
    "row sees nothing": "softmax of a row of equal numbers weighs all columns alike, hidden ones included",
    "dtype overflow": "the number is beyond float16, whose smallest is -65504, and becomes -inf there",
    "-inf": "-inf is right as long as each row sees something; the most negative finite number is right always",
}


def short_list(numbers: Seq[int], most: int = 12) -> str:
    """Numbers for a title: `0, 3, 4`, cut where there are many."""
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"
