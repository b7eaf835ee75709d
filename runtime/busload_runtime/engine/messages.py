"""Messages between the HTTP process and the engine process; `wire.py` says how they travel.

Each has one end of a socket pair. The engine ends when the HTTP process closes its own or dies.
"""

import msgspec

from busload_runtime.engine.plan import Logprobs

GRAMMAR_ERROR = "invalid_grammar"
"""Error code of a request whose grammar cannot be followed."""


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A request for the queue. The HTTP process has checked it: token ids in range, length within the known limits."""

    request_id: int
    tokens: list[int]
    max_tokens: int
    min_tokens: int = 0
    """Stop ids end the request only from this many tokens on."""
    stop_token_ids: list[int] = []
    """Ids that end the request once drawn: the model's end-of-text ids (left out for `ignore_eos`) and the client's.

    The engine knows no other end of text. The stop id is sent as the last token, with finish reason stop.
    """
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    """Token ids, checked against the vocabulary, and what is added to their logits."""
    logprobs: int | None = None
    """How many of the most likely tokens come with each drawn one and its log-probability; None: nothing of it."""
    score_prompt: bool = False
    """Whether the prompt's tokens get log-probabilities, too, with the first token of the output; needs `logprobs`."""
    tenant: str = ""
    """Whose turn it is in the queue, and whose prefixes it may find cached: nobody else's."""
    weight: float = 1.0
    """Of the tenant, above 0: its share of the tokens beside other tenants that wait."""
    grammar: str = ""
    """What the answer must be (`grammar.text`), checked; ends with `stop` where nothing can follow. Empty: anything."""
    submitted_at: float = 0.0
    """`time.monotonic()` of the HTTP process when it sent this (one clock for all processes of a machine), so that time
    spent in the socket while a step runs counts as waiting. 0: counted from the moment the engine reads it."""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """The client is gone or a stop text was found: end the request; unknown ids are ignored. No reply."""

    request_id: int


class ApplyLimits(msgspec.Struct, tag=True, frozen=True):
    """Apply these limits between two steps. Answered by `LimitsApplied` or `LimitsRefused`."""

    generation: int
    max_sequence_length: int
    batch_size: int
    kv_cache_percent: int
    token_budget: int
    max_queued_requests: int
    max_queued_tokens: int
    time_to_first_token: float | None = None
    """Objectives in seconds and the coefficients a, b, c, d of the step law; None: not known."""
    inter_token_latency: float | None = None
    step_law: tuple[float, float, float, float] | None = None


class TextLoaded(msgspec.Struct, tag=True, frozen=True):
    """Sent once, before all else: the HTTP process has what it needs, its memory can be measured. No reply."""


ToEngine = Submit | Abort | ApplyLimits | TextLoaded


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Sent once, after the model is loaded, the pool exists and one real token was produced."""

    context_length: int
    vocab_size: int
    block_size: int
    bytes_per_block: int
    weight_bytes: int
    memory_budget_bytes: int
    copy_bandwidth: float
    load_seconds: float
    step_law: tuple[float, float, float, float] | None = None
    """Coefficients a, b, c, d as steps tried before the start took; `probed_batch` is the largest of them."""
    probed_batch: int = 0


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """One token of one request, or its end."""

    request_id: int
    token: int | None
    """None: the request ended without a further token (refused by the engine, or failed)."""
    finish_reason: str | None = None
    """stop, length or error; None while it goes on."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache (set on the first token)."""
    queue_seconds: float = 0.0
    """Time from submission to the first step that computed it (set on the first token)."""
    error: str | None = None
    logprobs: Logprobs | None = None
    error_code: str | None = None
    """What kind of error it is, if there is a name for it: invalid_grammar."""
    prompt_logprobs: list[Logprobs] | None = None
    """With the first token where `Submit.score_prompt` asked for it: of the prompt's tokens from the second one on."""


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """What one step produced."""

    tokens: list[TokenOut]


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Counters since start and levels now; sent after steps (at most ten a second), on idle, and at least each second.

    A growing `steps` while work waits is the proof of life.
    """

    clock: float
    steps: int
    busy_seconds: float
    step_batch: int
    step_kv_tokens: int
    step_prefill_tokens: int
    generated_tokens: int
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    bytes_moved: int
    batch_seconds: float
    queue_seconds: float
    kv_token_seconds: float
    running: int
    waiting: int
    queued_prompt_tokens: int
    kv_blocks: int
    kv_blocks_free: int
    step_law: tuple[float, float, float, float] | None = None
    """Coefficients a, b, c, d as the engine finds them; None: not known yet."""


class LimitsApplied(msgspec.Struct, tag=True, frozen=True):
    generation: int


class LimitsRefused(msgspec.Struct, tag=True, frozen=True):
    """The document was well formed but cannot be run (for example a pool that cannot hold one sequence)."""

    generation: int
    reason: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot go on (or could not start); it exits after this message. One clear line."""

    error: str


FromEngine = Ready | Tokens | Stats | LimitsApplied | LimitsRefused | Failed
