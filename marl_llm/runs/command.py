"""Runs a command: flags are read, and what a user can mend is said in one line instead of a traceback.

Exit codes: 0 done, 2 an error in a flag, a config or the run (the message says what to do), 3 a checkpoint that cannot be read or
written, or a damaged line of the run's files, 130 interrupted, 143 told to stop (marl_llm.runs.stopping).
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable

from absl import app, flags

from marl_llm import hints
from marl_llm.errors import UserError

FAILED, INTERRUPTED, STOPPED = UserError.exit_code, 130, 143
RESUMED = str(pathlib.Path(__file__).parent / "workdir.py")  # read as a config file, it gives the config of a run directory


class ConfigError(UserError, ValueError):
    """The config cannot be run; the message says what, where and what to do."""


class TrainingError(UserError, RuntimeError):
    """Training cannot go on; the message says what, where and what to do. The last checkpoint is whole."""


def fail(message: object, code: int = FAILED) -> None:
    """Prints `error: message` and ends the process."""
    print(f"error: {str(message).strip()}", file=sys.stderr)
    sys.exit(code)


def run(
    main: Callable[[list[str]], None], values: flags.FlagValues, interrupted: str = "interrupted", positional: bool = False
) -> None:
    """`absl.app.run` with errors in one line, for a script whose own flags are `values`: each script has its own, so that many can be
    imported into one process. `main` gets the arguments that are not flags; `--resume=DIR` brings the config of DIR.

    `positional`: whether there may be any arguments beside the program's name.
    """

    def guarded(argv):
        if len(argv) > 1 and not positional:
            fail(f"unexpected {' '.join(argv[1:])!r}: every option starts with --, and takes its value after = (see --help)")
        try:
            main(argv)
        except KeyboardInterrupt:
            print(f"\n{interrupted}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # a compilation in the background would hold a normal exit up
        except SystemExit as end:
            if end.code == STOPPED:  # and has said so
                sys.stderr.flush()
                os._exit(STOPPED)
            raise
        except Exception as error:
            if (message := told(error)) is None:
                raise
            fail(message, _code(error))

    try:
        check_local(sys.argv)
    except ConfigError as error:
        fail(error)
    sys.argv = [with_installed(arg) for arg in with_resumed(with_values(sys.argv))]
    if "trust" not in values:  # `marl_llm.runs.trust.asked` reads it, before flags are parsed
        trust = "Run the code, use the addresses and send the keys that a run directory names (docs/trust.md)."
        flags.DEFINE_bool("trust", False, trust, flag_values=values)
    if {"--help", "-help", "-h"} & set(sys.argv[1:]):  # absl's own would list the flags of `flags.FLAGS` alone
        print(f"{sys.modules[main.__module__].__doc__}\n{values.get_help()}")
        return
    app.run(guarded, flags_parser=lambda argv: _parse(argv, values))


def check_local(argv: list[str]) -> None:
    """Raises `ConfigError` where a run directory is an address such as gs://bucket/run: it would become a local folder `gs:`."""
    for flag, after in zip(argv, [*argv[1:], ""]):
        match = re.fullmatch(r"--?(workdir|resume|run)(?:=(.*))?", flag)
        value = (after if match[2] is None else match[2]) if match else ""
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
            raise ConfigError(
                f"--{match[1]}={value} is not on a disk: a run directory is locked, appended to and renamed in, which a bucket cannot do. "
                "Use a local or shared directory and copy it with `gcloud storage rsync -r DIR gs://...`, or mount the bucket "
                "(tpu_scripts/README.md says which kind of bucket)"
            )


def with_values(argv: list[str]) -> list[str]:
    """`--config FILE`, `--config.KEY VALUE` and `--resume DIR` as `--config=FILE` and so on, which all that reads arguments knows.

    >>> with_values(["train", "--resume", "runs/a", "--config.steps", "3", "--config.hosted", "--dry_run"])
    ['train', '--resume=runs/a', '--config.steps=3', '--config.hosted', '--dry_run']
    """
    joined: list[str] = []
    for arg in argv:
        named = joined and re.fullmatch(r"--?(resume|config[\w.]*)", joined[-1])
        if named and (not arg.startswith("-") or re.match(r"-[\d.]", arg)):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def with_resumed(argv: list[str]) -> list[str]:
    """`--resume=DIR` without `--config`: the config of DIR is put in front, so that further flags can change it."""
    matches = [re.fullmatch(r"--?(resume|config)=(.*)", arg) for arg in argv]
    named = {match[1]: match[2] for match in matches if match}
    if "resume" not in named or "config" in named:
        return argv
    return [argv[0], f"--config={RESUMED}:{named['resume']}", *argv[1:]]


