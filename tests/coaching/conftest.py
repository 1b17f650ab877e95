"""Makes the generators of `tests/workflows/wordy.py` importable here."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "workflows"))
