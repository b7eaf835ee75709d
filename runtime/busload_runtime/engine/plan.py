"""The seam between scheduler and executor: what one engine step computes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int = 0
    """With the sample index it fixes the random draw, whatever else is in the batch."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one request that a step computes: one token (decode) or a piece of its prompt (prefill)."""

    request_id: int
    tokens: tuple[int, ...]
    """Token ids at positions start .. start + len(tokens) - 1; their keys and values are written in this step."""
    start: int
    blocks: tuple[int, ...]
    """Block table: ids of the KV blocks of positions 0 .. start + len(tokens) - 1, in order."""
    sampling: SamplingParams | None
    """How to draw the token after the last one; None for a prompt piece that is not the last (no logits needed)."""
    sample_index: int = 0
    """Tokens this request has drawn before."""

    @property
    def length_after(self) -> int:
        """Tokens of the request in the KV cache once the step is done."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine step. No two chunks belong to one request; no two chunks write one block."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token."""

    request_id: int
    token: int