def with_installed(argument: str) -> str:
    """`--config=experiments/configs/NAME.py[:variant]` outside a checkout: the file of the installed package."""
    match = re.fullmatch(r"(--?config=)(.*)", argument)
    return match[1] + config_path(match[2]) if match else argument


def config_path(named: str) -> str:
    """A config file with its variant as it was named, or, where there is no such file, the one of this package that is named like it."""
    path, colon, variant = named.partition(":")
    own = pathlib.Path(__file__).parents[2] / "experiments" / "configs" / pathlib.Path(path).name
    named_path = pathlib.PurePath(path)
    if os.path.isfile(path) or named_path.parts[:-1] not in (("experiments", "configs"), ()) or not own.is_file():
        return named
    return f"{own}{colon}{variant}"


def config_named(name: str) -> str:
    """The config file, with its variant, that a word names.

    >>> config_named("quickstart:smoke"), config_named("my_config.py")
    ('experiments/configs/quickstart.py:smoke', 'my_config.py')
    """
    path, colon, variant = name.partition(":")
    return f"{path if path.endswith('.py') else f'experiments/configs/{path}.py'}{colon}{variant}"


def missing_config(path: str) -> str:
    """One line about a config file that is not there, with what may have been meant."""
    folder, name = os.path.split(path)
    neighbours = [other for other in (os.listdir(folder or ".") if os.path.isdir(folder or ".") else ()) if other.endswith(".py")]
    return f"there is no config file {path} (from {os.getcwd()}){hints.meant(name, neighbours)}"


def check_writable(option: str, path: str | os.PathLike | None) -> None:
    """Raises `ConfigError` where the file that an option names cannot be written: before the work whose results it is to hold."""
    if path is None:
        return
    folder = pathlib.Path(path).absolute().parent
    if os.path.isdir(path):
        raise ConfigError(f"--{option}={path} is a directory; name a file")
    if not folder.is_dir():
        raise ConfigError(f"--{option}={path}: there is no directory {folder}; make it, or name another file")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"--{option}={path} cannot be written; name another file")


def refuse_idle(given: Iterable[str], why: str) -> None:
    """Raises `ConfigError` for the first of the options that were given though nothing would read them."""
    for name in given:
        raise ConfigError(f"--{name} would have no effect: {why}")


def given_flags(values: flags.FlagValues, names: Iterable[str]) -> list[str]:
    """Those flags that stand on the command line."""
    return [name for name in names if values[name].present]


def given_options(parser: argparse.ArgumentParser, asked: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those options that have another value than their default."""
    return [name for name in names if getattr(asked, name) != parser.get_default(name)]


def told(error: BaseException, files: Iterable[str] = ()) -> str | None:
    """One line about an error that a user can mend, or that a user's own `files` raised; None for a fault of this library."""
    if isinstance(error, UserError | OSError):
        return str(error)
    names = {os.path.realpath(file) for file in files}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.realpath(f.filename) in names]
    if not frames:
        return None
    last = frames[-1]
    return f"{last.filename} line {last.lineno}, in {last.name}: {type(error).__name__}: {_flat(error)}"


def code_of(error: Exception, subject: str = "") -> int:
    """Tells on stderr, in one line about `subject`, an error that a user can mend, and returns the exit code; raises any other again."""
    message = told(error) or (str(error) if isinstance(error, ValueError) else None)
    if message is None:
        raise error
    print(f"error: {subject + ': ' if subject else ''}{message}", file=sys.stderr)
    return _code(error)


def _code(error: Exception) -> int:
    return error.exit_code if isinstance(error, UserError) else FAILED


