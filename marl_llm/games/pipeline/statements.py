"""The language of the small pipeline: a piece is a statement of real code, a response a program, run in the sandbox with NumPy.

    engineer   load fill_mean scale save_xtrain save_ytrain save_xtest
    modeler    load fit_linear save_model
    analyst    load_model load_xtest predict ids save
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from marl_llm.games.kit.miniature import word_renderer
from marl_llm.games.pipeline.team import ANALYST, ENGINEER, MODELER, NAMES, SUBMISSION
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.tools.sandbox import Workspace
from marl_llm.workflows import FormatError, PlainText, Role, ScriptTurn

REQUIRED = {ENGINEER: ("X_train.npy", "y_train.npy", "X_test.npy"), MODELER: ("model.npy",), ANALYST: (SUBMISSION,)}
SHOWN = {"X_train.npy": "xtrain", "y_train.npy": "ytrain", "X_test.npy": "xtest", "model.npy": "model", SUBMISSION: "submission"}
HEAD = "import numpy as np\n"
STATEMENTS = {
    ENGINEER: {
        "load": (
            "def read(name):\n"
            "    lines = open(name).read().splitlines()[1:]\n"
            '    return np.array([[float(cell or "nan") for cell in line.split(",")[1:]] for line in lines])\n'
            'train, z = read("train.csv"), read("test.csv")\n'
            "x, y = train[:, :-1], train[:, -1]"
        ),
        "fill_mean": "mean = np.nanmean(x, axis=0)\nx, z = np.where(np.isnan(x), mean, x), np.where(np.isnan(z), mean, z)",
        "fill_zero": "x, z = np.nan_to_num(x), np.nan_to_num(z)",
        "drop_rows": "keep = ~np.isnan(x).any(axis=1)\nx, y, z = x[keep], y[keep], z[~np.isnan(z).any(axis=1)]",
        "scale": "mean, spread = x.mean(axis=0), x.std(axis=0)\nx, z = (x - mean) / spread, (z - mean) / spread",
        "raw": "x, z = x.copy(), z.copy()",
        "save_xtrain": 'np.save("X_train.npy", x)',
        "save_ytrain": 'np.save("y_train.npy", y)',
        "save_xtest": 'np.save("X_test.npy", z)',
    },
    MODELER: {
        "load": (
            'x, y = np.load("X_train.npy"), np.load("y_train.npy")\n'
            'if len(x) != len(y): raise ValueError(f"X_train has {len(x)} rows, y_train {len(y)}")\n'
            'if not np.isfinite(x).all(): raise ValueError("X_train holds values that are not finite")\n'
            "one = np.c_[x, np.ones(len(x))]\npenalty = np.diag([1.0] * x.shape[1] + [1e-6])"
        ),
        "fit_mean": "model = np.append(np.zeros(x.shape[1]), [y.mean(), 0.0])",
        "fit_linear": "model = np.append(np.linalg.solve(one.T @ one + penalty, one.T @ y), 0.0)",
        "fit_logistic": (
            'if not np.isin(y, (0, 1)).all(): raise ValueError("the target is no class")\n'
            "w = np.zeros(one.shape[1])\nfor _ in range(12):\n"
            "    p = 1 / (1 + np.exp(-np.clip(one @ w, -30, 30)))\n"
            "    curve = (one * (p * (1 - p))[:, None]).T @ one + penalty\n"
            "    w = w + np.linalg.solve(curve, one.T @ (y - p) - penalty @ w)\n"
            "model = np.append(w, 1.0)"
        ),
        "save_model": 'np.save("model.npy", model)',
    },
    ANALYST: {
        "load_model": 'model = np.load("model.npy")',
        "load_xtest": 'z = np.load("X_test.npy")',
        "predict": "said = z @ model[:-2] + model[-2]",
        "predict_class": "said = (z @ model[:-2] + model[-2] > (0.0 if model[-1] else 0.5)).astype(float)",
        "predict_probability": (
            'if not model[-1]: raise ValueError("the model has no probabilities")\n'
            "said = 1 / (1 + np.exp(-(z @ model[:-2] + model[-2])))"
        ),
        "ids": 'ids = [line.split(",")[0] for line in open("test.csv").read().splitlines()[1:]]',
        "save": (
            f'rows = [f"{{i}},{{v}}" for i, v in zip(ids, said, strict=True)]\nopen("{SUBMISSION}", "w").write("\\n".join(["id,y", *rows]))'
        ),
    },
}
FORGETS = 0.12  # how often the scripted team leaves a save out


def program(role: str, pieces: list[str]) -> str:
    """The code of a role's statements, one after the other."""
    return HEAD + "\n".join(STATEMENTS[role][piece] for piece in pieces) + "\n"


