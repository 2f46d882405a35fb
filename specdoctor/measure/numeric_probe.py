"""Where numbers go wrong in a forward: every operation and every module is watched while it runs.

Contract: `NumericProbe` changes nothing that is computed (but for `floor`). A birth is the first value that is not
finite and that a module passed on, with the operation that made it from finite values, or the weight it came from.
Infinity that an operation makes on purpose (a mask, the logarithm of 0) and that no module passes on is no birth.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose infinities are arithmetic; all others may make them on purpose.
ARITHMETIC = frozenset(
    (
        *("to", "_to_copy", "add", "add_", "sub", "mul", "mul_", "div", "div_", "pow", "square", "square_"),
        "reciprocal",
        *("exp", "exp_", "rsqrt", "sum", "mean", "var", "std", "cumsum", "linalg_vector_norm", "silu", "gelu", "relu"),
        *("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "dot", "convolution"),
        *("rms_norm", "_fused_rms_norm", "layer_norm", "native_layer_norm"),
    )
)
PRODUCTS = frozenset(("bmm", "baddbmm", "matmul"))  # scores of attention, and what it gathers
UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")
MOVES = ("copy_", "index_put_", "_index_put_impl_", "set_", "clone")  # what they write was made elsewhere
SOFTMAX = ("_softmax", "_safe_softmax", "softmax")
FUSED = "scaled_dot_product"  # in the names of torch's fused attention
MASK_ARGUMENTS = ("attn_mask", "attn_bias")
HIDDEN = -6e4  # a row whose best score is below this sees nothing: the lowest number of float16 is -65504


@dataclass(frozen=True)
class Birth:
    """The first value that is not finite."""

    module: str  # the innermost module that was running, or the one that holds the place where it was seen
    operation: str  # "" when it came in from outside
    cause: str  # "overflow", "nan", "weight" or "unknown"
    seen_at: str  # module, and whether at its input or output
    row: int | None  # row of the forward, None where rows cannot be told
    rows: int  # rows that were not finite there
    dtype: str
    phase: str
    weight: str = ""  # of cause "weight": its name


@dataclass
class MaskedRows:
    """Softmax over rows that see nothing: every score is -inf, or the most negative number."""

    module: str
    operation: str
    count: int
    of: int
    row: int  # the first one
    gives: str  # "nan", "zeros", or "all columns alike"
    phase: str


@dataclass
class Peak:
    """The largest finite magnitude that a module put out."""

    magnitude: float
    phase: str


@dataclass(frozen=True)
class Suspect:
    """An operation that made something not finite from finite values, or from a weight."""

    module: str
    operation: str
    cause: str
    dtype: str
    positive: bool  # overflow towards +inf
    weight: str = ""


@dataclass
class ProbeRecord:
    """What a probe saw."""

    births: dict[str, Birth] = field(default_factory=dict)  # by side, the first of each
    masked: list[MaskedRows] = field(default_factory=list)
    peaks: dict[str, Peak] = field(default_factory=dict)  # by module; "... scores" for products within attention
    swallowed: dict[str, Suspect] = field(default_factory=dict)  # by module: overflow that its own output hides


class NumericProbe(TorchDispatchMode):
    """Watch `models` (side -> module) while entered; names are `side: path.of.module`."""

    def __init__(self, models: Mapping[str, nn.Module], floor: float | None = None) -> None:
        """`floor`: put this number in place of -inf before every softmax, to see whether that cures it."""
        super().__init__()
        self.models, self.floor = models, floor
        self.record, self.phase = ProbeRecord(), ""
        self._stack: list[str] = []
        self._looking = False  # what the probe itself computes is not watched
        self._suspects: list[Suspect] = []
        self._weights = {
            parameter.untyped_storage().data_ptr(): f"{side}: {name}"
            for side, model in models.items()
            for name, parameter in _tensors(model)
        }

    @contextmanager
    def watching(self) -> Iterator["NumericProbe"]:
        """Hooks on all modules, and this mode entered."""
        handles = []
        for side, model in self.models.items():
            for name, module in model.named_modules():
                label = f"{side}: {name}" if name else f"{side}:"
                leaf = not any(True for _ in module.children())
                handles.append(module.register_forward_pre_hook(self._before(label, leaf), with_kwargs=True))
                handles.append(module.register_forward_hook(self._after(label), always_call=True))
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()
            self._settle()

    # Modules ---------------------------------------------------------------------------------------------------------

    def _before(self, label: str, leaf: bool) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if leaf:
                with self._unwatched():
                    self._look(label, "input", args)
            self._stack.append(label)

        return hook

    def _after(self, label: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()
            with self._unwatched():
                self._look(label, "output", output)
                for tensor in _floats(output):
                    self._raise_peak(label, tensor)

        return hook

    def _look(self, label: str, end: str, values: Any) -> None:
        """Settle a birth at the first module that takes or gives something that is not finite."""
        side = label.partition(":")[0]
        if side in self.record.births:
            return
        for tensor in _floats(values):
            finite = torch.isfinite(tensor)
            if not finite.all():
                self.record.births[side] = self._birth(label, end, finite, tensor)
                return

    def _birth(self, label: str, end: str, finite: Tensor, tensor: Tensor) -> Birth:
        rows = _bad_rows(finite)
        side = label.partition(":")[0]
        suspect = next((s for s in reversed(self._suspects) if s.module.startswith(f"{side}:")), None)
        holder = label.rpartition(".")[0] if end == "input" and "." in label else label
        if suspect is None:
            return Birth(label, "", "unknown", f"{label} ({end})", rows[0], len(rows), _name(tensor.dtype), self.phase)
        deeper = holder if end == "input" and holder.startswith(suspect.module) else suspect.module
        self._suspects.clear()
        return Birth(
            deeper,
            suspect.operation,
            suspect.cause,
            f"{label} ({end})",
            rows[0],
            len(rows),
            suspect.dtype,
            self.phase,
            suspect.weight,
        )

    def _raise_peak(self, label: str, tensor: Tensor) -> None:
        magnitude = _largest_finite(tensor)
        if magnitude > (self.record.peaks[label].magnitude if label in self.record.peaks else -1.0):
            self.record.peaks[label] = Peak(magnitude, self.phase)

    # Operations ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if self._looking or not self._stack or func.is_view or name in UNWRITTEN or name in MOVES:
            return func(*args, **kwargs)
        args, kwargs, masked = self._masked_rows(func, name, args, kwargs)
        out = func(*args, **kwargs)
        if masked is not None and masked.any():
            self._note_masked(name, masked, out)
        for tensor in _floats(out):
            if not torch.isfinite(tensor).all():
                self._suspect(name, tensor, (args, kwargs))
            if name in PRODUCTS:
                self._raise_peak(f"{self._stack[-1]} scores", tensor)
        return out

    def _masked_rows(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Tensor | None]:
        """Rows of a softmax or a fused attention that see nothing; and the arguments, with `floor` in them."""
        if name in SOFTMAX:
            masked = args[0].amax(args[1] if isinstance(args[1], int) else -1) <= HIDDEN
            return (self._floored(args[0]), *args[1:]), kwargs, masked
        if FUSED not in name:
            return args, kwargs, None
        names = [argument.name for argument in func._schema.arguments]
        place = next((names.index(known) for known in MASK_ARGUMENTS if known in names), None)
        key = "" if place is None else names[place]
        mask = kwargs.get(key) if place is None or place >= len(args) else args[place]
        if not isinstance(mask, Tensor):
            return args, kwargs, None
        if mask.dtype == torch.bool:
            return args, kwargs, ~mask.any(-1)
        if key in kwargs:
            kwargs = {**kwargs, key: self._floored(mask)}
        else:
            args = (*args[:place], self._floored(mask), *args[place + 1 :])  # type: ignore[operator]
        return args, kwargs, mask.amax(-1) <= HIDDEN

    def _floored(self, values: Tensor) -> Tensor:
        if self.floor is None:
            return values
        return values.masked_fill(values == -torch.inf, self.floor)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def _suspect(self, name: str, out: Tensor, given: Any) -> None:
        """Remember an operation that made something not finite from finite values, or from a weight that is not."""
        label, dtype = self._stack[-1], _name(out.dtype)
        nan_in = inf_in = False
        weight = ""
        for tensor in _floats(given):
            bad_nan, bad_inf = bool(tensor.isnan().any()), bool(tensor.isinf().any())
            owner = self._weights.get(tensor.untyped_storage().data_ptr()) if bad_nan or bad_inf else None
            if owner is not None:
                weight = owner
            else:
                nan_in, inf_in = nan_in or bad_nan, inf_in or bad_inf
        if nan_in:
            return
        if weight and not inf_in:
            self._suspects.append(Suspect(label, name, "weight", dtype, True, weight))
        elif out.isnan().any():
            self._suspects.append(Suspect(label, name, "nan", dtype, True))
        elif not inf_in and name in ARITHMETIC:
            self._suspects.append(Suspect(label, name, "overflow", dtype, bool((out == torch.inf).any())))

    def _note_masked(self, name: str, masked: Tensor, out: Tensor) -> None:
        first = int(masked.flatten().nonzero()[0, 0]) % masked.shape[-1]
        values = _floats(out)[0]
        zeros = bool((values == 0).all(-1).any())
        gives = "nan" if bool(values.isnan().any()) else "zeros" if zeros else "all columns alike"
        label = self._stack[-1]
        if not any(known.module == label and known.phase == self.phase for known in self.record.masked):
            count = int(masked.sum())
            self.record.masked.append(MaskedRows(label, name, count, masked.numel(), first, gives, self.phase))

    def _settle(self) -> None:
        """What was made and never passed on: an overflow inside a module, whose output is finite and wrong."""
        for suspect in self._suspects:
            passed_on = suspect.module.partition(":")[0] in self.record.births
            if suspect.positive and suspect.cause != "weight" and not passed_on:
                self.record.swallowed.setdefault(suspect.module, suspect)
        self._suspects.clear()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, and tensors that a drafter keeps beside them (a shared embedding or head)."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, value in vars(model).items():
        if isinstance(value, Tensor):
            yield name, value


def _floats(values: Any) -> list[Tensor]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]


def _bad_rows(finite: Tensor) -> list[int]:
    """Rows that are not finite: of [1, N, ...] the second dimension, of [N, ...] the first."""
    flat = finite
    while flat.ndim > 2 and flat.shape[0] == 1:
        flat = flat[0]
    if flat.ndim > 1:
        flat = flat.flatten(1).all(-1)
    return (~flat).nonzero().flatten().tolist()


def _largest_finite(tensor: Tensor) -> float:
    magnitude = tensor.abs().max()
    if not torch.isfinite(magnitude):
        finite = tensor[torch.isfinite(tensor)]
        return float(finite.abs().max()) if finite.numel() else 0.0
    return float(magnitude)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
