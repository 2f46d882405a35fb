"""The target: any Hugging Face causal LM, run over packed rows with the engine's own KV cache and attention.

Contract: `forward` runs the model once over a flat row of tokens and returns logits and tapped hidden states. The
modelling code is the library's own and is not forked: attention goes through a function registered under the name
`specdoctor`, and the layout of the rows reaches it as a keyword. Hidden states are indexed HS[0..L]: HS[0] is the input
of layer 0, HS[i+1] the raw output of layer i (so HS[L] is before the final norm; `FINAL_NORMED` is after it).
"""

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from specdoctor.engine.device import resolve_device, resolve_dtype
from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import PackedRows
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.spec import FINAL_NORMED
from specdoctor.kernels.attention import choose_attention

ATTENTION_NAME = "specdoctor"
PREFILL_ROWS = 512  # rows of one prefill forward: bounds the score matrix

# State that cannot be cut back after a rejected draft. Anything else than these two attends over columns.
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
RECURRENT_MODULES = ("mamba", "rwkv", "xlstm", "gateddelta", "shortconv", "linearattention", "recurrent", "lightning")


@dataclass(slots=True)
class TargetOutput:
    logits: Tensor  # [M, V] of the rows asked for, in the model's dtype
    taps: Tensor | None  # [N, len(taps) * H]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, h, N, D], key and value [1, hkv, N, D] -> [1, N, h, D]."""
    run: AttentionRun = kwargs["specdoctor_run"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    run.layers_seen.add(layer)
    if mask is not None and (run.no_mask is None or mask.data_ptr() != run.no_mask.data_ptr()):
        raise SpecdoctorError(
            f"{type(module).__name__} (layer {layer}) makes an attention mask of its own, which the engine cannot "
            "follow; use a target with plain or sliding-window causal attention"
        )
    k, v = run.cache.write(layer, key[0], value[0], run.rows)
    window = kwargs.get("sliding_window") or run.windows[layer]
    out = run.attention(
        run.rows.spread(query[0]),
        k,
        v,
        run.rows.mask(window),
        kwargs.get("scaling") or query.shape[-1] ** -0.5,
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
    )
    return run.rows.gather(out).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


@dataclass(slots=True)
class AttentionRun:
    """What the attention function needs to know of one forward."""

    rows: PackedRows
    cache: KVCache
    windows: list[int | None]
    attention: Any
    no_mask: Tensor | None = None  # what the model was handed in the place of a mask
    layers_seen: set[int] = field(default_factory=set)  # layers whose attention came through here


class Target:
    """A causal LM as the engine sees it: KV slots, one packed forward, taps."""

    def __init__(self, model: PreTrainedModel, folder: Path | None = None, attention: str = "auto") -> None:
        self.model = model.eval()
        self.folder = folder
        self.config = model.config.get_text_config()
        refuse_unsupported_layers(model)
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.attention = choose_attention(self.device, self.dtype, attention)
        self.decoder = model.get_decoder()  # of a multimodal model, its text part
        self.layers = _decoder_layers(self.decoder, self.config.num_hidden_layers)
        if "position_ids" not in signature(model.forward).parameters:
            raise SpecdoctorError(
                f"{self.name}: {type(model).__name__} takes no position_ids, so several sequences cannot share a "
                "forward; use a target with rotary or learned positions"
            )
        self.windows = _windows(self.config)
        self.cache = KVCache(self.device)
        # A ready 4D mask is handed through by transformers' mask factories, which otherwise look at the positions'
        # values (a device synchronisation). The registered attention never reads it.
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        self._tapped: dict[int, Tensor] = {}
        self._hooked: set[int] = set()
        model.set_attn_implementation(ATTENTION_NAME)

    @classmethod
    def load(cls, folder: Path, device: str = "auto", dtype: str = "auto", attention: str = "auto") -> "Target":
        """Load a local HF folder. Raises `SpecdoctorError` when the folder cannot be a causal LM."""
        where = resolve_device(device)
        if not sys.stderr.isatty():
            disable_progress_bar()
        kind = resolve_dtype(dtype, where, folder)
        verbosity = get_verbosity()
        set_verbosity_error()  # what its report would say of missing tensors is one line of ours
        try:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=kind, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
            )
        except Exception as error:  # whatever a broken file makes the many config and model classes raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            detail = " ".join(lines[: 1 + lines[0].endswith(":")]) if lines else type(error).__name__
            raise SpecdoctorError(f"{folder}: transformers cannot load this as a causal LM: {detail}") from error
        finally:
            set_verbosity(verbosity)
        _refuse_incomplete(folder, loaded)
        return cls(model.to(where), folder, attention)

    @property
    def name(self) -> str:
        return self.folder.name if self.folder else type(self.model).__name__

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding, padding included."""
        return self.lm_head.weight.shape[0]

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @cached_property
    def max_positions(self) -> int:
        return getattr(self.config, "max_position_embeddings", None) or 2**31

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    @cached_property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the LM head."""
        for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
            module = getattr(self.decoder, name, None)
            if isinstance(module, nn.Module):
                return module
        raise SpecdoctorError(f"{self.name}: no final norm found in {type(self.decoder).__name__}")

    @property
    def stop_ids(self) -> frozenset[int]:
        """End-of-text ids, from the generation config and the model config."""
        ids: set[int] = set()
        for source in (self.model.generation_config, self.config):
            eos = getattr(source, "eos_token_id", None)
            ids |= set(eos) if isinstance(eos, list | tuple) else set() if eos is None else {eos}
        return frozenset(ids)

    def open(self) -> int:
        return self.cache.open()

    def close(self, slot: int) -> None:
        self.cache.close(slot)

    @torch.inference_mode()
    def forward(
        self,
        rows: PackedRows,
        input_ids: Tensor,
        *,
        logit_rows: Tensor | None = None,
        taps: Seq[int] = (),
    ) -> TargetOutput:
        """Run the model over `input_ids` [N]; logits of `logit_rows` (all rows if None) and the tapped states.

        The new KV columns are written but not committed: see `KVCache.keep`.
        """
        self._hook(taps)
        run = AttentionRun(rows, self.cache, self.windows, self.attention.compute, self._no_mask)
        try:
            output = self.model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=rows.positions.unsqueeze(0),
                attention_mask=self._no_mask,
                use_cache=False,
                logits_to_keep=0 if logit_rows is None else logit_rows,
                specdoctor_run=run,
            )
        except KeyError as error:
            if error.args == ("specdoctor_run",):
                raise SpecdoctorError(
                    f"{self.name}: the modelling code of {type(self.model).__name__} does not hand keywords to its "
                    "attention function, so it cannot be a target here"
                ) from None
            raise
        self._check_attention(run)
        states = torch.cat([self._tapped[i] for i in taps], dim=-1) if taps else None
        self._tapped.clear()
        logits = output.logits[0]
        if logit_rows is not None and len(logits) != len(logit_rows):  # modelling code that knows no logits_to_keep
            logits = logits[logit_rows]
        return TargetOutput(logits, states)

    @torch.inference_mode()
    def lower(self, rows: PackedRows, input_ids: Tensor, layers: int) -> Tensor:
        """Run only the first `layers` layers over `input_ids` [N]; their raw output HS[layers] [N, H].

        Their new KV columns are written but not committed, as by `forward`.
        """
        run = AttentionRun(rows, self.cache, self.windows, self.attention.compute, self._no_mask)
        handle = self.layers[layers - 1].register_forward_hook(_leave)
        try:
            self.decoder(
                input_ids=input_ids.unsqueeze(0),
                position_ids=rows.positions.unsqueeze(0),
                attention_mask=self._no_mask,
                use_cache=False,
                specdoctor_run=run,
            )
        except _LeftEarly as left:
            return left.states
        finally:
            handle.remove()
        raise AssertionError("the decoder did not reach its own layer")

    def _check_attention(self, run: "AttentionRun") -> None:
        """A layer with attention code of its own would mix the packed sequences, and only the text would show it."""
        if len(run.layers_seen) < self.num_layers:
            layer = min(set(range(self.num_layers)) - run.layers_seen)
            raise SpecdoctorError(
                f"{self.name}: layer {layer} of {type(self.model).__name__} does not call transformers' attention "
                "interface, so it cannot be a target here; use a model whose attention goes through that interface"
            )

    def _hook(self, taps: Seq[int]) -> None:
        for index in taps:
            if index in self._hooked:
                continue
            self._hooked.add(index)
            if index == FINAL_NORMED:
                self.decoder.register_forward_hook(
                    lambda module, args, output: self._tapped.__setitem__(FINAL_NORMED, output[0][0])
                )
            elif index == 0:
                self.layers[0].register_forward_pre_hook(
                    lambda module, args, kwargs: self._tapped.__setitem__(
                        0, (args[0] if args else kwargs["hidden_states"])[0]
                    ),
                    with_kwargs=True,
                )
            else:
                self.layers[index - 1].register_forward_hook(_tap_hook(self._tapped, index))


