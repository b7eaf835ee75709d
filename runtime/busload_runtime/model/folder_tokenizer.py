"""tokenizer.json and its companions, told in the words of GGUF metadata (`tokenizer.ggml.*`).

Byte-level BPE is read (Llama 3, Qwen, SmolLM, GPT-2): its cutting rules are recognised by what they are, since the file
gives patterns where GGUF gives a name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from busload_runtime.model.errors import ModelError
from busload_runtime.model.vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED

ReadJson = Callable[..., dict[str, Any]]


def tokenizer_metadata(path: str, config: Mapping[str, Any], read: ReadJson, vocab_size: int) -> dict[str, Any]:
    """Raises `ModelError` for a tokenizer that is missing, broken or of another kind."""
    file = f"{path}/tokenizer.json"
    tokenizer = read(file)
    options = read(f"{path}/tokenizer_config.json", optional=True)
    tokens, types = _tokens(file, tokenizer, vocab_size)
    ids = {token: index for index, token in enumerate(tokens)}
    ends = read(f"{path}/generation_config.json", optional=True).get("eos_token_id", config.get("eos_token_id"))
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    if (named := ids.get(_text(options.get("eos_token")))) is not None and named not in ends:
        ends.insert(0, named)
    for end in ends:
        if not 0 <= end < len(types):
            raise ModelError(f"{file}: eos_token_id is {end}; must be below {len(types)}")
        types[end] = CONTROL
    bos = ids.get(_text(options.get("bos_token")), config.get("bos_token_id"))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre(file, tokenizer),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": _merges(file, tokenizer),
        "tokenizer.ggml.bos_token_id": bos if isinstance(bos, int) else None,
        "tokenizer.ggml.eos_token_id": ends[0] if ends else None,
        "tokenizer.ggml.eot_token_id": ends[1] if len(ends) > 1 else None,
        "tokenizer.ggml.add_bos_token": _adds_bos(tokenizer, options),
        "tokenizer.chat_template": _template(path, options),
    }
    return {key: value for key, value in metadata.items() if value is not None}


def _tokens(file: str, tokenizer: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types by id; ids that the embedding has and the tokenizer has not are unused."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        kind = model.get("type") if isinstance(model, dict) else None
        raise ModelError(f"{file}: model.type is {kind!r:.80}; supported: byte-level BPE; convert the model to GGUF")
    if model.get("byte_fallback"):
        raise ModelError(
            f"{file}: is a SentencePiece vocabulary (byte_fallback), which is read from GGUF files alone; convert the "
            "model to GGUF"
        )
    added = tokenizer.get("added_tokens") or []
    texts: dict[int, str] = {}
    types = [UNUSED] * vocab_size
    entries = [(index, text, NORMAL) for text, index in vocabulary.items()]
    try:
        entries += [(one["id"], one["content"], CONTROL if one["special"] else USER_DEFINED) for one in added]
    except (TypeError, KeyError) as error:
        raise ModelError(f"{file}: added_tokens has an entry without {error}; the file is corrupt") from None
    for index, text, kind in entries:
        if not isinstance(index, int) or not isinstance(text, str) or not 0 <= index < vocab_size:
            raise ModelError(
                f"{file}: token {text!r:.80} has id {index!r:.80}; must be below vocab_size of config.json "
                f"({vocab_size})"
            )
        if texts.setdefault(index, text) != text:
            raise ModelError(f"{file}: token id {index} is {texts[index]!r:.80} and {text!r:.80}; the file is corrupt")
        types[index] = kind
    return [texts.get(index, f"<|unused {index}|>") for index in range(vocab_size)], types


def _merges(file: str, tokenizer: Mapping[str, Any]) -> list[str]:
    """Each as `left right`; newer files have pairs."""
    merges = tokenizer["model"].get("merges")
    if not isinstance(merges, list):
        raise ModelError(f"{file}: model.merges must be a list; the file is corrupt")
    return [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in merges]


def _pre(file: str, tokenizer: Mapping[str, Any]) -> str:
    """The name that `byte_level` has for these cutting rules."""
    from busload_runtime.model.byte_level import name_of_patterns

    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps]) if isinstance(steps, dict) else []
    patterns, whole_word_rule = [], False
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False}:
                whole_word_rule = step.get("use_regex", True)
            case _:
                raise ModelError(f"{file}: pre_tokenizer has a step that is not read ({step!r:.120}); convert to GGUF")
    name = name_of_patterns(tuple(patterns), whole_word_rule)
    if name is None:
        raise ModelError(f"{file}: pre_tokenizer cuts by {patterns!r:.200}, which is not known; convert to GGUF")
    return name


def _adds_bos(tokenizer: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether prompts begin with BOS: said outright, or done by the post-processor."""
    if isinstance(options.get("add_bos_token"), bool):
        return bool(options["add_bos_token"])
    bos = _text(options.get("bos_token"))
    steps = tokenizer.get("post_processor") or {}
    steps = steps.get("processors", [steps]) if isinstance(steps, dict) else []
    firsts = [step["single"][0] for step in steps if step.get("type") == "TemplateProcessing" and step.get("single")]
    return any(first.get("SpecialToken", {}).get("id") == bos for first in firsts)


def _template(path: str, options: Mapping[str, Any]) -> str | None:
    try:
        with open(f"{path}/chat_template.jinja", encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}/chat_template.jinja: cannot be read: {error}") from None
    template = options.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _text(token: object) -> str:
    """A token of tokenizer_config.json: its text, or an object with it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
