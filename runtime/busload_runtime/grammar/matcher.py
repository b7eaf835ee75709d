"""Compiled grammars over a vocabulary: which token may come next."""

import re
from collections.abc import Collection, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from busload_runtime.grammar.errors import GrammarError

LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,  # work before the first token
    step_lexer_fuel=100_000,  # work of one token: some 10 ms with a vocabulary of 262,144
    step_max_items=20_000,
    max_lexer_states=10_000,  # 1 to 2 kB each, for each running request
    max_grammar_size=200_000,
    verbose_errors=False,
)

_MAX_ERROR = 300
# Tokens that are sure to be allowed inside a text are found together: these patterns are two of the library's four for
# JSON. All four take 100 MB for 262,144 tokens, these 65 MB; without any, a token of a text takes 9 ms instead of 1.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+']


class Vocabulary:
    """What grammars need to know of a model's tokens. Takes a second for 262,144 of them, most of it with the GIL."""

    def __init__(self, tokens: Sequence[bytes], eos_ids: Collection[int]) -> None:
        """`tokens`: what each token adds to a text, nothing for control tokens; any of `eos_ids` ends a text."""
        self.size = len(tokens)
        written = _Tokens(tokens, min(eos_ids))
        self._tokenizer = LLTokenizer(written, eos_token=sorted(eos_ids), slices=_SLICES)
        written.forget()

    def compile(self, text: str) -> "Matcher":
        """Raises `GrammarError`. Works without the GIL."""
        return Matcher(LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS), self.size)


class Matcher:
    """A grammar and how far one text has come in it."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._check()

    def fork(self) -> "Matcher":
        """The same grammar at the same place, with a state of its own."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary)

    def mask(self) -> bytes:
        """Which tokens may come next, at least one, as `engine.plan.Plan.masks` has it.

        Raises `GrammarError` when finding out takes more work than `LIMITS` allow.
        """
        mask = self._matcher.compute_bitmask()[: -(-self._vocabulary // 32) * 4]
        self._check()
        if not any(mask):
            raise GrammarError("no token of the model can go on from here")
        return mask

    def advance(self, token: int) -> bool:
        """Takes in a drawn token; whether the text is whole and nothing can follow. Raises `GrammarError`."""
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_one_line(self._matcher.get_error()))


class _Tokens(TokenizerWrapper):
    """A vocabulary as the library takes it."""

    def __init__(self, tokens: Sequence[bytes], eos_id: int) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.eos_token_id = eos_id
        self.special_token_ids = [token for token, text in enumerate(tokens) if not text]
        self.tokens = [text or b"<%d>" % token for token, text in enumerate(tokens)]

    def forget(self) -> None:
        """The library keeps this object for ever, and has made its own of what it says."""
        self.tokens = []
        self.special_token_ids = []

    def __call__(self, s: str) -> list[int]:
        raise NotImplementedError("grammars are written with no_forcing, so that nothing has to be tokenised")


def _one_line(error: str) -> str:
    """What the library says, without places in a text that no client has seen."""
    lines = [line for line in error.splitlines() if not re.match(r"\s*\d+ \||\s*\^|<", line)]
    line = " ".join(" ".join(lines).split())
    while (
        short := re.sub(r"^(at \d+\(\d+\)|failed to compile JSON schema|Parser Error|parser error): ", "", line)
    ) != line:
        line = short
    line = re.sub(r"^Unimplemented keys: \[(.*)\]", r"keywords that are not supported: \1", line)
    if not line or line.startswith("NoExtension"):
        return "nothing matches it"
    return line[:_MAX_ERROR]
