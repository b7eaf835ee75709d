"""A model as a Hugging Face folder: config.json and tokenizer.json, told in the words of GGUF metadata.

So one reader checks both formats, and one tokeniser serves both. Weights stay in their safetensors files, which only
the cuda executor reads.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busload_runtime.model.config import ModelConfig, config_from_metadata
from busload_runtime.model.errors import ModelError
from busload_runtime.model.folder_tokenizer import tokenizer_metadata

_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}
_OPTIONAL = ("num_key_value_heads", "head_dim")
_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_MOST_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slows the low frequencies of rotation by `factor` (Llama 3.1, Grattafiori et al. 2024)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: float


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder whose config has been checked."""

    path: str
    metadata: dict[str, Any]
    """As a GGUF file of the model would have it."""
    config: ModelConfig
    scaling: Llama3Scaling | None
    quantisation: Mapping[str, Any] | None
    """`quantization_config`: how the weights are packed; None: they are floats."""


def is_folder(path: str) -> bool:
    return os.path.isdir(path)


def open_folder(path: str) -> ModelFolder:
    """Raises `ModelError` with one line for what is missing, wrong or not computed."""
    file = f"{path}/config.json"
    config = read_json(file)
    kind = config.get("model_type")
    if kind not in _FAMILY:
        raise ModelError(f"{file}: model_type is {kind!r:.80}; supported: {', '.join(_FAMILY)}; choose such a model")
    _refuse_variants(file, config)
    metadata: dict[str, Any] = {"general.architecture": kind, "general.name": Path(path).resolve().name}
    for theirs, ours in _KEYS.items():
        value = config.get(theirs)
        if value is not None:
            metadata[f"{kind}.{ours}"] = float(value) if theirs == "rms_norm_eps" and _is_number(value) else value
        elif theirs not in _OPTIONAL:
            raise ModelError(f"{file}: {theirs} is missing; the file is incomplete, download it again")
    metadata |= {f"{kind}.{key}": value for key, value in _rope(file, config).items()}
    if kind == "mistral" and config.get("sliding_window") is not None:
        metadata["mistral.attention.sliding_window"] = config["sliding_window"]
    metadata |= tokenizer_metadata(path, config, read_json, _vocabulary_size(file, config))
    try:
        model = config_from_metadata(file, metadata, config["vocab_size"], config.get("tie_word_embeddings") is True)
    except ModelError as error:
        raise ModelError(_in_their_words(str(error), kind)) from None
    return ModelFolder(path, metadata, model, _llama3(file, config), config.get("quantization_config"))


def read_json(file: str, optional: bool = False) -> dict[str, Any]:
    """An object from a file; empty for one that may be missing and is. Raises `ModelError`."""
    try:
        if os.path.getsize(file) > _MOST_BYTES:
            raise ModelError(f"{file}: has {os.path.getsize(file)} bytes; at most {_MOST_BYTES} are read")
        with open(file, encoding="utf-8") as text:
            found = json.load(text)
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(
            f"{file}: no such file; a model folder has config.json, tokenizer.json and model.safetensors"
        ) from None
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{file}: cannot be read as JSON: {error}; download it again") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: holds a {type(found).__name__}; it must be an object")
    return found


def _vocabulary_size(file: str, config: Mapping[str, Any]) -> int:
    size = config["vocab_size"]
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 2**24:
        raise ModelError(f"{file}: vocab_size is {size!r:.80}; must be an integer from 1 to {2**24}")
    return size


def _refuse_variants(file: str, config: Mapping[str, Any]) -> None:
    """Raises for what would compute something else without anybody noticing."""
    for key, allowed in (
        ("hidden_act", ("silu",)),
        ("attention_bias", (False,)),
        ("mlp_bias", (False,)),
        ("use_sliding_window", (False,)),
        ("pretraining_tp", (1,)),
    ):
        value = config.get(key)
        if value is not None and value not in allowed:
            raise ModelError(f"{file}: {key} is {value!r:.80}; only {allowed[0]!r} is computed; choose another model")


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of either spelling: `rope_parameters` since transformers 5, before that `rope_theta` and `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10_000.0), **(scaling if isinstance(scaling, dict) else {})}


def _rope_kind(parameters: Mapping[str, Any]) -> object:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _rope(file: str, config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _rope_parameters(config)
    kind = _rope_kind(parameters)
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{file}: rope_type is {kind!r:.80}; supported: default, linear, llama3")
    keys = {"rope.freq_base": _number(file, parameters, "rope_theta")}
    if kind == "linear":
        return keys | {"rope.scaling.type": "linear", "rope.scaling.factor": _number(file, parameters, "factor")}
    return keys


def _llama3(file: str, config: Mapping[str, Any]) -> Llama3Scaling | None:
    parameters = _rope_parameters(config)
    if _rope_kind(parameters) != "llama3":
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = Llama3Scaling(*(_number(file, parameters, name) for name in names))
    if not 0 < scaling.low_freq_factor < scaling.high_freq_factor or scaling.factor < 1:
        raise ModelError(
            f"{file}: rope factors are {scaling}; factor must be at least 1, and low_freq_factor above 0 and below "
            "high_freq_factor"
        )
    return scaling


def _number(file: str, values: Mapping[str, Any], key: str) -> float:
    value = values.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise ModelError(f"{file}: {key} is {value!r:.80}; must be a number above 0")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_their_words(message: str, kind: str) -> str:
    for theirs, ours in _KEYS.items():
        message = message.replace(f"{kind}.{ours} ", f"{theirs} ").replace(f"{ours} (", f"{theirs} (")
    return message
