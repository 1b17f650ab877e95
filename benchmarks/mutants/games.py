"""Faults in the rules and rewards of the games."""

G, T = "marl_llm/games/", "tests/games/"
P, J = T + "test_plan_path.py " + T + "test_plan_path_maps.py", T + "test_joint_letter.py"

FAULTS = {
    ("marl_llm/games/search/library.py", "tests/games/test_library_questions.py"): {
        "of functions that one question means one is right": ("sources\": tuple(f\"{name}: \" for name in names)", "sources\": tuple(f\"{name}: \" for name in names[:1])"),
        "a question quotes a signature": ("if not text.startswith(last):", "if True:"),
        "the name stands in the question": ('"it", text)', 'last, text)'),
        "the rank is not paid by degrees": ("return 1.0 / ranks[0] if ranks", "return 1.0 if ranks"),
        "the module that a question tells is paid": ("word.replace(f\"{path.fields['module']}.\", \"\")", "word"),
        "words of the description are paid": ('if " " in word or word == name else 0.0', "if word else 0.0"),
        "only the nearest word counts": ("[max(scores), statistics.fmean(scores)]", "[max(scores), max(scores)]"),
        "names are not paid by their parts": ('r"[A-Za-z0-9]+"', 'r"[A-Za-z0-9._]+"'),
        "the answerer is paid for the search": ('("searcher",), name="found"', '("searcher", "answerer"), name="found"'),
    },
    (G + "plan_path/game.py", P): {
        "walls can be walked through": ("free = inside & ~map_.walls[safe[0], safe[1]]", "free = inside"),
        "moves go on after a wall": ("active = (move >= 0) & ~stopped & ~arrived", "active = (move >= 0) & ~arrived"),
        "the Planner sees in the split view": ('sees = self.view == "full" or role == "tool"', "sees = True"),
        "an empty list is legal": ("legal = well_formed & (count > 0) & ~stopped", "legal = well_formed & ~stopped"),
        "the walls are listed farthest first": ("jnp.where(state.map.walls.reshape(-1), -away, -FAR)", "jnp.where(state.map.walls.reshape(-1), away - 2 * self.height * self.width, -FAR)"),
        "impossible maps are valid": ("return (d >= self.min_distance) & (d <= self.max_distance)", "return d >= self.min_distance"),
    },
    (G + "kit/lists.py", P): {
        "what does not parse is executed": ("return jnp.where(listed & good, means, -1)", "return jnp.where(listed, means, -1)"),
        "a cut response parses": ("good = ended & jnp.all((means >= 0) | ~listed)", "good = jnp.all((means >= 0) | ~listed)"),
    },
    (G + "kit/board.py", P): {
        "malformed claims count": ("claim = jnp.where(well_formed, self.claim(", "claim = jnp.where(True, self.claim("),
        "the turn does not advance": ("turn=state.turn + 1, status", "turn=state.turn, status"),
    },
    (G + "kit/board_pay.py", P): {
        "the outcome does not ask for form": ("Rewards((well_formed & solved)", "Rewards(solved"),
    },
    (G + "kit/grids.py", P): {
        "the splits share maps": ("return jnp.minimum(print_ % BUCKETS, 2) == split_index(split)", "return jnp.minimum(print_ % BUCKETS, 2) >= split_index(split)"),
    },
    (G + "plan_path/rewards.py", P): {
        "loitering is paid in the progress form": ("facts.previous_claim - facts.after, 0.0) / facts.initial", "facts.before - facts.after, 0.0) / facts.initial"),
        "a malformed list earns in the paper's form": ("team = jnp.where(facts.well_formed, team, 0.0)", "team = team"),
        "strict is not strict": ("improved = gain > 0 if strict else gain >= 0", "improved = gain >= 0"),
        "going back is free": ("MAIN * gain}", "MAIN * jnp.maximum(gain, 0.0)}"),
        "safe pays the Tool for the Planner's moves": ("jnp.minimum(facts.previous_claim, facts.before)", "facts.previous_claim"),
    },
    (G + "plan_path/maps.py", P): {
        "the start is not in the fingerprint": ("+ place(start) * odd[-2] +", "+"),
        "maps may have more walls than prompts hold": ("& (jnp.sum(walls) <= max_walls) &", "&"),
        "moves cross the border": ("jnp.pad(d, 1, constant_values=FAR)", 'jnp.pad(d, 1, mode="wrap")'),
    },
    (G + "sokoban/prose.py", T + "test_sokoban.py"): {
        "moves that stand together are read by their order": ("if set(letters) <= set(MOVES)", "if letters in MOVES"),
    },
    (G + "joint_letter/game.py", J): {
        "agents see each other's digit": ("digits[state.digits[self._index(role)]][None]", "digits[state.digits[0]][None]"),
        "one echo is enough": ('"success": (same & jnp.all(echo))', '"success": (same & jnp.any(echo))'),
        "two silences agree": ("(state.letters[0] == state.letters[1]) & (state.letters[0] >= 0)", "(state.letters[0] == state.letters[1])"),
        "the splits share pairs": ("jax.random.randint(key, (), low, high)", "jax.random.randint(key, (), 0, high)"),
    },
    (G + "hints/game.py", T + "test_hints_game.py"): {
        "hints: players see their own cards": ("own_cards, partner_cards = card_ids(state.hands[me], state.known[me])", "own_cards, partner_cards = card_ids(state.hands[me], ~state.known[me])"),
        "hints: a hint is free": ("jnp.minimum(state.hints - hint + drops", "jnp.minimum(state.hints + drops"),
        "hints: any card lies on any pile": ("fits = plays & (state.piles[pile] == card % numbers)", "fits = plays"),
        "hints: a new card keeps the marks of the old one": ("state.known[me, place] & ~leaves", "state.known[me, place]"),
        "hints: colours are said as they are read": ("jnp.argsort(self._place_of_colour(state, role))[jnp.clip(colour", "self._place_of_colour(state, role)[jnp.clip(colour"),
        "hints: what the other laid pays nobody": ("seen = state.words.at[me].set(word), state.seen.at[me].set(", "seen = state.words.at[me].set(word), state.seen.at[:].set("),
        "hints: evaluations rename colours": ('self.other_play & (index == SPLITS.index("train"))', "self.other_play"),
        "hints: the splits share decks": ("return (residue < low) | (residue >= high)", "return residue < low"),
    },
    (G + "kit/debate.py", T + "test_code_debate.py"): {
        "the history holds the test as it was written": ("    text = json.dumps(text if isinstance(text, str) else str(text), ensure_ascii=False)", "    text = str(text)"),
    },
    (G + "coding/debate.py", T + "test_code_debate.py"): {
        "a copied test is right": ('right *= 1.0 - beside("test_copied", 0.0)', "pass"),
        "a wrong test kills": ("killed = right * min(", "killed = min("),
        "empty outputs are tests": ("if not problem and not wanted.strip():", "if False:"),
        "several tests are one": ("        if count != 1:", "        if count < 1:"),
        "a single agent never stops": ('"again": bool(history) and history[-1]["code"] == code', '"again": False'),
    },
    (G + "coding/runs.py", T + "test_code_debate.py"): {
        "a program that crashes later is clean": ('"clean": float(all(state in RAN for state in states)),', '"clean": float(all(state in RAN for state in states[:SMOKE_TESTS])),'),
        "every test is right": ('if ran.value[0].state != "passed":', "if False:"),
        "mutants are not run": ("for code in wrong))", "for code in ()))"),
        "a tester's test may be nested without end": ("return (arguments, wanted) if all(map(crosses, (*arguments, wanted))) else None", "return arguments, wanted"),
    },
    (G + "coding/contests.py", T + "test_code_data.py"): {
        "shown tests are golden": ("for t, known in zip(tests, shown) if not known)", "for t, known in zip(tests, shown))"),
        "pickles may name functions": ('raise pickle.UnpicklingError(f"it names {module}.{name}")', "return super().find_class(module, name)"),
        "references are believed": ('if number == 0 and set(states) != {"passed"}:', "if False:"),
        "solutions may disagree": ("""if number and "wrong" in states and""", "if False and"),
        "Python 2 is Python 3": ("if language in (PYTHON3, ", "if language in (1, PYTHON3, "),
    },
    (G + "maths/debate.py", T + "test_maths_debate.py"): {
        "a question is an answer": ("self._strict and is_number(target) and not is_number(answer)", "False"),
        "what is printed last counts": ("len(lines) != 1 or", "False or"),
        "unreadable answers are equal": ("return success(False, result.seconds, result.attempts)\n", "return success(True, result.seconds, result.attempts)\n"),
        "team pay is one's own answer": ('if finished and form != "safe" else', "if False else"),
    },
    (G + "coding/aux_data.py", T + "test_aux_data.py"): {
        "after one list all expected values are lists": ("if self._wrapped and not", "if self.loose and not"),
    },
    (G + "maths/sums.py", T + "test_maths_debate.py"): {
        "digits of any kind are a sum's answer": ("not _INTEGER.fullmatch(a) or not _INTEGER.fullmatch(b)", 'not a.lstrip("-").isdigit() or not b.lstrip("-").isdigit()'),
    },
    (G + "maths/data.py", T + "test_maths_data.py"): {
        "solutions go before answers": ("name = next((name for name in ANSWER if", "name = next((name for name in (*SOLUTION, *ANSWER) if"),
        "lists are kept as text": ("        (value,) = value", "        value = str(value)"),
    },
    (G + "maths/ensemble.py", T + "test_maths_debate.py"): {
        "the ballot is not shuffled": ('random.Random(f"ballot {order}").shuffle(votes)', "pass"),
        "seats are never candidates": ("metrics, group_seats=group_seats)", "metrics)"),
        "the majority is the first": ("max(count, key=count.__getitem__)", "next(iter(count))"),
    },
    ("marl_llm/workflows/forms.py", "tests/workflows/test_forms.py"): {
        "the safe form pays in every turn": ('last.get(speaker, {}) if form == "safe" else {}', "{}"),
        "illegal answers have parts": ("            if call.legal:\n", "            if True:\n"),
    },
}
