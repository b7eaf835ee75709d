"""The architectures that can be served, by the name that files give them."""

from busload_runtime.model.architectures.description import Architecture
from busload_runtime.model.architectures.gemma3 import GEMMA3
from busload_runtime.model.architectures.llama import LLAMA
from busload_runtime.model.architectures.mistral import MISTRAL
from busload_runtime.model.architectures.qwen2 import QWEN2
from busload_runtime.model.architectures.qwen3 import QWEN3

ARCHITECTURES: dict[str, Architecture] = {one.name: one for one in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3)}
