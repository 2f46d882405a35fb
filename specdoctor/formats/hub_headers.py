"""Config and tensor headers of a model on the Hugging Face hub, without its weights.

Contract: config.json and the first bytes of each safetensors file are all that is fetched; code and pickles never are.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from specdoctor.errors import EnvironmentMissingError, SpecdoctorError
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.sources import hub_errors
from specdoctor.formats.tensors import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


class HubTensors:
    """The tensors of a hub repository: names, shapes and dtypes; their values are not here."""

    def __init__(self, repo_id: str) -> None:
        """Raises `EnvironmentMissingError` when the hub cannot be asked or has no safetensors there."""
        import huggingface_hub
        from huggingface_hub import errors

        self.repo_id = repo_id
        self._at: dict[str, tuple[str, tuple[int, ...], str]] = {}
        try:
            with hub_errors(repo_id):
                found = huggingface_hub.get_safetensors_metadata(repo_id)
        except errors.NotASafetensorsRepoError:
            raise EnvironmentMissingError(
                f"{repo_id}: has no model.safetensors on the hub, and pickled files are not read from there; "
                f"run `specdoctor fetch {repo_id}` and inspect the folder that it names"
            ) from None
        for file, metadata in found.files_metadata.items():
            for name, tensor in metadata.tensors.items():
                self._at[name] = (file, tuple(tensor.shape), torch_dtype(tensor.dtype))

    def names(self) -> list[str]:
        return list(self._at)

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def shape(self, name: str) -> tuple[int, ...]:
        return self._at[name][1]

    def dtype(self, name: str) -> str:
        """As torch writes it: "bfloat16"."""
        return self._at[name][2]

    def file_of(self, name: str) -> Path:
        return Path(self.repo_id) / self._at[name][0]

    def load(self, names: list[str]) -> "dict[str, Tensor]":
        """Refuses: only headers were fetched."""
        raise SpecdoctorError(f"{self.repo_id}: only headers were fetched; run `specdoctor fetch {self.repo_id}` first")


def hub_config(repo_id: str) -> JsonConfig:
    """config.json of a hub repository. Raises `EnvironmentMissingError` when the hub cannot be asked."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        with hub_errors(repo_id):
            path = huggingface_hub.hf_hub_download(repo_id, "config.json")
    except errors.EntryNotFoundError:
        raise SpecdoctorError(f"{repo_id}: has no config.json on the hub; expected a model's own repository") from None
    found = JsonConfig.read(Path(path).parent)
    return JsonConfig(Path(repo_id) / "config.json", found.values)
