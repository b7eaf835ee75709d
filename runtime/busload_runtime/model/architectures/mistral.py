"""Mistral 7B (Jiang et al. 2023): Llama with a sliding window. llama.cpp writes it as `llama`, others by its name."""

from dataclasses import replace

from busload_runtime.model.architectures.llama import LLAMA

MISTRAL = replace(LLAMA, name="mistral", models="Mistral 7B", rope_factors=False)
