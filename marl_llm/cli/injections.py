"""How many of 50 injected texts raise the scores of a coach: the rate of the coach that a config names.

    python -m marl_llm injections --config=experiments/configs/chain_maths.py
    python -m marl_llm injections --config=experiments/configs/chain_maths.py --config.coach.kind=small --config.coach.path=runs/coach
    python -m marl_llm injections --config=experiments/configs/math_chat.py --run=runs/math_chat --config.coach.kind=endpoint \\
        --config.coach.url=https://HOST/v1 --config.coach.served_as=NAME --config.coach.key_env=COACH_KEY ...

The actions come from plays of the environment's scripted player on validation tasks, or of a run's newest models. Each is scored, and
with each text of `marl_llm/coaching/injections.json` behind its response: 56 calls an action, which an endpoint wants to be paid for. Views
are those of a coach without the truth.
"""

from __future__ import annotations

from absl import flags, logging
from ml_collections import config_flags

from marl_llm.runs import trust
from marl_llm.runs.command import ConfigError

FLAGS = flags.FlagValues()
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "An experiment config whose environment has a guide; its coach is asked.", flag_values=FLAGS
)
_RUN = flags.DEFINE_string("run", None, "Run directory whose newest models play; default: the scripted player.", flag_values=FLAGS)
_TASKS = flags.DEFINE_integer("tasks", 2, "Validation tasks, played once.", lower_bound=1, flag_values=FLAGS)


def main(argv) -> None:
    """Prints the table."""
    logging.set_verbosity(logging.WARNING)
    if _CONFIG.value is None:
        raise ConfigError("--config is missing, e.g. --config=experiments/configs/chain_maths.py")
    from marl_llm.cli.coach import injection_rates

    print(injection_rates(_CONFIG.value, _RUN.value, _TASKS.value, trust.asked()))
