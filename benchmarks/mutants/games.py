"""Faults in the rules and rewards of the games."""

G, T = "marl_llm/games/", "tests/games/"
P, J = T + "test_plan_path.py " + T + "test_plan_path_maps.py", T + "test_joint_letter.py"

FAULTS = {
    (G + "plan_path/game.py", P): {
        "walls can be walked through": ("free = inside & ~map_.walls[safe[0], safe[1]]", "free = inside"),
        "moves go on after a wall": ("active = (move >= 0) & ~stopped & ~arrived", "active = (move >= 0) & ~arrived"),
        "the Planner sees in the split view": ('sees = self.view == "full" or role == "tool"', "sees = True"),
        "what does not parse is executed": ("return jnp.where(listed & good, moves, -1)", "return jnp.where(listed, moves, -1)"),
        "a cut response parses": ("good = ended & jnp.all((moves >= 0) | ~listed)", "good = jnp.all((moves >= 0) | ~listed)"),
        "an empty list is legal": ("legal = well_formed & (count > 0) & ~stopped", "legal = well_formed & ~stopped"),
        "malformed claims count": ("claim = jnp.where(well_formed, self._measure(", "claim = jnp.where(True, self._measure("),
        "the turn does not advance": ("turn=state.turn + 1, status", "turn=state.turn, status"),
        "the walls are listed farthest first": ("jnp.where(state.map.walls.reshape(-1), -away, -FAR)", "jnp.where(state.map.walls.reshape(-1), away - 2 * self.height * self.width, -FAR)"),
        "impossible maps are valid": ("return (d >= self.min_distance) & (d <= self.max_distance)", "return d >= self.min_distance"),
    },
    (G + "plan_path/rewards.py", P): {
        "loitering is paid in the progress form": ("facts.previous_claim - facts.after, 0.0) / facts.initial", "facts.before - facts.after, 0.0) / facts.initial"),
        "a malformed list earns in the paper's form": ("team = jnp.where(facts.well_formed, team, 0.0)", "team = team"),
        "strict is not strict": ("improved = gain > 0 if strict else gain >= 0", "improved = gain >= 0"),
        "the outcome does not ask for form": ("team = (facts.well_formed & facts.at_goal)", "team = facts.at_goal"),
        "going back is free": ("MAIN * gain,", "MAIN * jnp.maximum(gain, 0.0),"),
    },
    (G + "plan_path/maps.py", P): {
        "the splits share maps": ("return jnp.minimum(print_ % BUCKETS, 2) == split_index(split)", "return jnp.minimum(print_ % BUCKETS, 2) >= split_index(split)"),
        "the start is not in the fingerprint": ("+ place(start) * odd[-2] +", "+"),
        "maps may have more walls than prompts hold": ("& (jnp.sum(walls) <= max_walls) &", "&"),
        "moves cross the border": ("jnp.pad(d, 1, constant_values=FAR)", 'jnp.pad(d, 1, mode="wrap")'),
    },
    (G + "joint_letter/game.py", J): {
        "agents see each other's digit": ("digits[state.digits[self._index(role)]][None]", "digits[state.digits[0]][None]"),
        "one echo is enough": ('"success": (same & jnp.all(echo))', '"success": (same & jnp.any(echo))'),
        "two silences agree": ("(state.letters[0] == state.letters[1]) & (state.letters[0] >= 0)", "(state.letters[0] == state.letters[1])"),
        "the splits share pairs": ("jax.random.randint(key, (), low, high)", "jax.random.randint(key, (), 0, high)"),
    },
}
