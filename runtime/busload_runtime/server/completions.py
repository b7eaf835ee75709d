"""`POST /v1/completions`: prompts as text, several texts, token ids, or several lists of token ids."""

from itertools import accumulate
from typing import Any

import msgspec

from busload_runtime.server.answer import Endpoint, Json
from busload_runtime.server.constrain import grammar_of
from busload_runtime.server.errors import invalid
from busload_runtime.server.logprobs import ScoredToken, text_of_prompt
from busload_runtime.server.protocol import CompletionRequest
from busload_runtime.server.sampling import check_length
from busload_runtime.server.tokenise import Admit, PromptEncoder


async def _tokenise(body: CompletionRequest, text: PromptEncoder, limit: int, admit: Admit) -> list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return await text.encode({"prompt": prompt}, limit, admit)
    if not prompt:
        raise invalid("prompt is empty; give at least one token", "prompt")
    if isinstance(prompt[0], int):
        return [_token_ids(prompt, text, limit, "prompt")]
    texts = {f"prompt[{i}]": item for i, item in enumerate(prompt) if isinstance(item, str)}
    if len(texts) == len(prompt):
        return await text.encode(texts, limit, admit)
    lists = {f"prompt[{i}]": item for i, item in enumerate(prompt) if isinstance(item, list)}
    if len(lists) == len(prompt):
        return [_token_ids(ids, text, limit, param) for param, ids in lists.items()]
    raise invalid("prompt mixes kinds; give a text, texts, token ids, or lists of token ids", "prompt")


def _token_ids(ids: list[Any], text: PromptEncoder, limit: int, param: str) -> list[int]:
    check_length(len(ids), limit, param)  # first, so that a list of millions is not walked through
    return text.check(ids, param)


def _lead(body: CompletionRequest, text: PromptEncoder, prompt: list[int]) -> str:
    if not body.echo:
        return ""
    if body.scores_prompt():
        return text_of_prompt(prompt, text.model.tokenizer)
    return body.prompt if isinstance(body.prompt, str) else text.model.tokenizer.decode(prompt)


def _choice(index: int, text: str, finish_reason: str | None, logprobs: Json | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: list[ScoredToken], offset: int) -> Json:
    offsets = list(accumulate((len(token.text) for token in tokens), initial=offset))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": offsets[:-1],
    }


def _top(token: ScoredToken) -> msgspec.Raw | None:
    """The most likely tokens and the drawn one, which may be none of them. Of two of one text the likelier counts."""
    if token.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for other in (*token.top, token):
        found.setdefault(other.text, other.logprob)
    return msgspec.Raw(msgspec.json.encode(found))


COMPLETIONS = Endpoint(
    body=CompletionRequest,
    id_prefix="cmpl",
    object="text_completion",
    chunk_object="text_completion",
    tokenise=_tokenise,
    constrain=lambda body, text, check: grammar_of(body, check),
    calls=lambda body, text: None,
    lead=_lead,
    opening=lambda index: None,
    delta=_choice,
    whole=_choice,
    logprobs=_logprobs,
)
