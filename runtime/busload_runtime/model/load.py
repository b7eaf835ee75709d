"""Entry points of the engine process: a model's weights, and the bytes of its tokens. The text half is in `text.py`."""

from typing import TYPE_CHECKING

from busload_runtime.model.bundled import resolve_source
from busload_runtime.model.config import ModelConfig, config_from_metadata
from busload_runtime.model.errors import ModelError
from busload_runtime.model.folder import is_folder, open_folder
from busload_runtime.model.gguf_file import GgufFile, open_gguf
from busload_runtime.model.pieces import token_bytes
from busload_runtime.model.tokenizer import end_ids
from busload_runtime.model.vocabulary import Vocabulary

if TYPE_CHECKING:
    from busload_runtime.model.weights import WeightFile


def load_token_bytes(source: str) -> tuple[list[bytes], frozenset[int]]:
    """What each token of `source` adds to a text, by its id, and which tokens end one. Raises `ModelError`."""
    path = resolve_source(source)
    metadata = open_folder(path).metadata if is_folder(path) else open_gguf(path).metadata
    vocabulary = Vocabulary.read(path, metadata)
    return token_bytes(vocabulary), end_ids(vocabulary)


def load_weights(source: str) -> "WeightFile":
    """The weights of `source`, checked and ready to be read. Raises `ModelError` with one line for the user."""
    from busload_runtime.model.weights import open_weight_file  # numpy: only the engine process has use for it

    path = resolve_source(source)
    if is_folder(path):
        raise ModelError(
            f"{path}: is a folder; this executor reads GGUF files: convert the model, or choose --executor cuda"
        )
    file = open_gguf(path)
    return open_weight_file(file, model_config(file))


def model_config(file: GgufFile) -> ModelConfig:
    """The model's shape. Raises `ModelError`."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens is missing; the file has no vocabulary")
    return config_from_metadata(file.path, file.metadata, len(tokens), tied="output.weight" not in file.tensors)
