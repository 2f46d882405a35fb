"""What an exporter needs of the target: its sizes, its embedding and head, and a GGUF of it where there is one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import TensorSource
from specdoctor.formats.drafts.pair import TargetShape
from specdoctor.formats.gguf_header import GgufHeader
from specdoctor.formats.gguf_tensors import GgufTensors
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.target_shape import read_target_shape
from specdoctor.formats.tensors import TensorFolder

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = ("embed_tokens.weight", "wte.weight", "tok_embeddings.weight", "token_embd.weight")
HEAD = ("lm_head.weight", "output.weight")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "text_config.max_position_embeddings")
SOME_CONTEXT = 4096  # where the target names no length


@dataclass(frozen=True)
class TargetFacts:
    """A target model on disk, read from headers; `embedding` and `head` read values."""

    path: Path  # the folder, or the GGUF file
    shape: TargetShape
    architecture: str  # "LlamaForCausalLM", or of a GGUF "llama"
    context_length: int
    gguf: Path | None  # the file itself, or the only *.gguf beside the folder's config.json
    name: str  # what engines are to load it by: a hub id, or the folder's name

    def embedding(self) -> "Tensor":
        """[V, H], in its stored dtype, dequantised to float32 where it is quantised."""
        return self._one(EMBEDDING) if self._find(EMBEDDING) else self._missing(EMBEDDING)

    def head(self) -> "Tensor":
        """[V, H]; the embedding where the two are tied."""
        return self._one(HEAD) if self._find(HEAD) else self.embedding()

    def _source(self) -> TensorSource:
        return GgufTensors(GgufHeader(self.path)) if self.path.is_file() else TensorFolder(self.path)

    def _find(self, names: tuple[str, ...]) -> str | None:
        """The stored tensor with one of `names`, whatever stands before it; layers' own copies (MTP) do not count."""
        found = [n for n in self._source().names() if any(n == name or n.endswith(f".{name}") for name in names)]
        outside = [name for name in found if not any(part.isdigit() for part in name.split("."))]
        return min(outside, key=len, default=None)

    def _one(self, names: tuple[str, ...]) -> "Tensor":
        name = self._find(names)
        assert name is not None
        return self._source().load([name])[name]

    def _missing(self, names: tuple[str, ...]) -> "Tensor":
        raise SpecdoctorError(f"{self.path}: no tensor {names[0]} in the target; the exported drafter needs it")


def read_target_facts(path: Path, name: str = "") -> TargetFacts:
    """Facts of the target in a Hugging Face folder or a GGUF file, called `name` (default: as the path).

    Raises `SpecdoctorError` when a size is missing.
    """
    shape = read_target_shape(path)
    if path.is_file():
        header = GgufHeader(path)
        length = header.get(f"{header.architecture}.context_length")
        return TargetFacts(path, shape, header.architecture, int(length or SOME_CONTEXT), path, name or path.stem)
    config = JsonConfig.read(path)
    names = config.get("architectures", list, [""])
    length = next((value for key in CONTEXT_KEYS if isinstance(value := config.find(key), int)), SOME_CONTEXT)
    beside = sorted(path.glob("*.gguf"))
    return TargetFacts(
        path, shape, str(names[0]), length, beside[0] if len(beside) == 1 else None, name or path.resolve().name
    )
