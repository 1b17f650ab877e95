"""Engineer, modeler and analyst with prompts for general models (readings of MAPPA, Appendix C, without its scale for coaches)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marl_llm.games.pipeline.team import ANALYST, ENGINEER, MODELER, SUBMISSION
from marl_llm.tools.sandbox import Workspace
from marl_llm.untrusted import valid_text
from marl_llm.workflows import ActionView, Role, code_block

REQUIRED = {ENGINEER: ("X_train.pkl", "y_train.pkl", "X_test.pkl"), MODELER: ("model.pkl",), ANALYST: (SUBMISSION,)}
MAX_LISTED, MAX_NAME, MAX_NOTE = 40, 80, 1000  # files, characters of a name, characters of what a role says beside its program

SYSTEM = (
    "You are the {role} of a data science team of three: data engineer, modeler, analyst. They work one after the other on the "
    "files of one folder.\n\n{duty}\n\n"
    "Write one Python program in one ```python block. It is run in the folder, without network, for at most {seconds} seconds; numpy, "
    "pandas and scikit-learn are installed. Only what it saves to files is kept. Before the block, say in a few "
    "sentences what you do and what the next member must know."
)
DUTIES = {
    ENGINEER: (
        "You prepare the data. From train.csv and test.csv you must save X_train.pkl and y_train.pkl, the features and the targets to "
        "learn from, and X_test.pkl, the features of every row of test.csv in its order, all with pandas' to_pickle or joblib. X_train "
        "and X_test must have the same columns, numbers without gaps, and the id column must not be a feature. Save fitted transformers "
        "that the others will need, such as an encoder of the target."
    ),
    MODELER: (
        "You fit the model. From X_train.pkl and y_train.pkl you must save model.pkl, a fitted model whose predictions suit the metric. "
        "Compare a few models by cross-validation, print their scores, and fit the best one to all rows."
    ),
    ANALYST: (
        "You deliver the predictions. With model.pkl and X_test.pkl you must save submission.csv, with a column for the id and one for "
        "each target, and one line for each row of test.csv. Undo the engineer's transformations of the target where there are any."
    ),
}  # fmt: skip
PROMPT = """# Task
{{task_text}}

Metric: {{metric}}. Id column: {{id_column}}. To predict: {{targets}}.

# Files
{{listing}}
{{warning}}{notes}{{last}}{{printed}}
Now write the {role}'s program. It must save: {required}."""


def list_files(files: Workspace) -> str:
    """Names and sizes, a file a line. Whoever named a file may be a program of a policy: names are short and of one line."""
    sizes = files.sizes()
    lines = [f"- {one_line(name)} ({size:,} bytes)" for name, size in sorted(sizes.items())[:MAX_LISTED]]
    more = [f"- and {len(sizes) - MAX_LISTED} more"] if len(sizes) > MAX_LISTED else []
    return "\n".join([*lines, *more]) or "none"


def one_line(name: str) -> str:
    """A name without line ends and other characters that cannot be seen, cut to `MAX_NAME`."""
    shown = "".join(character if character.isprintable() else "?" for character in valid_text(name))
    return shown if len(shown) <= MAX_NAME else f"{shown[:MAX_NAME]}…"


def program_and_note(role: str) -> Callable[[str], dict[str, Any]]:
    """The parser of a role: the one fenced program, and what is said before it. Raises `FormatError` without exactly one block."""
    block = code_block("code")

    def parse(text: str) -> dict[str, Any]:
        fields = block(text)
        note = text.partition("```")[0].strip()
        return {**fields, f"note_{role}": note if len(note) <= MAX_NOTE else f"{note[:MAX_NOTE]}…"}

    return parse


def _titled(title: str, fenced: bool = False) -> Callable[[str], str]:
    """Shows a text under a title, and an empty one not at all."""

    def show(text: str) -> str:
        body = f"```\n{text}\n```" if fenced else text
        return f"\n# {title}\n{body}\n" if text else ""

    return show


def data_roles(max_tokens: int = 16_384, max_prompt: int = 24_576, seconds: float | int = 60) -> list[Role]:
    """The three roles. What a program printed is cut, from its end, where a prompt would be too long."""
    sizes = dict(max_tokens=max_tokens, max_prompt=max_prompt, trim="printed", timeout_s=1200.0)
    made, earlier = [], []
    for role, name in ((ENGINEER, "data engineer"), (MODELER, "modeler"), (ANALYST, "analyst")):
        notes = "".join(f"{{note_{earlier_role}}}" for earlier_role in earlier)
        show = {f"note_{earlier_role}": _titled(f"The {earlier_role} said") for earlier_role in earlier}
        show |= {"last": _titled("Your last program", True), "printed": _titled("What it printed", True)}
        show |= {"warning": lambda text: f"{text}\n" if text else "", "targets": ", ".join}
        made.append(
            Role(
                role,
                PROMPT.format(notes=notes, role=name, required=", ".join(REQUIRED[role])),
                program_and_note(role),
                {"code": "", f"note_{role}": ""},
                system=SYSTEM.format(role=name, duty=DUTIES[role], seconds=f"{seconds:g}").replace("{", "{{").replace("}", "}}"),
                show=show,
                **sizes,
            )
        )
        earlier.append(role)
    return made


def feedback(view: ActionView) -> str:
    """What a coach reads of a program's run: how it ended, what it printed, and the files before and after, from the folder itself."""
    runs = [use for use in view.observations if use.node.startswith("run_")]
    if not runs:
        return ""
    use, before = runs[0].writes, view.before["files"].files()
    after = use["files"].files()
    new = [one_line(name) for name, content in after.items() if before.get(name) != content]
    owed = REQUIRED[view.call.role]
    return "\n".join(
        (
            f"The program ended: {use['state']}.",
            f"Files before:\n{list_files(view.before['files'])}",
            f"Files that it wrote: {', '.join(new[:MAX_LISTED]) or 'none'}.",
            f"Required of this role: {', '.join(owed)}; still missing: {', '.join(use['missing']) or 'none'}.",
            f"It printed:\n{use['printed'] or '(nothing)'}",
        )
    )