class _LeftEarly(Exception):  # noqa: N818 - no error: how `lower` leaves the model in its middle
    def __init__(self, states: Tensor) -> None:
        self.states = states


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    raise _LeftEarly((output[0] if isinstance(output, tuple) else output)[0])


def _refuse_incomplete(folder: Path, loaded: dict[str, Any]) -> None:
    """Raise when the checkpoint lacks a tensor or has it in another shape: transformers would fill it at random."""
    for name, stored, wanted in sorted(loaded["mismatched_keys"]):
        raise SpecdoctorError(
            f"{folder}: tensor {name} has shape {list(stored)}, expected {list(wanted)} by its config.json; fetch the "
            "model again, or mend its config.json"
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise SpecdoctorError(
            f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all), and its config.json promises it; fetch "
            "the model again"
        )


def _tap_hook(tapped: dict[int, Tensor], index: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tapped[index] = (output[0] if isinstance(output, tuple) else output)[0]

    return hook


def refuse_unsupported_layers(model: PreTrainedModel) -> None:
    """Raise when a layer's state cannot be cut back after a rejected draft, naming the layer type."""
    config = model.config.get_text_config()
    found = {kind for kind in getattr(config, "layer_types", None) or [] if kind not in SUPPORTED_LAYER_TYPES}
    for module in model.modules():
        name = type(module).__name__
        recurrent = any(part in name.lower() for part in RECURRENT_MODULES)
        if recurrent and list(module.children()) and not isinstance(module, PreTrainedModel):
            found.add(name)
    if not found:
        return
    reason = "keeps a state that cannot be cut back after a rejected draft"
    if found == {"chunked_attention"}:
        reason = "attends within chunks, which the engine does not express"
    raise SpecdoctorError(
        f"{config.model_type}: layer type {', '.join(sorted(found))} {reason}; expected only "
        f"{' and '.join(sorted(SUPPORTED_LAYER_TYPES))}. Use a target without such layers"
    )


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            name = type(module[0]).__name__
            if "Layer" in name or "Block" in name:
                return module
    raise SpecdoctorError(
        f"{type(decoder).__name__}: no list of {count} decoder layers found, so hidden states cannot be tapped"
    )


def _windows(config: Any) -> list[int | None]:
    """Sliding window of each layer, None where attention is full."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
