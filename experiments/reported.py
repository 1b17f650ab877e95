"""What Stronger-MAS reports (tables 1 and 2), in percent, as data: beside what `experiments.compare` finds. No seeds, no intervals."""

DOMAINS = ("sudoku", "sokoban", "plan_path", "lcb", "apps", "codecontests", "aime24", "aime25", "olympiad")
TABLES = {  # model -> variant of `experiments.compare` -> figures in the order of DOMAINS
    "Qwen3-1.7B": {
        "single": (7.0, 0.0, 5.0, 11.6, 16.2, 3.6, 13.4, 9.8, 22.2),
        "single_grpo": (29.0, 3.0, 11.0, 18.8, 17.0, 3.0, 10.0, 6.7, 23.8),
        "team": (69.0, 0.0, 10.0, 19.0, 16.6, 3.6, 13.3, 13.0, 35.9),
        "team_grpo": (87.0, 1.0, 82.0, 20.6, 17.6, 4.8, 13.3, 16.7, 35.0),
        "at_grpo_shared": (99.0, 10.0, 96.0, 20.9, 17.6, 4.8, 16.7, 16.7, 39.6),
        "at_grpo_per_role": (99.0, 11.5, 97.0, 24.0, 18.6, 7.8, 13.3, 18.3, 35.2),
    },
    "Qwen3-8B": {
        "single": (48.0, 9.0, 12.0, 22.8, 30.2, 15.75, 18.3, 20.0, 55.0),
        "single_grpo": (54.0, 14.0, 47.0, 25.7, 37.0, 12.12, 18.3, 26.67, 54.8),
        "team": (72.0, 16.0, 71.0, 28.0, 44.4, 17.6, 36.6, 30.0, 56.5),
        "team_grpo": (99.0, 30.0, 96.0, 24.2, 40.2, 10.3, 33.3, 26.67, 53.2),
        "at_grpo_shared": (99.5, 96.0, 93.0, 30.28, 45.8, 18.1, 50.0, 35.2, 56.8),
        "at_grpo_per_role": (99.0, 98.0, 96.0, 33.1, 46.5, 18.1, 57.0, 40.0, 56.6),
    },
}
GAMES = ("sudoku", "sokoban", "plan_path")  # a game's name begins with its domain; of the other domains no game has one benchmark alone


def reported(game: str, variant: str) -> str:
    """The paper's figures for a game and a variant, `97.0 (1.7B), 96.0 (8B)`; the empty string where it has none."""
    domain = next((name for name in GAMES if game.startswith(name)), None)
    if domain is None:
        return ""
    place = DOMAINS.index(domain)
    found = [(model, rows[variant][place]) for model, rows in TABLES.items() if variant in rows]
    return ", ".join(f"{figure} ({model.rpartition('-')[2]})" for model, figure in found)