def _parse(argv: list[str], values: flags.FlagValues) -> list[str]:
    if "verbosity" not in values:
        values.append_flag_values(flags.FLAGS)  # absl's own: --verbosity, --helpfull, ...
    if path := _config_file(argv):  # a config file may import what lies beside it
        sys.path.append(os.path.dirname(os.path.abspath(path)))
    try:
        rest = values(argv)
        flags.FLAGS.mark_as_parsed()
        for name in values:  # a config file that is missing shows only when the config is read
            if type(values[name].value).__name__ == "_ErrorConfig":
                _ = values[name].value.anything
        if path and any(arg.lstrip("-").startswith("config.recipe.name") for arg in argv):
            from ml_collections import config_flags

            from marl_llm.runs.players import without_other_recipe  # takes seconds to import

            without_other_recipe(values["config"].value, config_flags.get_override_values(values["config"]))
        return rest
    except SystemExit:  # absl's --help ends with 1
        sys.exit(0)
    except Exception as error:  # flags of absl, and whatever a config file raises
        fail(explain(error, argv))
        raise AssertionError from error


def explain(error: BaseException, argv: list[str]) -> str:
    """One line about an error in the flags `argv` or in the config file that they name."""
    path = _config_file(argv)
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    if path and not os.path.isfile(path):
        return missing_config(path)
    for e in chain:
        if isinstance(e, SyntaxError) and e.filename:
            return f"{e.filename} line {e.lineno}: {e.msg}"
    if path == RESUMED and (config_errors := [e for e in chain if isinstance(e, ConfigError)]):
        return str(config_errors[-1])  # the first one, which ml_collections wrapped
    for e in chain:
        frames = [f for f in traceback.extract_tb(e.__traceback__) if path and os.path.abspath(f.filename) == os.path.abspath(path)]
        if frames and path != RESUMED:
            key = _unknown_key(e)
            plain = isinstance(e, ValueError) or key
            return f"{path} line {frames[-1].lineno}: {'' if plain else type(e).__name__ + ': '}{key or _flat(e)}"
    section = re.search(r"flag --([\w.]+)=(.*?): Failed to parse .* as a ConfigDict", str(error))
    if section:
        return f"--{section[1]} is a section of the config: set one of its keys, e.g. --{section[1]}.name={section[2]}"
    if isinstance(error, AttributeError | KeyError | TypeError):
        return _unknown_flag(argv, error)
    return _wrong_type(str(error))


def _wrong_type(text: str) -> str:
    """What absl says of a value of another type, in plain words."""
    match = re.fullmatch(r"flag (--[\w.]+)=(.*?): (.*)", text, re.DOTALL)
    kinds = {"int()": "a whole number", "to float": "a number", "boolean": "true or false"}
    kind = next((kind for mark, kind in kinds.items() if match and mark in match[3]), None)
    if re.fullmatch(r"Unknown command line flag '\w+'", text):
        return f"{text}; --help lists those that there are"
    return f"{match[1]}={match[2]} must be {kind}" if kind else " ".join(text.split())


def _config_file(argv: list[str]) -> str:
    for i, arg in enumerate(argv):
        if re.match(r"--?config=", arg):
            return arg.split("=", 1)[1].split(":", 1)[0]
        if re.fullmatch(r"--?config", arg) and i + 1 < len(argv):
            return argv[i + 1].split(":", 1)[0]
    return ""


def _flat(error: BaseException) -> str:
    return " ".join(str(error).replace(" (reference)", "").split()) or type(error).__name__


def _unknown_key(error: BaseException) -> str:
    """Of a key that a ConfigDict lacks: what was written, and what may have been meant or what there is. Else nothing."""
    from ml_collections import config_dict

    if not isinstance(error, AttributeError | KeyError):
        return ""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    sections = [value for value in frames if isinstance(value, config_dict.ConfigDict)]
    key = re.match(r"[\\'\"]*(?:Key \"|')?(\w+)[\\'\"]*", str(error))
    if not sections or not key or key[1] in sections[-1].keys():
        return ""
    return f"unknown key {key[1]!r}; {hints.suggestion(key[1], sections[-1].keys())}"


def _unknown_flag(argv: list[str], error: BaseException) -> str:
    """Names the flag whose key does not exist."""
    message = _unknown_key(error)
    key = re.search(r"unknown key '(\w+)'", message)
    for arg in argv:
        name = re.match(r"--?(?:no)?(config\.[\w.]+)", arg)
        if name and key and key[1] in name[1].split("."):
            return f"--{name[1]}: {message}"
        if name and not key and name[1].count(".") > 1 and name[1].split(".")[-1] in str(error) + name[1]:
            return f"--{name[1]}: config has no such key; {name[1].rpartition('.')[0]} is a value, not a section"
    return message or _flat(error)
