"""Makes the team of `tests/coaching/coach_lab.py` and the chats of `tests/text/checkpoint_text.py` importable here."""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / name) for name in ("coaching", "workflows", "text")]
