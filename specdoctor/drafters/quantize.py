"""Weights of a draft model in 8 bits, through torchao (an optional dependency).

The target is never touched: verification keeps the output what it was, whatever the drafter's weights become.
It saves memory. Whether it saves time is for `bench` to say: without compilation a CPU unpacks the weights for each
product and takes longer than in float32.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from specdoctor.errors import EnvironmentMissingError, SpecdoctorError

KINDS = ("int8",)


def quantize_weights(model: nn.Module, kind: str) -> None:
    """Replace the weights of the linear layers, in place; int8 is symmetric with one scale an output row.

    Embeddings stay as they are. Raises `SpecdoctorError` for another kind, `EnvironmentMissingError` without torchao.
    """
    if kind not in KINDS:
        raise SpecdoctorError(f"--draft-quantize {kind}: expected {' or '.join(KINDS)}")
    with _quiet("torchao", "torch.utils._pytree"):  # they warn of kernels for other machines
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        except ImportError as error:
            raise EnvironmentMissingError(
                f"--draft-quantize {kind}: torchao is not there ({error}); run `pip install 'specdoctor[quantize]'`"
            ) from None
        quantize_(model, Int8WeightOnlyConfig())


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
