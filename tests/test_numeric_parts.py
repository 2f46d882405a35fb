"""The parts of `check-nan`: the probe, the float16 fallback, the weight scan, and what the checks make of numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specdoctor.checks.numerics_case import NumericsCase
from specdoctor.checks.registry import family, run_checks
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.target import Target
from specdoctor.measure.half_fallback import HalfFallback
from specdoctor.measure.numeric_probe import NumericProbe
from specdoctor.measure.numerics import Acceptance, DtypeRun
from specdoctor.measure.weight_scan import WeightFacts, scan_weights


class TestProbe:
    def test_torch_sdpa_gives_zeros_in_silence(self) -> None:
        """No NaN is born; the row is still found."""

        class Attention(nn.Module):
            def forward(self, q: Tensor, mask: Tensor) -> Tensor:
                return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

        model = nn.Sequential()
        model.add_module("attn", Attention())
        mask = torch.zeros(3, 3)
        mask[1] = -torch.inf
        probe = NumericProbe({"target": model})
        with torch.inference_mode(), probe.watching():
            model.attn(torch.randn(1, 1, 3, 8), mask)
        (rows,) = probe.record.masked
        assert (rows.module, rows.row, rows.count, rows.gives) == ("target: attn", 1, 1, "zeros")

    def test_overflow_that_a_norm_hides(self) -> None:
        class HalfNorm(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  # no cast to float32

        model = nn.Sequential()
        model.add_module("norm", HalfNorm())

        def record_of(x: Tensor) -> Any:
            probe = NumericProbe({"drafter": model})
            with torch.inference_mode(), probe.watching():
                model.norm(x)
            return probe.record

        big = torch.full((2, 8), 300.0)
        record = record_of(big.half())
        assert record.births == {} and list(record.swallowed) == ["drafter: norm"]
        assert record_of(big).swallowed == {} and record_of(torch.ones(2, 8).half()).swallowed == {}
        (finding,) = run_checks(family("SD402"), NumericsCase([], [DtypeRun("float16", record=record)]))
        assert finding.severity == "warning" and finding.where["module"] == "norm"

    def test_infinities_made_on_purpose_are_no_fault(self) -> None:
        class Masked(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
                return x.masked_fill(hidden, -torch.inf).softmax(-1) + torch.zeros(3).log().exp()

        probe = NumericProbe({"target": Masked()})
        with torch.inference_mode(), probe.watching():
            probe.models["target"](torch.randn(3, 3))
        assert probe.record.births == {} and probe.record.swallowed == {} and probe.record.masked == []


class TestWeights:
    @staticmethod
    def facts(name: str, rms: float = 1.0, **more: Any) -> WeightFacts:
        usual = {
            "side": "target",
            "name": name,
            "file": Path("m.safetensors"),
            "dtype": "bfloat16",
            "shape": (8, 8),
            "numbers": 64,
            "nan": 0,
            "inf": 0,
            "denormal": 0,
            "zero": 0,
            "largest": rms * 3,
            "rms": rms,
        }
        return WeightFacts(**usual | more)  # type: ignore[arg-type]

    def found(self, *weights: WeightFacts) -> list[tuple[str, str]]:
        findings = run_checks(family("SD401"), NumericsCase(list(weights)))
        return [(finding.subject, finding.where["tensor"]) for finding in findings]

    def test_siblings(self) -> None:
        usual = [self.facts(f"layers.{i}.q.weight", 1 + i / 10) for i in range(6)]
        assert self.found(*usual) == []
        assert self.found(*usual, self.facts("layers.6.q.weight", 300)) == [("norm", "layers.6.q.weight")]
        assert self.found(*usual, self.facts("layers.6.q.weight", 0.002)) == [("norm", "layers.6.q.weight")]
        assert self.found(*usual, self.facts("layers.6.q.weight", 0)) == [("all-zero", "layers.6.q.weight")]
        assert self.found(*usual, self.facts("layers.6.k.weight", 300), self.facts("head.weight", 300)) == []
        assert self.found(*usual, self.facts("layers.6.q.bias", 300), self.facts("layers.5.q.bias", 0.1)) == []

    def test_of_two_siblings_the_odd_one_is_blamed(self) -> None:
        others = [self.facts(f"layers.{i}.k.weight") for i in range(2)]
        pair = [self.facts("layers.0.q.weight"), self.facts("layers.1.q.weight", 1e-4)]
        assert self.found(*others, *pair) == [("norm", "layers.1.q.weight")]
        assert self.found(*others, pair[0], self.facts("layers.1.q.weight", 30)) == []

    def test_denormals_by_dtype(self) -> None:
        assert self.found(self.facts("a", denormal=1)) == [("denormal", "a")]
        assert self.found(self.facts("a", dtype="float16", denormal=12)) == []
        assert self.found(self.facts("a", dtype="float16", denormal=13)) == [("denormal", "a")]

    def test_beyond_float16(self) -> None:
        assert self.found(self.facts("a", largest=65504.0)) == []
        assert self.found(self.facts("a", largest=65505.0)) == [("beyond-float16", "a")]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_the_scan_counts(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdoctor.measure.weight_scan.CHUNK", 3)  # several parts
        tiny = torch.finfo(dtype).smallest_normal / 2
        values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0, 0, 3, -4, tiny], dtype=dtype)

        class Source:
            names = staticmethod(lambda: ["w", "i"])
            dtype = staticmethod(lambda name: str(values.dtype).removeprefix("torch.") if name == "w" else "int64")
            shape = staticmethod(lambda name: (8,))
            file_of = staticmethod(lambda name: Path("f"))
            load = staticmethod(lambda names: {"w": values})

        (facts,) = scan_weights("target", Source())
        assert (facts.nan, facts.inf, facts.zero, facts.denormal, facts.largest) == (1, 2, 2, 1, 4.0)
        assert facts.rms == pytest.approx(5**0.5)


class TestAcceptance:
    @staticmethod
    def lost(**taus: float) -> list[tuple[str, str]]:
        runs = [
            DtypeRun(dtype, acceptance=Acceptance(rounds=100, committed=round(100 * tau)))
            for dtype, tau in taus.items()
        ]
        found = run_checks(family("SD405"), NumericsCase([], runs))
        return [(finding.where["dtype"], finding.evidence["reference"]) for finding in found]

    def test_what_is_lost_and_what_is_rounding(self) -> None:
        assert self.lost(float32=2.0, bfloat16=1.9, float16=1.0) == [("float16", "float32")]
        assert self.lost(float32=2.0, bfloat16=1.6, float16=2.1) == []
        assert self.lost(float32=1.05, float16=1.0) == []  # there was nothing to lose
        assert self.lost(float32=1.0, bfloat16=2.0) == [("float32", "bfloat16")]


class WithoutHalf(TorchDispatchMode):
    """A device that lacks some operations in float16."""

    NAMES = ("linear", "matmul", "softmax", "silu", "mul")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES and any(isinstance(a, Tensor) and a.dtype == torch.float16 for a in args):
            raise NotImplementedError(f"\"{name}\" not implemented for 'Half'")
        return func(*args, **(kwargs or {}))


class TestFallback:
    def test_a_whole_target_on_a_device_that_lacks_half(self, golden: Path) -> None:
        target = Target.load(golden / "target", "cpu", "float16")
        ids = torch.tensor(list(b"def add(a, b):"))

        def logits() -> Tensor:
            slot = target.open()
            try:
                return target.forward(PackedRows([slot], [0], [len(ids)], target.device), ids).logits
            finally:
                target.close(slot)

        native = logits()
        with WithoutHalf(), pytest.raises(NotImplementedError):
            logits()
        with WithoutHalf(), HalfFallback() as fallback:
            emulated = logits()
        assert set(fallback.emulated) == set(WithoutHalf.NAMES) - {"softmax"}  # our softmax is in float32
        assert emulated.dtype == torch.float16
        torch.testing.assert_close(emulated, native, atol=0.05, rtol=0.01)

    def test_operations_without_a_half_kernel_are_computed_in_float32_and_rounded(self) -> None:
        a, b = torch.rand(4, 3).half() * 200, torch.rand(5, 3).half()
        with pytest.raises((RuntimeError, NotImplementedError), match="Half"):
            torch.cdist(a, b)
        with HalfFallback() as fallback, torch.inference_mode():
            out = torch.cdist(a, b)
            overflow = torch.cdist(a, torch.full_like(b, 60000))
            kept = a + 1
        assert out.dtype == torch.float16 and torch.equal(out, torch.cdist(a.float(), b.float()).half())
        assert overflow.isinf().any() and torch.equal(kept, a + 1)
        assert sum(fallback.emulated.values()) == 2 and "add" not in fallback.emulated

    def test_other_errors_pass(self) -> None:
        with pytest.raises(RuntimeError, match="must match"), HalfFallback():
            torch.ones(2).half() + torch.ones(3).half()