def reader(role: str) -> Callable[[str], dict[str, Any]]:
    """The parser of a role: its own statements and nothing else, in any order. Raises `FormatError`."""

    def parse(text: str) -> dict[str, Any]:
        pieces = text.split()
        if unknown := [piece for piece in pieces if piece not in STATEMENTS[role]]:
            raise FormatError(f"{unknown[0]!r} is no statement of the {role}")
        if not pieces:
            raise FormatError("no statement")
        return {"code": program(role, pieces), f"note_{role}": " ".join(pieces)}

    return parse


def shown_files(files: Workspace) -> str:
    """The files that roles owe each other, a word each."""
    sizes = files.sizes()
    return " ".join(word for name, word in SHOWN.items() if sizes.get(name)) or "none"


@functools.cache
def pipeline_tokenizer() -> PieceTokenizer:
    """One token per statement and per word of a prompt."""
    words = [piece for role in NAMES for piece in STATEMENTS[role]]
    other = ("classification", "regression", "c3", "c4", "c5", "files", "did", "none", "ok", "error", *SHOWN.values())
    return train_pieces(tuple(dict.fromkeys((*words, *other, *(f"{role}:" for role in NAMES), "."))))


def pipeline_renderer() -> PlainText:
    """A response ends with `.`."""
    return word_renderer(pipeline_tokenizer())


def pipeline_roles(again: bool = False) -> list[Role]:
    """Engineer, modeler, analyst. With `again` they may have several turns, and read their own last statements."""
    sizes = dict(max_tokens=12, max_prompt=48)
    before = {ENGINEER: "", MODELER: " did {note_engineer}", ANALYST: " did {note_modeler}"}
    own_note = {role: f" did {{note_{role}}}" if again else "" for role in NAMES}
    return [
        Role(
            role,
            f"{{kind}} {{columns}} files {{listing}}{before[role]}{own_note[role]} {role}:",
            reader(role),
            {"code": "", f"note_{role}": "none"},
            show={f"note_{name}": lambda note: note or "none" for name in NAMES if f"note_{name}" in before[role] + own_note[role]},
            **sizes,
        )
        for role in NAMES
    ]


def pipeline_player(forgets: float | int = FORGETS) -> Callable[[ScriptTurn], str]:
    """A team that knows what to do and is careless: it forgets each save with this probability and picks among fits by coin."""

    def play(turn: ScriptTurn) -> str:
        rng, kind = turn.random, turn.fields["kind"]

        def saves(*pieces):
            return [piece for piece in pieces if rng.random() >= forgets]

        if turn.role.name == ENGINEER:
            fill = rng.choices(("fill_mean", "fill_zero", "drop_rows"), (9, 9, 1))[0]
            pieces = ["load", fill, rng.choice(("scale", "raw")), *saves("save_xtrain", "save_ytrain", "save_xtest")]
        elif turn.role.name == MODELER:
            fits = ("fit_linear", "fit_logistic") if kind == "classification" else ("fit_linear", "fit_mean")
            pieces = ["load", rng.choice(fits), *saves("save_model")]
        else:
            prediction = rng.choice(("predict_class", "predict_probability")) if kind == "classification" else "predict"
            pieces = ["load_model", "load_xtest", prediction, "ids", *saves("save")]
        return " ".join(pieces)

    return play


def perfect_player(turn: ScriptTurn) -> str:
    """The team without a fault."""
    classes = turn.fields["kind"] == "classification"
    return {
        ENGINEER: "load fill_mean scale save_xtrain save_ytrain save_xtest",
        MODELER: f"load {'fit_logistic' if classes else 'fit_linear'} save_model",
        ANALYST: f"load_model load_xtest {'predict_probability' if classes else 'predict'} ids save",
    }[turn.role.name]


def random_player(turn: ScriptTurn) -> str:
    """The random player: statements by chance."""
    pieces = list(STATEMENTS[turn.role.name])
    return " ".join(turn.random.choice(pieces) for _ in range(turn.random.randint(2, 6)))
