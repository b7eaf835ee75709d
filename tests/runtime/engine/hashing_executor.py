"""An executor whose tokens are hashes of the KV cache as it was really written, so that wrong blocks change the text.

The "keys and values" of a position are a hash of its token and of what lies in the position before it; a drawn token is
a hash of everything the block table leads to. A stale block, a wrong table, a block shared with other content or read
before it was written gives another token or a `KeyError`.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from busload_runtime.engine.plan import NO_TOKEN, Chunk, Logprobs, Plan, Sampled, SamplingParams, Scoring
from busload_runtime.executors.contract import DeviceMemory

VOCABULARY = 50_000


def _mix(*values: int) -> int:
    return hash(values) & 0xFFFF_FFFF


def logprobs_of(token: int, num_top: int | None) -> Logprobs | None:
    """Made up, but of the token: those of another one are not the same."""
    if num_top is None:
        return None
    return Logprobs(-token / 7, tuple((token + place, -token / 7 - place) for place in range(num_top)))


def score_of(content: int, target: int) -> Logprobs:
    """Made up, but of all tokens up to the one before the target, and of that."""
    return Logprobs(-_mix(content, target), ())


def expected_scores(prompt: Sequence[int]) -> list[Logprobs]:
    content, scores = 0, []
    for position, (token, target) in enumerate(pairwise(prompt)):
        content = _mix(token, position, content)
        scores.append(score_of(content, target))
    return scores


class HashingExecutor:
    vocab_size = VOCABULARY
    weight_bytes = 1 << 20
    copy_bandwidth = 1e9
    device_memory: DeviceMemory | None = None

    def __init__(self, block_size: int, num_blocks: int = 0, context_length: int = 1 << 20) -> None:
        self.block_size = block_size
        self.bytes_per_block = 1024 * block_size
        self.context_length = context_length
        self.num_blocks = num_blocks
        self.steps = 0
        self._written: dict[tuple[int, int], int] = {}
        self._tokens: dict[tuple[int, int], int] = {}

    def activation_bytes(self, token_budget: int, batch_size: int) -> int:
        return 1024 * token_budget + 4096 * batch_size

    def reserve(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks

    def resize(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._written = {place: value for place, value in self._written.items() if place[0] < num_blocks}

    def run(self, plan: Plan) -> Sequence[Sampled]:
        self.steps += 1
        self._check(plan)
        sampled = []
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                before = self._written[self._place(chunk, position - 1)] if position else 0
                self._written[self._place(chunk, position)] = _mix(token, position, before)
                self._tokens[self._place(chunk, position)] = token
        for chunk in plan.chunks:
            if chunk.sampling is not None:
                self._check_history(chunk, chunk.sampling)
                content = [self._written[self._place(chunk, position)] for position in range(chunk.length_after)]
                token = draw(content, chunk.sampling.seed, chunk.sample_index)
                sampled.append(Sampled(chunk.request_id, token, logprobs_of(token, chunk.sampling.logprobs)))
            if chunk.scoring is not None:
                if chunk.sampling is None:
                    sampled.append(Sampled(chunk.request_id, NO_TOKEN))
                sampled[-1].prompt = tuple(self._scored(chunk, chunk.scoring))
        return sampled

    def _scored(self, chunk: Chunk, scoring: Scoring) -> Iterator[Logprobs]:
        for row, target in enumerate(scoring.targets, scoring.first):
            assert row < len(chunk.tokens) - (chunk.sampling is not None)
            yield score_of(self._written[self._place(chunk, chunk.start + row)], target)

    def _check(self, plan: Plan) -> None:
        """The promises of a plan."""
        written: set[int] = set()
        assert len({chunk.request_id for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            assert chunk.tokens
            assert len(chunk.blocks) == -(-chunk.length_after // self.block_size)
            assert all(0 <= block < self.num_blocks for block in chunk.blocks)
            own = set(chunk.blocks[chunk.start // self.block_size :])
            assert not own & written, "two chunks write one block"
            written |= own

    def _check_history(self, chunk: Chunk, sampling: SamplingParams) -> None:
        if sampling.shaping is None or not sampling.shaping.penalises:
            assert chunk.history is None, "a history that nobody asked for"
        else:
            assert chunk.history is not None
            written = [self._tokens[self._place(chunk, position)] for position in range(chunk.length_after)]
            assert chunk.history.tolist() == written

    def _place(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.blocks[position // self.block_size], position % self.block_size


def draw(content: Sequence[int], seed: int, sample_index: int) -> int:
    return _mix(*content, seed, sample_index) % VOCABULARY


def expected_text(prompt: Sequence[int], count: int, seed: int) -> list[int]:
    """What a request of this prompt draws when it is alone in the world: computed without blocks."""
    tokens, content = list(prompt), []
    for index in range(count):
        for position in range(len(content), len(tokens)):
            content.append(_mix(tokens[position], position, content[-1] if content else 0))
        tokens.append(draw(content, seed, index))
    return tokens[len(prompt) :]
