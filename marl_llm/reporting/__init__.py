"""Reporting: what a run tells about itself while it trains and when it is done.

Any room may write to this one; it imports none of them. Three things live here, all inside a work directory:

- `MetricsWriter`, `read_metrics`: one line of figures per step in `metrics.jsonl`, and the same in TensorBoard;
  `Tracker`: in Weights & Biases or trackio.
- `Progress`: a live line with ETA on a terminal, plain lines in a log.
- `EpisodeWriter`, `read_episodes`, `read_tokens`: whole plays, turn by turn, in `episodes.jsonl` and `episodes_tokens.jsonl`.

Names are imported on first use, so that `import marl_llm.reporting` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_llm.reporting.episodes import EpisodeError, EpisodeWriter, read_episodes, read_tokens, validate_episode, worst_plays
    from marl_llm.reporting.files import LineError, WriteError
    from marl_llm.reporting.metrics import MetricsWriter, read_metrics
    from marl_llm.reporting.progress import Progress
    from marl_llm.reporting.trackers import Tracker

_MODULE_OF = {
    "EpisodeError": "episodes",
    "EpisodeWriter": "episodes",
    "LineError": "files",
    "MetricsWriter": "metrics",
    "Progress": "progress",
    "Tracker": "trackers",
    "WriteError": "files",
    "read_episodes": "episodes",
    "read_metrics": "metrics",
    "read_tokens": "episodes",
    "validate_episode": "episodes",
    "worst_plays": "episodes",
}

__all__ = [
    "EpisodeError",
    "EpisodeWriter",
    "LineError",
    "MetricsWriter",
    "Progress",
    "Tracker",
    "WriteError",
    "read_episodes",
    "read_metrics",
    "read_tokens",
    "validate_episode",
    "worst_plays",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
