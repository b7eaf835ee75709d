"""Writes a GGUF file's model, dequantised, as the Hugging Face folder that vLLM reads. Runs in the peer's environment.

python vllm_cpu_convert.py MODEL.gguf FOLDER {bfloat16,float32}
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, folder, dtype = Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])
plain_values = GgufConfig(dequantize=True)
read = AutoModelForCausalLM.from_pretrained(
    source.parent, gguf_file=source.name, dtype=dtype, quantization_config=plain_values
)
# What was read from GGUF refuses to be saved, dequantised or not: the values go into a plain model.
config = read.config
if hasattr(config, "quantization_config"):
    del config.quantization_config
plain = type(read)(config).to(dtype)
plain.load_state_dict(read.state_dict())
plain.save_pretrained(folder)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
