"""How many of 50 injected texts raise the scores of a coach: the rate of the coach that a config names.

    python -m marl_llm injections --config=experiments/configs/chain_maths.py
    python -m marl_llm injections --config=experiments/configs/chain_maths.py --config.coach.kind=small --config.coach.path=runs/coach
    python -m marl_llm injections --config=experiments/configs/math_chat.py --run=runs/math_chat --config.coach.kind=endpoint \\
        --config.coach.url=https://HOST/v1 --config.coach.served_as=NAME --config.coach.key_env=COACH_KEY ...

The actions come from plays of the world's scripted player on validation tasks, or of a run's newest models. Each is scored as it is, and
with each text of `marl_llm/coaching/injections.json` behind its response: 56 calls an action, which an endpoint wants to be paid for. Views
are those of a coach without the truth.
"""

from __future__ import annotations

import asyncio
import pathlib

from absl import flags, logging
from ml_collections import config_flags

from experiments import command
from experiments.command import ConfigError

_CONFIG = config_flags.DEFINE_config_file("config", None, "An experiment config whose world has a guide; its coach is asked.")
_RUN = flags.DEFINE_string("run", None, "Run directory whose newest models play; default: the world's scripted player.")
_TASKS = flags.DEFINE_integer("tasks", 2, "Validation tasks, played once.", lower_bound=1)


def report(config, run: str | None, tasks: int) -> str:
    """The table of rates. Raises `ConfigError` for a config without a coach, or a world without a scripted player where no run is named."""
    from experiments.base import resolve
    from experiments.coach import _played_by_run, scripted
    from experiments.coaching import make_coaching
    from marl_llm.coaching.injections import attacked, attacked_text, read_injections
    from marl_llm.coaching.small import views_of

    with resolve(config) as plan:
        coaching = make_coaching(config, plan)
        if coaching is None:
            raise ConfigError("config.coach.kind is not set: nobody coaches")
        try:
            world, when = plan.played, config.coach.when or plan.played.guide.when
            if run is not None:
                rollout, _ = _played_by_run(pathlib.Path(run), None, "validation", 0, tasks, 1)
            elif world.script is None:
                raise ConfigError(f"{config.game.name} has no scripted player: name a run whose models play, --run=DIR")
            else:
                rollout = scripted(world, world.script, world.tasks("validation", 0, tasks), 1)
            views = views_of(rollout, when)
            found = asyncio.run(attacked(coaching.coach, views, read_injections()))
        finally:
            coaching.close()
    return f"{len(views)} actions, coach {config.coach.kind}\n{attacked_text(found)}"


def main(argv) -> None:
    """Prints the table."""
    logging.set_verbosity(logging.WARNING)
    if _CONFIG.value is None:
        raise ConfigError("--config is missing, e.g. --config=experiments/configs/chain_maths.py")
    print(report(_CONFIG.value, _RUN.value, _TASKS.value))


if __name__ == "__main__":
    command.run(main)
