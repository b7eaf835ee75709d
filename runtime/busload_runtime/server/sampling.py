"""From a request body to what the engine is asked: lengths, seeds and stop tokens."""

import secrets
import time

from busload_runtime.contract import Limits
from busload_runtime.engine.messages import Ready, Submit
from busload_runtime.server.engine_client import EngineClient
from busload_runtime.server.errors import invalid, too_long
from busload_runtime.server.protocol import Sampled
from busload_runtime.server.tenants import Tenant

_SEED_MASK = 2**63 - 1
_LEAST_TEMPERATURE = 1e-5
"""Below it a draw is the likeliest token but for exact ties, and a division by it leaves the range of floats."""
_MAX_LOGPROBS = 2**18
"""Of all choices of a request; as JSON each takes about 100 bytes."""


def submits_of(
    body: Sampled,
    prompts: list[list[int]],
    limits: Limits,
    ready: Ready,
    eos_ids: frozenset[int],
    engine: EngineClient,
    tenant: Tenant,
    grammar: str = "",
) -> list[Submit]:
    """One message per choice: `n` per prompt, with seeds `seed`, `seed + 1`, ... (a random one when none was given).

    A `max_tokens` that does not fit behind the prompt is cut to what fits, and the answer ends with `length`: the
    sequence limit is tuned while the service runs, and a change of it should not turn good requests into errors.
    Raises `ApiError` 400 for a prompt that leaves no room, or token ids the model does not have.
    """
    for param, ids in (("stop_token_ids", body.stop_token_ids), ("logit_bias", body.logit_bias)):
        for token in ids or ():
            if token >= ready.vocab_size:
                raise invalid(f"token id {token} is outside 0 to {ready.vocab_size - 1}", param)
    _check_logprobs(body, prompts, limits)
    temperature = 1.0 if body.temperature is None else body.temperature
    stop_token_ids = set(body.stop_token_ids or ()) | (set() if body.ignore_eos else eos_ids)
    submits = []
    now = time.monotonic()
    for prompt in prompts:
        check_length(len(prompt), limits.max_sequence_length)
        room = limits.max_sequence_length - len(prompt)
        max_tokens = min(body.token_limit() or room, room)
        if (body.min_tokens or 0) > max_tokens:
            raise invalid(
                f"min_tokens {body.min_tokens} is above the {max_tokens} tokens that max_tokens and the sequence limit "
                f"of {limits.max_sequence_length} leave behind a prompt of {len(prompt)}",
                "min_tokens",
            )
        submits += [
            Submit(
                request_id=engine.next_id(),
                tokens=prompt,
                max_tokens=max_tokens,
                min_tokens=body.min_tokens or 0,
                stop_token_ids=sorted(stop_token_ids),
                temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=max(0, body.top_k or 0),
                min_p=body.min_p or 0.0,
                frequency_penalty=body.frequency_penalty or 0.0,
                presence_penalty=body.presence_penalty or 0.0,
                repetition_penalty=body.repetition_penalty or 1.0,
                logit_bias=body.logit_bias or {},
                logprobs=body.num_logprobs(),
                score_prompt=body.scores_prompt(),
                grammar=grammar,
                seed=secrets.randbits(63) if body.seed is None else (body.seed + choice) & _SEED_MASK,
                tenant=tenant.name,
                weight=tenant.weight,
                submitted_at=now,
            )
            for choice in range(body.n or 1)
        ]
    return submits


def _check_logprobs(body: Sampled, prompts: list[list[int]], limits: Limits) -> None:
    """Raises `ApiError` 400 for several choices whose log-probabilities together would fill the memory.

    One choice is never refused: it has the sequence limit's size at most.
    """
    top, choices = body.num_logprobs(), len(prompts) * (body.n or 1)
    if top is None or choices == 1:
        return
    tokens = choices * min(body.token_limit() or limits.max_sequence_length, limits.max_sequence_length)
    scored = (body.n or 1) * sum(map(len, prompts)) if body.scores_prompt() else 0
    if (tokens + scored) * (top + 1) > _MAX_LOGPROBS:
        most = max(1, (_MAX_LOGPROBS // (top + 1) - scored) // choices)
        raise invalid(
            f"{choices} choices of up to {(tokens + scored) // choices} tokens with {top + 1} log-probabilities each "
            f"are more than the {_MAX_LOGPROBS} that one request may ask for; set max_tokens to {most} or less, or ask "
            "for fewer choices or log-probabilities",
            "logprobs",
        )


def check_length(prompt_tokens: int, limit: int, param: str = "prompt", exact: bool = True) -> None:
    """Raises `ApiError` 400 when a prompt leaves no room for one token of output."""
    if prompt_tokens >= limit:
        raise too_long(
            f"the prompt has {'' if exact else 'at least '}{prompt_tokens} tokens; prompt and output together may have "
            f"{limit}, so a prompt may have at most {limit - 1}",
            param,
        )
