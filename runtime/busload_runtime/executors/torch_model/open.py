"""The checkpoint behind a model source: a GGUF file or a Hugging Face folder."""

from busload_runtime.executors.torch_model.loading import Checkpoint, GgufCheckpoint
from busload_runtime.executors.torch_model.safetensors_checkpoint import FolderCheckpoint
from busload_runtime.model.bundled import resolve_source
from busload_runtime.model.folder import is_folder, open_folder
from busload_runtime.model.load import load_weights


def open_checkpoint(source: str, allow_int4: bool = False) -> Checkpoint:
    """`allow_int4`: whether a folder's weights may be 4-bit ones. Raises `ModelError`."""
    path = resolve_source(source)
    if is_folder(path):
        return FolderCheckpoint(open_folder(path), allow_int4)
    return GgufCheckpoint(load_weights(path))
