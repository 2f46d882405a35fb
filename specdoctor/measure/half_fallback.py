"""float16 where the device has no kernel for it: computed in float32, rounded to float16 after every operation.

Contract: an operation that the device can do in float16 is left to the device. One that it cannot do is computed on
float32 copies of its inputs and its result is rounded to float16, overflow to infinity included, so that magnitudes
are those of float16 arithmetic after every step. What was emulated is counted by name.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

REFUSALS = ("not implemented for 'Half'", "not supported for Half", "expected m1 and m2 to have the same dtype")


class HalfFallback(TorchDispatchMode):
    """While it is entered, operations without a float16 kernel are emulated."""

    def __init__(self) -> None:
        super().__init__()
        self.emulated: Counter[str] = Counter()  # by name of the operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if func._schema.is_mutable or not any(words in str(error) for words in REFUSALS):
                raise
        self.emulated[func.overloadpacket.__name__] += 1
        return tree_map(_to_half, func(*tree_map(_to_single, args), **tree_map(_to_single, kwargs)))


def _to_single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.dtype == torch.float32 else value
