"""Numbers and texts as people read them."""

import math

# C0 and C1 controls, and the marks that reorder text, would let a model's output disturb the page around it.
_CONTROLS = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"} | dict.fromkeys(range(0x7F, 0xA0), "\ufffd")
_CONTROLS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F], "\ufffd")
_CONTROLS |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # lone surrogates are no UTF-8


def visible(text: object) -> str:
    """`text` with control characters, reordering marks and lone surrogates made visible."""
    return str(text).translate(_CONTROLS)


def percent(share: object, digits: int = 1) -> str:
    """A share in [0, 1] as "87.5 %"; "–" for anything that is no finite number."""
    return "–" if not is_number(share) else f"{100 * float(share):.{digits}f}\u00a0%"


def number(value: object, digits: int = 3) -> str:
    """A number with `digits` significant digits; "–" for anything that is no finite number."""
    if not is_number(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{float(value):.{digits}g}"


def is_number(value: object) -> bool:
    """Is `value` a finite int or float (and no bool)?"""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def duration(seconds: float | int) -> str:
    """Seconds as "2 min 52 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {s} s"


def title(name: str) -> str:
    """The name of a metric as words, e.g. "All passed" of all_passed."""
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]
