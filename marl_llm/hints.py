"""Ground floor: words that are not known, and suggestions for error messages about them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from marl_llm.old_names import new_name


def closest(word: object, known: Iterable[object]) -> str | None:
    """The known word that is most like this one, whatever the case of its letters; None if no word is like it."""
    names = list(dict.fromkeys(map(str, known)))
    by_lower = {name.lower(): name for name in reversed(names)}  # of two that differ in case only, the first
    matches = difflib.get_close_matches(str(word).lower(), by_lower, 1)
    return by_lower[matches[0]] if matches else None


def meant(word: object, known: Iterable[object]) -> str:
    """`; did you mean 'x'?`, or nothing where no known word is like it."""
    names = tuple(known)
    if now := new_name(word, names):
        return f"; it is called {now!r} now"
    near = closest(word, names)
    return f"; did you mean {near!r}?" if near else ""


def check_word(what: str, value: object, known: Iterable[object], error: type[ValueError] = ValueError) -> None:
    """Raises `error` if the value is none of the known ones: `game.view='ful' is not one of full, split; did you mean 'full'?`."""
    words = tuple(known)
    if value not in words:
        raise error(f"{what}={value!r} is not one of {', '.join(map(str, words))}{meant(value, words)}")


def suggestion(word: object, known: Iterable[object]) -> str:
    """`did you mean 'x'?`, or `there are x, y, z` where no known word is like it."""
    names = list(dict.fromkeys(map(str, known)))
    if now := new_name(word, names):
        return f"it is called {now!r} now"
    near = closest(word, names)
    return f"did you mean {near!r}?" if near else f"there are {', '.join(names) or 'none'}"
