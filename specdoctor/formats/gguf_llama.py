"""A Llama GGUF file rewritten as a plain Hugging Face folder with float32 weights and the same tokenizer.

transformers can load such a file too, but needs accelerate for it, keeps the weights packed from 5.24 on, and leaves
out SmolLM's digit rule. Here `gguf` dequantises (bit for bit what transformers gets), and this module only renames.
Contract: `convert_llama_gguf(gguf, folder)` writes config.json, generation_config.json, model.safetensors (embeddings
tied, so no lm_head) and the tokenizer files. Written for files of the kind that `specdoctor.formats.smollm2` pins by
hash: architecture llama, tied embeddings, pre-tokenizer smollm.

float32 because a dequantised value `d * q + m` has more bits than bfloat16 keeps (18% of SmolLM2's survive that cast):
the folder then holds the numbers that the GGUF means, and the engine casts if it is told to.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from specdoctor.errors import SpecdoctorError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

EXPECTED = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
CONTROL_TOKEN = 3  # a token_type of the GGUF specification: never made from plain text
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_llama_gguf(gguf_path: Path, folder: Path, bars: Progress) -> None:
    """Write the model of `gguf_path` into `folder`; `bars` gets one task per phase.

    Raises SpecdoctorError when the file is of another architecture or tokenizer than this module knows.
    """
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaForCausalLM

    reader = GGUFReader(gguf_path)
    for key, expected in EXPECTED.items():
        if (found := _value(reader, key)) != expected:
            raise SpecdoctorError(
                f"{gguf_path}: key {key} is {found!r}, expected {expected!r}; this file is not supported"
            )
    config = _config(reader)
    weights = _dequantised_weights(reader, config, bars)

    task = bars.add_task("save", total=None)
    with torch.device("meta"):  # no memory and no random numbers: it only has to agree on every name and shape
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, strict=True, assign=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors creates the file for its owner only; a shared cache wants the umask's rights.
    (folder / "model.safetensors").chmod(gguf_path.stat().st_mode)
    config.save_pretrained(folder)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    _tokenizer(reader).save_pretrained(folder)
    bars.update(task, total=1, completed=1)


def _value(reader: "GGUFReader", key: str) -> Any:
    return reader.fields[key].contents() if key in reader.fields else None


def _config(reader: "GGUFReader") -> Any:
    import numpy as np
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(_value(reader, "tokenizer.ggml.tokens")),
        hidden_size=_value(reader, "llama.embedding_length"),
        intermediate_size=_value(reader, "llama.feed_forward_length"),
        num_hidden_layers=_value(reader, "llama.block_count"),
        num_attention_heads=_value(reader, "llama.attention.head_count"),
        num_key_value_heads=_value(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_value(reader, "llama.context_length"),
        # Stored as float32: its shortest decimal is the number that was meant.
        rms_norm_eps=float(str(np.float32(_value(reader, "llama.attention.layer_norm_rms_epsilon")))),
        rope_parameters={"rope_type": "default", "rope_theta": _value(reader, "llama.rope.freq_base")},
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def _dequantised_weights(reader: "GGUFReader", config: Any, bars: Progress) -> dict[str, "torch.Tensor"]:
    """State dict of LlamaForCausalLM without `lm_head`, float32, one tensor per GGUF tensor."""
    import torch
    from gguf import dequantize

    task = bars.add_task("dequantise", total=len(reader.tensors))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for stored in reader.tensors:
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).astype("float32"))
        kind = stored.name.split(".")[-2]
        if kind in heads:
            tensor = rotary_halves(tensor, heads[kind])
        weights[hf_name(stored.name)] = tensor
        bars.advance(task)
    return weights


def rotary_halves(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Undo llama.cpp's row order of a q or k projection [heads * D, H].

    The two rows that rotary embedding turns together are neighbours there; Hugging Face has them D / 2 apart.
    """
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *block, kind, suffix = gguf_name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{HF_NAMES[kind]}.{suffix}"


def _tokenizer(reader: "GGUFReader") -> Any:
    """The byte-level BPE of the GGUF with SmolLM's pre-tokenizer.

    Digits are split off one by one before the byte-level rule looks; without that, white space in front of a digit is
    cut otherwise than by llama.cpp and by the model's own tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[_value(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_value(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_value(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_value(reader, "tokenizer.ggml.padding_token_id")],
        chat_template=_value(reader, "tokenizer.chat_template"),
        model_max_length=_value(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
