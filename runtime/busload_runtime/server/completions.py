"""`POST /v1/completions`: prompts as text, several texts, token ids, or several lists of token ids."""

from typing import Any

from busload_runtime.server.answer import Endpoint, Json
from busload_runtime.server.errors import invalid
from busload_runtime.server.protocol import CompletionRequest
from busload_runtime.server.sampling import check_length
from busload_runtime.server.tokenise import PromptEncoder


async def _tokenise(body: CompletionRequest, text: PromptEncoder, limit: int) -> list[list[int]]:
    if isinstance(body.prompt, str):
        return [await text.encode(body.prompt, limit, "prompt")]
    if not body.prompt:
        raise invalid("prompt is empty; give at least one token", "prompt")
    if isinstance(body.prompt[0], int):
        return [_token_ids(body.prompt, text, limit, "prompt")]
    prompts = []
    for i, item in enumerate(body.prompt):
        if type(item) is not type(body.prompt[0]) or isinstance(item, int):
            raise invalid("prompt mixes kinds; give a text, texts, token ids, or lists of token ids", "prompt")
        param = f"prompt[{i}]"
        if isinstance(item, str):
            prompts.append(await text.encode(item, limit, param))
        else:
            prompts.append(_token_ids(item, text, limit, param))
    return prompts


def _token_ids(ids: list[Any], text: PromptEncoder, limit: int, param: str) -> list[int]:
    check_length(len(ids), limit, param)  # first, so that a list of millions is not walked through
    return text.check(ids, param)


def _lead(body: CompletionRequest, text: PromptEncoder, prompt: list[int]) -> str:
    if not body.echo:
        return ""
    return body.prompt if isinstance(body.prompt, str) else text.model.tokenizer.decode(prompt)


def _choice(index: int, text: str, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


COMPLETIONS = Endpoint(
    body=CompletionRequest,
    id_prefix="cmpl",
    object="text_completion",
    chunk_object="text_completion",
    tokenise=_tokenise,
    lead=_lead,
    opening=lambda index: None,
    delta=_choice,
    whole=_choice,
)
