"""What errors have in common that a user can mend: a command tells one of them in a line, and any other with its traceback."""


class UserError(Exception):
    """Its message says what is wrong, where, and what to do. A subclass has its plain kind beside it, e.g. `ValueError`.

    Attributes:
      exit_code: of a command that it ends.
    """

    exit_code = 2


class TeacherError(UserError, RuntimeError):
    """A teacher's endpoint gave no log-probs; the message names it."""


class DamagedError(UserError):
    """Something that was stored cannot be read or written: a checkpoint, or a line of a run's files."""

    exit_code = 3
