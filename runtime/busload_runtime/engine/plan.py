"""The seam between scheduler and executor: what one engine step computes."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Shaping:
    """What changes logits before the draw, in this order: bias, repetition penalty, the other two."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logit of a token in prompt or output (Keskar et al. 2019)."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time the request has drawn it (OpenAI API reference)."""
    presence_penalty: float = 0.0
    """Taken off the logit of a token that the request has drawn at all (OpenAI API reference)."""

    @property
    def penalises(self) -> bool:
        """Whether it depends on the tokens so far: then chunks carry `history`."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn, in this order: shaping, temperature, min_p, top_k, top_p."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int = 0
    """With the sample index it fixes the random draw, whatever else is in the batch."""
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one are left out (Nguyen et al. 2024)."""
    shaping: Shaping | None = None
    """None: the logits as they are, at no cost."""
    logprobs: int | None = None
    """How many of the most likely tokens are reported with the drawn one; None: nothing is, at no cost."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tokens of the prompt whose log-probabilities a chunk gives, beside its draw or instead of one."""

    first: int
    """Row `first + i` of the chunk (its first token is row 0) predicts `targets[i]`."""
    targets: tuple[int, ...]
    num_top: int
    """How many of the most likely tokens are reported with each."""


PENDING = -2
"""Instead of a token in a chunk: the one that the step in flight draws for the request. Only the device knows it."""


@dataclass(slots=True)
class Chunk:
    """The part of one request that a step computes: one token (decode) or a piece of its prompt (prefill).

    Nobody changes one. It is not declared frozen because making such an object takes three times as long, and one is
    made for every token.
    """

    request_id: int
    tokens: tuple[int, ...]
    """Token ids at positions start .. start + len(tokens) - 1; their keys and values are written in this step. A lone
    `PENDING` where the step is planned before the one that draws the token was committed."""
    start: int
    blocks: tuple[int, ...]
    """Block table: ids of the KV blocks of positions 0 .. start + len(tokens) - 1, in order."""
    sampling: SamplingParams | None
    """How to draw the token after the last one; None for a prompt piece that is not the last (no logits needed)."""
    sample_index: int = 0
    """Tokens this request has drawn before."""
    history: "array[int] | None" = None
    """All tokens of the request so far (int32): the prompt, then the `sample_index` drawn ones. None unless the chunk
    draws with a shaping that penalises. Borrowed until the step is committed: then it grows."""
    scoring: Scoring | None = None
    """None unless the request asks for log-probabilities of its prompt."""

    @property
    def length_after(self) -> int:
        """Tokens of the request in the KV cache once the step is done."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine step. No two chunks belong to one request; no two chunks write one block."""

    chunks: tuple[Chunk, ...]
    masks: Mapping[int, bytes] = field(default_factory=dict)
    """Request id -> the tokens that it may draw in this step, of which there is one at least: token t if bit t % 8 of
    byte t // 8 is set. [mask_bytes(vocab_size)]. The mask comes after shaping. Requests not in it may draw any."""

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


def mask_bytes(vocab_size: int) -> int:
    """Length of a mask of `Plan.masks`."""
    return -(-vocab_size // 32) * 4


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities: log-softmax of the model's logits before shaping and temperature, which is
    what vLLM reports unless told otherwise. A named tuple, which travels between the processes as it is."""

    drawn: float
    """Of the drawn token."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, most likely first, of equals the lower id first."""


NO_TOKEN = -1
"""Instead of a drawn token, of a chunk that draws none."""


@dataclass(slots=True)
class Sampled:
    """One drawn token. Not declared frozen for the reason `Chunk` is not."""

    request_id: int
    token: int
    """`NO_TOKEN` of a chunk that only scores."""
    logprobs: Logprobs | None = None
    """There when `SamplingParams.logprobs` asked for it."""
    prompt: tuple[Logprobs, ...] = ()
    """Of `Chunk.scoring`: one for each target."""
