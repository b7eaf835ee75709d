"""Llama 2 and 3 (Touvron et al. 2023) and everything converted to their layout."""

from busload_runtime.model.architectures.description import Architecture, sliding_attention

LLAMA = Architecture(
    name="llama",
    models="Llama 2 and 3, Mistral, SmolLM and others with that layout",
    attention=sliding_attention,  # llama.cpp's name for Mistral too, whose first version has a window
    rotates_pairs=True,
    rope_factors=True,
)
