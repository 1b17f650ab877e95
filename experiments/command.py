"""Runs a script of this folder: flags are read, and what a user can mend is said in one line instead of a traceback.

Exit codes: 0 done, 2 an error in a flag, a config or the run (the message says what to do), 3 a checkpoint that cannot be read or
written, or a damaged line of the run's files, 130 interrupted.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable

from absl import app, flags

from marl_llm import hints

FAILED, DAMAGED, INTERRUPTED = 2, 3, 130


def fail(message: object, code: int = FAILED) -> None:
    """Prints `error: message` and ends the process."""
    print(f"error: {str(message).strip()}", file=sys.stderr)
    sys.exit(code)


def run(main: Callable[[list[str]], None]) -> None:
    """`absl.app.run` with errors in flags and config files told plainly. `main` gets the arguments that are not flags."""

    def guarded(argv):
        if len(argv) > 1:
            fail(f"unexpected {' '.join(argv[1:])!r}: every option starts with --, and takes its value after = (see --help)")
        try:
            main(argv)
        except KeyboardInterrupt:
            print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # a compilation in the background would hold a normal exit up

    app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
    try:
        rest = values(argv)
        for name in values:  # a config file that is missing shows only when the config is read
            if type(values[name].value).__name__ == "_ErrorConfig":
                _ = values[name].value.anything
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
        return f"there is no config file {path} (from {os.getcwd()})"
    for e in chain:
        if isinstance(e, SyntaxError) and e.filename:
            return f"{e.filename} line {e.lineno}: {e.msg}"
    for e in chain:
        here = [f for f in traceback.extract_tb(e.__traceback__) if path and os.path.abspath(f.filename) == os.path.abspath(path)]
        if here:
            plain = isinstance(e, ValueError) or "key " in _message(e)
            return f"{path} line {here[-1].lineno}: {'' if plain else type(e).__name__ + ': '}{_message(e)}"
    section = re.search(r"flag --([\w.]+)=(.*?): Failed to parse .* as a ConfigDict", str(error))
    if section:
        return f"--{section[1]} is a section of the config: set one of its keys, e.g. --{section[1]}.name={section[2]}"
    if isinstance(error, AttributeError | KeyError):
        return _unknown_key(argv, _message(error))
    return str(error)


def _config_file(argv: list[str]) -> str:
    for i, arg in enumerate(argv):
        if re.match(r"--?config=", arg):
            return arg.split("=", 1)[1].split(":", 1)[0]
        if re.fullmatch(r"--?config", arg) and i + 1 < len(argv):
            return argv[i + 1].split(":", 1)[0]
    return ""


def _message(error: BaseException) -> str:
    """The text of an error in one line; of a key that a ConfigDict lacks, what was written and what may have been meant."""
    text = str(error)
    if isinstance(error, AttributeError | KeyError):
        if hint := re.search(r'Did you mean "(\w+)" instead of "(\w+)"', text):
            return f"unknown key {hint[2]!r}; did you mean {hint[1]!r}?"
        if key := re.match(r"[\\'\"]*(?:Key \"|')?(\w+)[\\'\"]*( does not exist|$)", text):
            return f"unknown key {key[1]!r}"
    return " ".join(text.replace(" (reference)", "").split()) or type(error).__name__


def _unknown_key(argv: list[str], message: str) -> str:
    """Names the flag whose key does not exist."""
    key = re.search(r"unknown key '(\w+)'", message)
    for arg in argv:
        name = re.match(r"--?(?:no)?(config\.[\w.]+)", arg)
        if name and key and key[1] in name[1].split("."):
            return f"--{name[1]}: {message}"
    return message


def closest(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known word is near."""
    return hints.meant(word, known)
