"""Prompts nobody has seen before, so that no cache helps; or with a shared beginning, so that one does."""

import random
from dataclasses import dataclass

# Words that are one token, with the space before them, in the usual vocabularies.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information
"""
_WORDS = tuple(_TEXT.split())
_HASH_BLOCK = 512  # tokens that one id of a trace's `hash_ids` stands for

Prompt = list[int] | str


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts of a wanted length in tokens: lists of token ids, or texts of that many words.

    With `prefix_tokens`, each prompt begins with one of `prefixes` beginnings of that length, drawn at random; the
    wanted length comes behind it.
    """

    seed: int
    words: bool
    first_id: int = 1000
    last_id: int = 30000
    prefix_tokens: int = 0
    prefixes: int = 1

    def make(self, rng: random.Random, tokens: int, hash_ids: tuple[int, ...] = ()) -> tuple[Prompt, int]:
        """A prompt of `tokens` tokens behind its prefix, and its whole length.

        `hash_ids` name the leading blocks of 512 tokens: equal ids make equal tokens.
        """
        length = self.prefix_tokens + tokens
        if self.prefix_tokens:
            ids = self._named(f"prefix {rng.randrange(self.prefixes)}", self.prefix_tokens)
        else:
            ids = [token for name in hash_ids for token in self._named(f"block {name}", _HASH_BLOCK)][:tokens]
        ids += self._draw(rng, length - len(ids))
        if not self.words:
            return ids, length
        return " ".join(_WORDS[token % len(_WORDS)] for token in ids), length

    def _named(self, name: str, tokens: int) -> list[int]:
        return self._draw(random.Random(f"{self.seed} {name}"), tokens)

    def _draw(self, rng: random.Random, tokens: int) -> list[int]:
        return rng.choices(range(self.first_id, self.last_id), k=tokens)
