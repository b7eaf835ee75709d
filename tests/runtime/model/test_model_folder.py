"""Hugging Face folders: tokens and prompts as transformers makes them, and what is said about broken ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import TEMPLATE
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from busload_runtime.model.errors import ModelError
from busload_runtime.model.folder import open_folder
from busload_runtime.model.load import load_token_bytes, load_weights
from busload_runtime.model.text import load_text_model

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
TEXTS = ["Hello, world! It's 12345 o'clock.\n\n  Two  spaces", "naïve 東京 🙂 tokens", "", "a<|im_end|>b"]
VOCABULARY = 400


def write_folder(path: Path, cuts: str = "smollm", **config: Any) -> Any:
    """Tokenizer files and config.json of a tiny Llama; returns transformers' tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(CUTS[cuts])
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox says hello world, it's twelve o'clock in the world"] * 3, trainer
    )
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    values = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    LlamaConfig(**{**values, **heads, **config}).save_pretrained(path)
    return fast


@pytest.mark.parametrize("cuts", CUTS)
def test_tokens_are_those_of_transformers(cuts: str, tmp_path: Path) -> None:
    theirs = write_folder(tmp_path, cuts)
    text = load_text_model(str(tmp_path))
    assert open_folder(str(tmp_path)).metadata["tokenizer.ggml.pre"] == cuts
    assert text.config.vocab_size == text.tokenizer.vocab_size == VOCABULARY
    for one in TEXTS:
        ids = theirs.encode(one, add_special_tokens=False)
        assert text.tokenizer.encode(one, special=True) == ids
        assert text.tokenizer.decode(ids) == one.replace("<|im_end|>", "")
    assert text.tokenizer.eos_ids >= {theirs.eos_token_id}
    token_bytes, ends = load_token_bytes(str(tmp_path))
    assert len(token_bytes) == VOCABULARY
    assert ends == text.tokenizer.eos_ids


def test_a_chat_is_written_as_transformers_writes_it(tmp_path: Path) -> None:
    theirs = write_folder(tmp_path)
    messages = [{"role": "user", "content": "Hello <|im_end|>?"}]
    plain = [{"role": "user", "content": "Hello?"}]
    text = load_text_model(str(tmp_path))
    expected = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert text.encode_chat(plain) == expected
    assert text.encode_chat(messages).count(theirs.eos_token_id) == 1  # no message can end its own turn


def test_prompts_begin_with_bos_where_the_post_processor_says_so(tmp_path: Path) -> None:
    theirs = write_folder(tmp_path, "llama-bpe")
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    }
    file.write_text(json.dumps(content))
    text = load_text_model(str(tmp_path))
    assert text.tokenizer.encode("the", special=False)[0] == theirs.bos_token_id


def edited(path: Path, name: str, changes: dict[str, Any]) -> None:
    content = json.loads((path / name).read_text())
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    (path / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"model_type": "mamba"}, "model_type is 'mamba'; supported: llama, mistral, qwen2, qwen3;"),
        ("config.json", {"hidden_size": None}, "hidden_size is missing; the file is incomplete"),
        ("config.json", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is computed"),
        ("config.json", {"attention_bias": True}, "attention_bias is True; only False is computed"),
        ("config.json", {"num_attention_heads": 0}, "num_attention_heads is 0; must be an integer from 1 to 4096"),
        ("config.json", {"num_key_value_heads": 3}, "num_key_value_heads is 3; must be a divisor of"),
        ("config.json", {"vocab_size": "many"}, "vocab_size is 'many'; must be an integer"),
        ("config.json", {"vocab_size": 300}, "must be below vocab_size of config.json (300)"),
        (
            "config.json",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_type is 'yarn'; supported",
        ),
        ("config.json", {"rope_parameters": {"rope_type": "linear"}}, "factor is None; must be a number above 0"),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, "model.type is 'Unigram'; supported: byte-level BPE"),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0}, "byte_fallback": True}}, "SentencePiece"),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}}}, "token id 0 is 'a' and 'b'"),
        ("tokenizer.json", {"added_tokens": [{"id": 3}]}, "added_tokens has an entry without 'content'"),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated"}},
            "cuts by ['x'], which is not known; convert to GGUF",
        ),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Metaspace"}}, "a step that is not read ({'type': 'Metaspace'})"),
    ],
)
def test_what_is_wrong_is_said(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    edited(tmp_path, name, changes)
    with pytest.raises(ModelError, match=f"^{re.escape(str(tmp_path))}.*{re.escape(message)}"):
        open_folder(str(tmp_path))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json: no such file; a model folder has config.json, tokenizer.json"):
        open_folder(str(tmp_path))
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer.json: cannot be read as JSON: .*; download it again"):
        open_folder(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer.json: holds a list; it must be an object"):
        open_folder(str(tmp_path))


def test_other_executors_say_what_to_do_with_a_folder(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(ModelError, match=r"is a folder; this executor reads GGUF files: convert the model, or choose"):
        load_weights(str(tmp_path))
