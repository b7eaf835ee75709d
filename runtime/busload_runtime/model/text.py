"""Entry point of the HTTP process: the text half of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from busload_runtime.model.bundled import resolve_source
from busload_runtime.model.chat import ChatTemplate, Message, map_texts, unused_mark
from busload_runtime.model.config import ModelConfig
from busload_runtime.model.errors import ModelError
from busload_runtime.model.folder import is_folder, open_folder
from busload_runtime.model.gguf_file import open_gguf
from busload_runtime.model.load import model_config
from busload_runtime.model.tokenizer import TextTokenizer, tokenizer_from_metadata


@dataclass(frozen=True, slots=True)
class TextModel:
    """What is needed to turn requests into token ids and token ids into text. Safe to share between threads."""

    config: ModelConfig
    tokenizer: TextTokenizer
    chat: ChatTemplate

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a chat prompt. Control tokens come from the template alone.

        `<|im_end|>` inside a message is the text of these ten characters, so no message can end its own turn.
        Raises `ChatError` as `chat.render` does.
        """
        mark = unused_mark([messages, tools])
        messages, tools = map_texts([messages, tools], lambda text: self.tokenizer.hide_control(text, mark))
        return self.tokenizer.encode(self.chat.render(messages, add_generation_prompt, tools), special=True, mark=mark)


def load_text_model(source: str) -> TextModel:
    """Config, tokenizer and chat template of `source` (the path of a GGUF file or a Hugging Face folder, or
    `bundled:NAME`), without reading weights.

    Raises `ModelError`; its message is one line for the user.
    """
    path = resolve_source(source)
    if is_folder(path):
        folder = open_folder(path)
        config, metadata = folder.config, folder.metadata
    else:
        file = open_gguf(path)
        config, metadata = model_config(file), file.metadata
    return TextModel(config, tokenizer_from_metadata(path, metadata), _chat(path, metadata))


def _chat(file: str, metadata: Mapping[str, Any]) -> ChatTemplate:
    source = metadata.get("tokenizer.chat_template")
    if source is not None and not isinstance(source, str):
        raise ModelError(f"{file}: tokenizer.chat_template must be a text, got {type(source).__name__}")
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {}
    for name in ("bos_token", "eos_token"):
        index = metadata.get(f"tokenizer.ggml.{name}_id")
        names[name] = "" if index is None else tokens[index]
    return ChatTemplate(file, source, names)
