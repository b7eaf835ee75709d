"""One request as the scheduler sees it, and what a step says about it."""

from array import array
from dataclasses import dataclass, field

from busload_runtime.engine.account import Account
from busload_runtime.engine.block_pool import Block
from busload_runtime.engine.plan import Logprobs, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress: `computed` tokens have keys and values in `blocks`, `tokens` are wanted there.

    There is no prefill or decode state: the difference of the two is what the next steps have to compute.
    """

    request_id: int
    tokens: list[int]
    """The prompt, then the tokens drawn so far, then `PENDING` for one that a step in flight draws."""
    max_tokens: int
    """Tokens to draw at most."""
    min_tokens: int = 0
    """`stop_token_ids` end the request only from this many drawn tokens on."""
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = GREEDY
    salt: bytes = b""
    """Requests share cached blocks only with requests of the same salt."""
    arrived: float = 0.0
    """Seconds on the caller's clock."""
    tenant: str = ""
    """Whom the tokens are counted for."""
    weight: float = 1.0
    """Of the tenant: with twice the weight it gets twice the tokens of another."""
    score_prompt: bool = False
    """Whether the log-probabilities of the prompt are wanted, as those of the output are. No cached block spares it a
    computation then, since each row is needed."""

    # Kept by the scheduler.
    account: Account = field(init=False)
    """Of the tenant; set when the request is added."""
    prompt_length: int = field(init=False)
    history: "array[int] | None" = field(init=False)
    """`tokens` as the executor reads them; None unless the sampling asks for penalties."""
    max_length: int = field(init=False, default=0)
    """Prompt plus output tokens, under the limits in force when the request was added."""
    order: int = field(init=False, default=0)
    """Position in the order of arrival."""
    start_order: int = field(init=False, default=0)
    """Position in the order in which requests first started."""
    running: bool = field(init=False, default=False)
    computed: int = field(init=False, default=0)
    reached: int = field(init=False, default=0)
    """Highest `computed` ever: what lies below and is computed again is recomputation."""
    blocks: list[Block] = field(init=False, default_factory=list)
    table: tuple[int, ...] = field(init=False, default=())
    """Ids of `blocks`."""
    digests: list[bytes] = field(init=False, default_factory=list)
    """Chained digests of the leading full blocks of `tokens`, as far as they were needed."""
    published: int = field(init=False, default=0)
    """Leading blocks whose digest was offered to the prefix cache."""
    started: float | None = field(init=False, default=None)
    """When the first step took it in."""
    cached_tokens: int = field(init=False, default=0)
    """Prompt tokens the prefix cache held when the request first started."""

    prompt_logprobs: list[Logprobs] = field(init=False, default_factory=list)
    """Of the prompt's tokens from the second one on, as far as they are scored."""

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        shaping = self.sampling.shaping
        self.history = array("i", self.tokens) if shaping is not None and shaping.penalises else None

    @property
    def unscored(self) -> bool:
        """Whether there are tokens of the prompt to score."""
        return self.score_prompt and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def drawn(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True)
class Output:
    """One token of one request, or its end without a token."""

    request_id: int
    token: int | None
    finish_reason: str | None = None
    """stop, length or error; None while it goes on."""
    cached_tokens: int = 0
    """Set on the first token."""
    queue_seconds: float = 0.0
    """Arrival to the first step, set on the first token."""
    error: str | None = None
    logprobs: Logprobs | None = None
    error_code: str | None = None
    """What kind of error it is, if there is a name for it."""
    prompt_logprobs: list[Logprobs] | None = None
    """Set on the first token if they are wanted."""
