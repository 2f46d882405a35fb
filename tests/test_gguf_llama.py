"""A Llama GGUF rewritten as a Hugging Face folder is the same model with the same tokenizer."""

from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress

from specdoctor.errors import SpecdoctorError
from specdoctor.formats import gguf_llama
from specdoctor.formats.model_folder import check_model_folder


class TestLlamaGguf:
    """A tiny model written as GGUF in llama.cpp's row order must come back as the same function."""

    TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(i) for i in range(33, 127)), "Ġ", "ĠĠ", "Ċ")

    @pytest.fixture(scope="class")
    def model(self):
        import torch
        from gguf import GGMLQuantizationType, dequantize, quantize
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
        rope = {"rope_type": "default", "rope_theta": 1000.0}
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=len(self.TOKENS), rope_parameters=rope, **sizes, **heads)
        ).eval()
        for layer in model.model.layers:  # values that Q8_0 keeps exactly
            weight, kind = layer.mlp.down_proj.weight.data, GGMLQuantizationType.Q8_0
            weight.copy_(torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)))
        return model

    def write(self, model, path: Path, architecture: str = "llama", permute: bool = True) -> Path:
        from gguf import GGMLQuantizationType, GGUFWriter, quantize

        config, writer = model.config, GGUFWriter(path, architecture)
        writer.add_context_length(128)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(list(self.TOKENS))
        writer.add_token_types([3] * 3 + [1] * (len(self.TOKENS) - 3))
        writer.add_token_merges(["Ġ Ġ"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template("{{ messages[0]['content'] }}")
        for name, weight in model.state_dict().items():
            values = weight.numpy()
            parts = name.removesuffix(".weight").split(".")
            if parts[-1] in ("q_proj", "k_proj") and permute:
                heads = config.num_attention_heads if parts[-1] == "q_proj" else config.num_key_value_heads
                # llama.cpp's converter, LlamaModel.permute
                values = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
            names = {hf.rpartition(".")[2]: short for short, hf in gguf_llama.HF_NAMES.items()}
            block = f"blk.{parts[2]}." if "layers" in parts else ""
            if name != "lm_head.weight":
                kind = GGMLQuantizationType.Q8_0 if parts[-1] == "down_proj" else GGMLQuantizationType.F32
                stored = quantize(np.ascontiguousarray(values), kind)
                writer.add_tensor(f"{block}{names[parts[-1]]}.weight", stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def largest_change(self, model, folder: Path) -> float:
        import torch
        from transformers import AutoModelForCausalLM

        again = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.arange(3, 40).view(1, -1)
        with torch.no_grad():
            return float((model(ids).logits - again(ids).logits).abs().max() / model(ids).logits.abs().max())

    def test_same_logits(self, model, tmp_path):
        gguf_llama.convert_llama_gguf(self.write(model, tmp_path / "m.gguf"), tmp_path, Progress(disable=True))
        check_model_folder(tmp_path)
        assert self.largest_change(model, tmp_path) < 1e-5

    def test_other_row_order_would_show(self, model, tmp_path):
        path = self.write(model, tmp_path / "m.gguf", permute=False)
        gguf_llama.convert_llama_gguf(path, tmp_path, Progress(disable=True))
        assert self.largest_change(model, tmp_path) > 1e-2

    def test_tokenizer_and_generation_config(self, model, tmp_path):
        from transformers import AutoTokenizer, GenerationConfig

        gguf_llama.convert_llama_gguf(self.write(model, tmp_path / "m.gguf"), tmp_path, Progress(disable=True))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer.tokenize("a  12<|im_end|>") == ["a", "ĠĠ", "1", "2", "<|im_end|>"]
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
        assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 2
        assert tokenizer.model_max_length == 128

    def test_another_architecture(self, model, tmp_path):
        path = self.write(model, tmp_path / "m.gguf", architecture="qwen2")
        with pytest.raises(SpecdoctorError, match=r"general.architecture is 'qwen2', expected 'llama'"):
            gguf_llama.convert_llama_gguf(path, tmp_path, Progress(disable=True))
