"""What Stronger-MAS reports, in percent, as data: beside what `marl_llm compare` finds. No seeds, no intervals."""

from __future__ import annotations

DOMAINS = ("sudoku", "sokoban", "plan_path", "lcb", "apps", "codecontests", "aime24", "aime25", "olympiad")
SMALL, LARGE = "Qwen3-1.7B", "Qwen3-8B"
TABLES = {  # tables 1 and 2: model -> variant of `marl_llm compare` -> figures in the order of DOMAINS
    SMALL: {
        "single": (7.0, 0.0, 5.0, 11.6, 16.2, 3.6, 13.4, 9.8, 22.2),
        "single_grpo": (29.0, 3.0, 11.0, 18.8, 17.0, 3.0, 10.0, 6.7, 23.8),
        "team": (69.0, 0.0, 10.0, 19.0, 16.6, 3.6, 13.3, 13.0, 35.9),
        "team_grpo": (87.0, 1.0, 82.0, 20.6, 17.6, 4.8, 13.3, 16.7, 35.0),
        "at_grpo_shared": (99.0, 10.0, 96.0, 20.9, 17.6, 4.8, 16.7, 16.7, 39.6),
        "at_grpo_per_role": (99.0, 11.5, 97.0, 24.0, 18.6, 7.8, 13.3, 18.3, 35.2),
    },
    LARGE: {
        "single": (48.0, 9.0, 12.0, 22.8, 30.2, 15.75, 18.3, 20.0, 55.0),
        "single_grpo": (54.0, 14.0, 47.0, 25.7, 37.0, 12.12, 18.3, 26.67, 54.8),
        "team": (72.0, 16.0, 71.0, 28.0, 44.4, 17.6, 36.6, 30.0, 56.5),
        "team_grpo": (99.0, 30.0, 96.0, 24.2, 40.2, 10.3, 33.3, 26.67, 53.2),
        "at_grpo_shared": (99.5, 96.0, 93.0, 30.28, 45.8, 18.1, 50.0, 35.2, 56.8),
        "at_grpo_per_role": (99.0, 98.0, 96.0, 33.1, 46.5, 18.1, 57.0, 40.0, 56.6),
    },
}
# Plan-Path alone. The paper's roles trained as single agents; its "code agent" is the role beside the Tool
TABLE_4 = {"tool_alone": 11.0, "planner_alone": 14.5, "alone_then_team": 16.0, "at_grpo_per_role": 96.0}
SWAPPED = 6.0  # table 4: the trained team with its two models exchanged
TABLE_6 = {  # in the order of DOMAINS. It prints the baselines of Sokoban and Sudoku exchanged; here they are those of table 2
    "single": (48.0, 9.0, 12.0),
    "team": (72.0, 16.0, 71.0),
    "at_grpo_outcome": (99.5, 93.0, 89.0),
    "at_grpo_per_role": (99.5, 96.0, 93.0),
}
TABLES_7_8 = {  # in the order of DOMAINS from "lcb" on
    SMALL: {
        "once": (11.6, 16.2, 3.6, 13.4, 9.8, 22.2),
        "again": (10.4, 10.4, 0.0, 3.3, 6.7, 15.8),
        "once_grpo": (18.8, 17.0, 3.0, 10.0, 6.7, 23.8),
        "again_grpo": (17.7, 13.3, 1.2, 6.67, 3.3, 16.9),
    },
    LARGE: {
        "once": (22.8, 30.2, 15.75, 18.3, 20.0, 55.0),
        "again": (7.8, 20.3, 5.12, 16.7, 16.7, 53.4),
        "once_grpo": (25.7, 37.0, 12.12, 18.3, 26.67, 54.8),
        "again_grpo": (16.8, 35.4, 11.1, 16.7, 23.3, 51.2),
    },
}
FIGURE_5 = {"at_grpo_7": 47.7, "grpo_7": 34.1}  # AIME24, 8B; the text's "18.2 to 47.7" does not say where 18.2 was measured
# what a game's name begins with -> its domains
GAMES = {
    "sudoku": ("sudoku",),
    "sokoban": ("sokoban",),
    "plan_path": ("plan_path",),
    "function_debate": ("lcb", "apps", "codecontests"),
    "code_debate": ("lcb", "apps", "codecontests"),
    "sums": ("aime24", "aime25", "olympiad"),
    "maths_": ("aime24", "aime25", "olympiad"),
}


def reported(game: str, variant: str, table: str | None = None) -> str:
    """The paper's figures for a game and a variant, `97.0 (1.7B), 96.0 (8B)`; the empty string where it has none.

    Of a game that stands for several of the paper's domains, theirs, `24.0 lcb, 18.6 apps, 7.8 codecontests (1.7B), ...`. `table` is one
    of `marl_llm.runs.variants.TABLES`; none: tables 1 and 2.
    """
    domains = next((names for name, names in GAMES.items() if game.startswith(name)), ())
    if table == "4":
        return f"{TABLE_4[variant]} (1.7B)" if domains == ("plan_path",) and variant in TABLE_4 else ""
    if table == "figure5":
        return f"{FIGURE_5[variant]} aime24 (8B)" if "aime24" in domains and variant in FIGURE_5 else ""
    kind = {"6": {"8B": TABLE_6}, "7": TABLES_7_8}.get(table or "1", TABLES)
    first = DOMAINS.index("lcb") if table == "7" else 0
    texts = []
    for model, rows in kind.items():
        figures = dict(zip(DOMAINS[first:], rows.get(variant, ())))
        pairs = [(figures[name], name) for name in domains if name in figures]
        words = ", ".join(f"{figure} {name}" if len(domains) > 1 else f"{figure}" for figure, name in pairs)
        texts += [f"{words} ({model.rpartition('-')[2]})"] if pairs else []
    return ", ".join(texts)
