"""A joint reward for two writers that a small model begins to earn at once: it pays by degrees for what MAGRPO's levels ask for.

| component | pays | at most |
|---|---|---|
| first, second | share of content words that occur in the post, times share of distinct words; nothing for copies | 0.75 each |
| brevity | the first text's words, if it says anything of the post | 0.25 |
| detail | the second text's words over those of the first, if both do | 0.25 |
"""

from __future__ import annotations

import dataclasses

from marl_llm.games.writing.reward import Band, WritingScore, copies, grounding_of, has_content, plain_text, words_of


@dataclasses.dataclass(frozen=True)
class Graded:
    """The reward's constants."""

    grounding: float = 0.6  # share of content words from the post that earns a text's pay in full
    distinct: float = 0.7  # share of different words that does
    copied: float = 0.5  # of a text that is one run of the post's words, at most
    brevity: Band = Band(3.0, 6.0, 18.0, 36.0)  # words of the first text. detail: words of the second over those of the first
    detail: Band = Band(1.0, 1.5, 4.0, 8.0)
    most = {"first": 0.75, "second": 0.75, "brevity": 0.25, "detail": 0.25}

    def score(self, first: str, second: str, post: str) -> WritingScore:
        """What two texts earn. Any texts may be given; the time is linear in their length."""
        words = [words_of(plain_text(text)) for text in (first, second)]
        post_words = words_of(plain_text(post))
        known = set(post_words)
        shares = [self._share(text_words, post_words, known) for text_words in words]
        pays = {name: self.most[name] * share for name, share in zip(("first", "second"), shares)}
        brevity = self.brevity.share(len(words[0])) if shares[0] else None
        detail = self.detail.share(len(words[1]) / len(words[0])) if all(shares) else None
        pays["brevity"] = self.most["brevity"] * (brevity or 0.0)
        pays["detail"] = self.most["detail"] * (detail or 0.0)
        return WritingScore(4, pays, min(grounding_of(text_words, known) if has_content(text_words) else 0.0 for text_words in words))

    def _share(self, words: list[str], post_words: list[str], known: set[str]) -> float:
        if not has_content(words) or copies(words, post_words, self.copied):
            return 0.0
        return min(grounding_of(words, known) / self.grounding, 1.0) * min(len(set(words)) / len(words) / self.distinct, 1.0)
