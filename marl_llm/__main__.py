"""`marl COMMAND ...`, or `python -m marl_llm COMMAND ...`: train, look at runs, and check what is to be trained.

A command's module is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

COMMANDS = {
    "check": ("marl_llm.cli.check", "check a game or a config against the laws, without a model"),
    "profile": ("marl_llm.cli.profiling", "play tasks before training: which of them give a gradient"),
    "rescore": ("marl_llm.cli.rescore", "compute the rewards of a run's stored plays again"),
    "view": ("marl_llm.viewing.command", "look at the plays of a run in a browser, a file or a terminal"),
    "play": ("marl_llm.cli.play", "play a role of a game yourself, in the browser or the terminal"),
    "train": ("marl_llm.cli.train", "train a config"),
    "attach": ("marl_llm.cli.attach", "train the models of your own program"),
    "evaluate": ("marl_llm.cli.evaluate", "evaluate a checkpoint of a run"),
    "league": ("marl_llm.cli.league", "play checkpoints against or with each other: cross-play and Elo"),
    "compare": ("marl_llm.cli.compare", "train a config with a few keys changed"),
    "sweep": ("marl_llm.cli.sweep", "train a config with other seeds and learning rates, all teams in one program"),
    "collect": ("marl_llm.cli.collect", "one table of many runs"),
    "runs": ("marl_llm.cli.runs", "list the runs below a folder: state, steps, result"),
    "plan": ("marl_llm.cli.plan", "memory and time of a config on an accelerator"),
    "serve": ("marl_llm.cli.serve", "a role of a run, or a checkpoint, as chat completions on this machine"),
    "coach": ("marl_llm.cli.coach", "train a small coach to say what an environment's rubric says, and measure it"),
    "injections": ("marl_llm.cli.injections", "how many injected texts raise the scores of a config's coach"),
    "chat": ("marl_llm.cli.chat", "talk with a role of a run, or a checkpoint, in the terminal"),
    "tiny": ("marl_llm.cli.make_tiny_checkpoint", "write a small checkpoint with random weights, to try what is meant for real ones"),
    "model": ("marl_llm.cli.fetch_model", "fetch a small real model, or convert a GGUF file, into a checkpoint directory"),
    "export": ("marl_llm.cli.export", "write a checkpoint in Hugging Face's form"),
}
# commands whose options absl reads
_FLAGS = ("train", "evaluate", "league", "compare", "sweep", "collect", "plan", "serve", "injections", "chat", "tiny", "model", "export")

_POSITIONAL = ("collect", "model")  # of these, those that take arguments without --
_CONFIG = ("train", "compare", "sweep", "plan", "injections")  # of these, those whose config may stand in front


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: marl COMMAND ...", "", *lines, "", "marl COMMAND --help has its options."])


def with_config(command: str, arguments: list[str]) -> list[str]:
    """Arguments of a command; of one that takes a config the first may name it: `quickstart`, `quickstart:smoke` or `my_config.py`.

    >>> with_config("train", ["quickstart:smoke", "--dry_run"])
    ['--config=experiments/configs/quickstart.py:smoke', '--dry_run']
    """
    if command not in _CONFIG or not arguments or arguments[0].startswith("-"):
        return arguments
    from marl_llm.runs.command import config_named

    return [f"--config={config_named(arguments[0])}", *arguments[1:]]


def _import_own_experiments() -> None:
    """Imports the package `experiments` that lies beside this one, even in a folder that has an `experiments/` of its own.

    Raises `ImportError` where another one is imported already.
    """
    beside = pathlib.Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(beside))
    try:
        module = importlib.import_module("experiments")
    finally:
        sys.path.remove(str(beside))
    if pathlib.Path(module.__file__ or "").resolve() != beside / "experiments" / "__init__.py":
        raise ImportError(f"{module.__path__} is imported as `experiments` in place of {beside / 'experiments'}: rename it")


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code. An unknown command is 2."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        from marl_llm.hints import meant

        print(f"error: unknown command {name!r}{meant(name, COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    _import_own_experiments()
    module = importlib.import_module(COMMANDS[name][0])
    if name in _FLAGS:
        from marl_llm.runs import command

        sys.argv = [f"marl {name}", *with_config(name, rest)]
        interrupted = getattr(module, "INTERRUPTED", "interrupted")
        command.run(module.main, module.FLAGS, interrupted, positional=name in _POSITIONAL)
        return 0
    return module.main(rest)


if __name__ == "__main__":
    sys.exit(main())
