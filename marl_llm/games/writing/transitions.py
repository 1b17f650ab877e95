"""Transition phrases in twelve categories, and words that carry no content: data of the writing reward.

The categories are those that MAGRPO names (App. C); the lists are this library's own, shorter than the release's. A phrase stands in one.
"""

from __future__ import annotations

CATEGORIES: dict[str, tuple[str, ...]] = {
    "elaboration": ("additionally", "moreover", "furthermore", "besides", "in addition", "what is more", "not only that", "also"),
    "examples": ("for example", "for instance", "such as", "namely", "to illustrate", "specifically", "in particular", "including"),
    "explanation": ("that is", "in other words", "this means", "to put it another way", "put differently", "to clarify", "meaning"),
    "cause_effect": ("because", "therefore", "thus", "hence", "consequently", "as a result", "for this reason", "accordingly", "so that"),
    "contrast": ("however", "but", "yet", "on the other hand", "in contrast", "whereas", "instead", "on the contrary", "rather"),
    "sequence": ("first", "second", "third", "next", "then", "finally", "to begin with", "subsequently", "lastly"),
    "emphasis": ("indeed", "in fact", "above all", "certainly", "notably", "most importantly", "undoubtedly", "of course"),
    "summary": ("in conclusion", "to summarize", "overall", "in short", "to sum up", "in brief", "all in all", "altogether"),
    "comparison": ("similarly", "likewise", "in the same way", "just as", "equally", "compared to", "by comparison", "correspondingly"),
    "concession": ("although", "even though", "despite", "in spite of", "nevertheless", "nonetheless", "admittedly", "granted that"),
    "condition": ("if", "unless", "provided that", "as long as", "in case", "otherwise", "on condition that", "assuming that"),
    "time": ("meanwhile", "afterwards", "before", "after", "when", "while", "since then", "at the same time", "until", "eventually"),
}
STOP_WORDS = frozenset(
    """a about after all also am an and any are as at be because been before being both but by can could did do does doing down each few for
    from further had has have having he her here hers him his how i if in into is it its just me more most my no nor not now of off on once
    only or other our out over own same she should so some such than that the their them then there these they this those through to too
    under until up very was we were what when where which while who whom why will with would you your""".split()
)
