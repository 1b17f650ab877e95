"""Makes the team of `tests/coaching/coach_lab.py` importable here."""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / name) for name in ("coaching", "workflows")]
