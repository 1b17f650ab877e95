"""Faults that only options set together show, and faults in the second half of what pays two roles or two things."""

M, T = "marl_llm/", "tests/"
G, R, W = M + "games/", M + "training/", M + "workflows/"
TOGETHER, SAMPLES = T + "training/test_options_together.py", T + "workflows/test_samples_together.py"
EPOCHS, GAP, STEERED, MEANS, RESUME = (
    f"{TOGETHER}::test_{name}"
    for name in (
        "every_epoch_cuts_the_prompts_anew_and_visits_each_once",
        "law_2_the_gap_is_read_before_the_first_step_whatever_epochs_and_minibatches_follow",
        "a_steered_kl_counts_the_samples_that_train_and_no_others",
        "a_roles_running_mean_follows_its_returns_over_several_steps",
        "a_run_that_goes_on_from_before_the_last_step_plays_what_that_step_had_been_left",
    )
)
BOARDS = T + "games/test_second_halves.py"
WRITING = " ".join(
    f"{T}games/test_writing.py::test_{name}"
    for name in (
        "a_pair_that_fits_earns_everything_and_each_level_ends_what_it_misses",
        "grounded_asks_both_texts_to_be_on_the_post_and_of_their_own_words",
        "transitions_count_in_the_second_text_or_in_both_as_the_task_says",
        "lengths_are_in_characters_or_words_and_unique_words_with_or_without_stop_words",
        "consistency_is_shared_content_over_all_content_whichever_text_is_longer",
    )
)
EXTERNAL = T + "games/test_external.py::test_"
PAIR = EXTERNAL + "a_solver_is_paid_its_own_answer_a_verifier_what_it_improved_and_both_the_end"
RIVALS = EXTERNAL + "each_seats_result_and_invalid_moves_are_its_own"
MATHS = " ".join(
    f"{T}games/test_maths_debate.py::test_{name}"
    for name in (
        "each_of_two_is_paid_for_its_own_answer_and_the_team_for_the_final_one",
        "a_judges_verdict_is_the_teams_and_its_own_and_no_reasoners",
    )
)

FAULTS = {
    (R + "minibatches.py", EPOCHS): {
        "every epoch has the same minibatches": ("np.random.default_rng((seed, epoch))", "np.random.default_rng((seed, 0))"),
        "minibatches are blocks and a rest": (
            "np.array_split(order, steps)", "np.split(order, range(minibatch, len(order), minibatch))"
        ),
        "one epoch is made": ("for epoch in range(epochs if prompts else 0):", "for epoch in range(min(epochs, 1) if prompts else 0):"),
        "with epochs fewer updates are told": ('"updates": len(minibatches)', '"updates": len(minibatches) // 2'),
    },
    (R + "steps.py", GAP): {
        "the gap is read after the steps before": ("jnp.abs(old_log_probs - sampled_log_probs)", "jnp.abs(log_probs - sampled_log_probs)"),
    },
    (R + "update.py", T + "training/test_old_policy.py"): {
        "the first step's old policy is the sampler": (
            'jnp.where(scalars.pop("first_step"), new,', 'jnp.where(scalars.pop("first_step"), by_sample(rows, rows.log_probs),'
        ),
        "every step is its own old policy": ('jnp.where(scalars.pop("first_step"), new,', 'jnp.where(scalars.pop("first_step") | True, new,'),
        "the second minibatch's scores are those of all": ("old[number - 1]", "old[0]"),
    },
    (R + "steps.py", T + "training/test_update.py"): {
        "figures are means of the steps' means": (
            "count = sum(step[name][1] for step in metrics)", "count = metrics[0][name][1] * len(metrics)"
        ),
    },
    (R + "update.py", T + "training/test_update.py"): {
        "each minibatch's tied groups count in full": ("share = units(kept) * self.options.epochs / len(minibatches)", "share = units(kept)"),
    },
    (R + "team.py", MEANS): {
        "the running mean follows advantages": ("returns = advantages.estimates + table.running", "returns = advantages.estimates + 0 * table.running"),
        "rows that do not count move the running mean": ("decay=recipe.ema_decay, where=table.where", "decay=recipe.ema_decay", f"{TOGETHER}::test_running_means_leave_out_rows_that_do_not_count"),
        "rows that do not count are samples": ("int(np.sum(table.where & plays[name][table.agent]))", "int(np.sum(plays[name][table.agent]))", STEERED),
        "what is taken off is the first role's": ("running=self.running[table.agent]", "running=self.running[0 * table.agent]"),
    },
    (R + "team.py", f"{TOGETHER}::test_permuted_rewards_stay_with_their_role_and_among_the_rows_that_count"): {
        "rewards are dealt to rows that do not count": ("np.flatnonzero((table.agent == agent) & table.where)", "np.flatnonzero(table.agent == agent)"),
        "roles get each other's rewards": ("for agent in np.unique(table.agent):\n            samples = np.flatnonzero((table.agent == agent) & table.where)", "for agent in (0,):\n            samples = np.flatnonzero(table.where)"),
        "local pay is not dealt": ('for name in ("team", "local", "team_where", "credit")', 'for name in ("team", "team_where", "credit")'),
        "who was paid is not dealt": ('for name in ("team", "local", "team_where", "credit")', 'for name in ("team", "local", "credit")'),
        "every step deals alike": ("np.random.default_rng((self.seed, step, 1))", "np.random.default_rng((self.seed, 1))"),
    },
    (R + "team.py", f"{TOGETHER}::test_each_models_staleness_counts_its_own_updates"): {
        "the staleness is any model's": ("staleness(batch, plays[name], versions[name])", "staleness(batch, plays[name], max(one.version for one in self.learners.values()))"),
    },
    (R + "oversample.py", RESUME): {
        "a resume forgets what the last step had been left": ("{str(step): known, str(step + 1): left}", "{str(step + 1): left}"),
        "a resumed step forgets what it leaves": ("{str(step): known, str(step + 1): left}", "{str(step): known, str(step + 1): known}"),
        "what is played again comes on top": ("range(first + len(known), first", "range(first, first"),
        "what was late is begun twice": ("again = [] if late else known", "again = known"),
    },
    (W + "samples.py", SAMPLES): {
        "seats with other histories are one group": ("call.items[:-1], call.parents, call.prompt_ids", "call.items[:-1], call.prompt_ids"),
        "seats of other outer items are one group": ("call.turn, call.items[:-1], call.parents", "call.turn, call.parents"),
        "seats of other plays are one group": ("return episode.play, call.node", "return 0, call.node"),
        "seats of other roles are one group": ("episode.play, call.node, call.turn", "episode.play, call.turn"),
        "candidates beside their trajectory share it": ("first[call.id] = (call, call.id, len(candidate.calls) - 1)", "first[call.id] = (call, candidate.branch, len(candidate.calls) - 1)"),
        "a candidate is the first call": ("first[call.id] = (call, call.id, len(candidate.calls) - 1)", "first[call.id] = (call, call.id, 0)"),
        "one missing score leaves out all": ("elif call.id in unscored:", "elif unscored:"),
        "what one way paid is not the team's": ("any(pay.team_paid for pay in all_earned)", "all_earned[0].team_paid"),
        "parts of a mean are sums": ("name: float(np.mean([pay.components.get", "name: float(np.sum([pay.components.get"),
    },
    (M + "evaluation/outcomes.py", T + "evaluation/test_outcomes.py"): {
        "a comparison knows no clusters": ("groups.setdefault(alike[task] or task, [])", "groups.setdefault(task, [])"),
        "a comparison's tasks without a cluster are one": ("groups.setdefault(alike[task] or task, [])", "groups.setdefault(alike[task], [])"),
        "an interval's tasks without a cluster are one": ("outcome.cluster or outcome.task for outcome", "outcome.cluster for outcome"),
        "the best of several reads the headline alone": (".append(measured[metric])", ".append(outcome.score)"),
        "aborted plays may be the best": ("for outcome in self.played:\n            measured", "for outcome in self.outcomes:\n            measured"),
    },
    (G + "kit/board_pay.py", BOARDS): {
        "outcome pays what cannot be read": ("(well_formed & solved).astype(jnp.float32), local", "solved.astype(jnp.float32), local"),
        "an unreadable list is illegal too": ("-LEGAL * (well_formed & ~legal)", "-LEGAL * ~legal"),
    },
    (G + "kit/board.py", BOARDS): {
        "boards: the Tool's claim is the Planner's": ("claims = state.claims.at[index]", "claims = state.claims.at[-1]"),
    },
    (G + "sokoban/game.py", BOARDS): {
        "sokoban: safe pays the Tool for the Planner's pushes": (
            "jnp.maximum(before.claims[self.index(role)], self._worth(room, before.place))",
            "before.claims[self.index(role)]",
        ),
        "sokoban: safe pays a proposal again": (
            "jnp.maximum(before.claims[self.index(role)], self._worth(room, before.place))",
            "self._worth(room, before.place)",
        ),
        "sokoban: both boxes must be lost": ("deadlock=jnp.any(off_goal &", "deadlock=jnp.all(off_goal &"),
        "sokoban: the Tool is paid as the Planner": ('executes=role != "tool"', "executes=True"),
        "sokoban: one box on its goal is all": ("on_goals=jnp.mean(1.0 - off_goal)", "on_goals=jnp.max(1.0 - off_goal)"),
    },
    (G + "sokoban/rewards.py", BOARDS): {
        "the gain is not a share": ("/ (1.0 - facts.initial_worth)", "/ 1.0"),
    },
    (G + "sudoku/game.py", BOARDS): {
        "sudoku: safe pays the Tool for the Planner's fills": ("jnp.maximum(_worth(puzzle, claim), _worth(puzzle, before.grid))", "_worth(puzzle, claim)"),
        "sudoku: safe pays a proposal again": ("jnp.maximum(_worth(puzzle, claim), _worth(puzzle, before.grid))", "_worth(puzzle, before.grid)"),
        "sudoku: solving is paid in every proposal": ("previous_solved=jnp.all(claim == puzzle.solution)", "previous_solved=jnp.all(before.grid == puzzle.solution)"),
        "sudoku: the Tool is paid as the Planner": ('executes=role != "tool"', "executes=True"),
    },
    (G + "plan_path/game.py", BOARDS): {
        "plan-path: the Tool is paid as the Planner": ('executes=role != "tool"', "executes=True"),
        "plan-path: the claim is the first role's": ("previous_claim=before.claims[index]", "previous_claim=before.claims[0]"),
    },
    (G + "writing/reward.py", WRITING): {
        "one grounded text is enough for both": ("grounding = min(grounding_of", "grounding = max(grounding_of"),
        "the first text alone must not be copied": ("any(copies(part, post_words, constants.copied) for part in words)", "copies(words[0], post_words, constants.copied)"),
        "the second text alone must not be copied": ("any(copies(part, post_words, constants.copied) for part in words)", "copies(words[1], post_words, constants.copied)"),
        "one text of its own length is enough": ("if any(not low <= len(text.split", "if all(not low <= len(text.split"),
        "transitions of the second text alone": ('texts = (1,) if constants.where == "second" else (0, 1)', "texts = (1,)"),
        "transitions of both texts always": ('texts = (1,) if constants.where == "second" else (0, 1)', "texts = (0, 1)"),
        "the ratio is upside down": ("constants.length.share(sizes[1] / sizes[0]) if sizes[0]", "constants.length.share(sizes[0] / sizes[1]) if sizes[1]"),
        "the length is always in characters": ('if constants.length_in == "characters" else', "if True else"),
        "unique words count stop words always": ("if constants.stop_words else content", "if True else content"),
        "likeness is a share of the first": ("len(content[0] & content[1]) / len(union)", "len(content[0] & content[1]) / len(content[0])"),
    },
    (G + "matrix/game.py", T + "games/test_matrix.py"): {
        "both are paid the first one's part": ("self._paid(after, parts[i])", "self._paid(after, parts[0])"),
        "one legal action is enough": ("legal = jnp.all(state.actions >= 0)", "legal = jnp.any(state.actions >= 0)"),
    },
    (G + "joint_letter/game.py", T + "games/test_joint_letter.py"): {
        "one echo pays for two": ('"echo": PART * jnp.sum(echo)', '"echo": 2 * PART * jnp.any(echo)'),
        "the form of the first is everybody's": ("parts, well[self._index(role)])", "parts, well[0])"),
        "one letter pays for two": ('"letter": LETTER * jnp.sum(', '"letter": 2 * LETTER * jnp.any('),
    },
    (G + "external/reasoning_gym.py", EXTERNAL + "the_last_number_of_a_sentence_is_the_answer"): {
        "the first number is the answer": ('return numbers[-1].replace(",", "")', 'return numbers[0].replace(",", "")'),
        "a number keeps its commas": ('return numbers[-1].replace(",", "")', "return numbers[-1]"),
        "a negative number loses its sign": ("(?<![\\w.])-?(?:[0-9]+", "(?<![\\w.])(?:[0-9]+"),
        "only ASCII has a minus": ("text.translate(_DASHES)", "text"),
        "a number has no exponent": ("(?:[eE][-+]?[0-9]{1,3}(?!\\w))?", ""),
    },
    (G + "external/reasoning_gym.py", PAIR): {
        "the solver is paid the final answer": ("_scores(path)[0], (\"solver\",), name=\"own\"", "_scores(path)[1], (\"solver\",), name=\"own\""),
        "the verifier is paid the whole score": ("_scores(path)[1] - _scores(path)[0], (\"verifier\",)", "_scores(path)[1], (\"verifier\",)"),
        "the team is paid the draft": ("lambda path: path.fields[\"score\"], name=\"score\"", "lambda path: _scores(path)[0], name=\"score\""),
        "the draft's score is the last": ('metrics["draft_score"] = lambda path: _scores(path)[0]', 'metrics["draft_score"] = lambda path: _scores(path)[-1]'),
    },
    (G + "search/m_ask.py", T + "games/test_search_workflows.py"): {
        "the plan is paid the last answer": ('score(path.by("plan")[0].writes["plan_answer"], path)', 'score(path.by("answer")[-1].writes["answer"], path)'),
        "the first gain is over nothing": (', name="f1_gain", start=planned)', ', name="f1_gain")'),
        "an update is paid nothing": ('delta(turns, ("search", "summary", "update")', 'delta(turns, ("search", "summary")'),
        "every end is exempt": ("exempt=None if options.penalise_end_format else ends", "exempt=ends"),
    },
    (G + "coding/team.py", T + "games/test_coding_workflow.py"): {
        "the planner is not paid": ('delta("pass_rate", ("planner", "coder")', 'delta("pass_rate", ("coder",)'),
        "the reflector is paid its own turn": ('delayed("pass_rate", ("reflector",)', 'delta("pass_rate", ("reflector",)'),
    },
    (G + "coding/aux_team.py", T + "games/test_aux_team.py"): {
        "the main function is paid for any form": ('MAIN_SHARE * judge.parts("", call.writes["main_code"], entry).main', 'MAIN_SHARE * judge.parts("", call.writes["main_code"], entry).parses'),
        "the helper has the main's share": ('AUX_SHARE * judge.parts(call.writes["aux_code"]', 'MAIN_SHARE * judge.parts(call.writes["aux_code"]'),
    },
    (G + "maths/debate.py", MATHS): {
        "the judge is paid nothing of its own": ("answer_parts(form, own[role])", 'answer_parts(form, "" if role == "judge" else own[role])'),
        "the user is paid for the reasoner": ('beside("ran", 0.0), beside("user_correct", 0.0)', 'beside("ran", 0.0), beside("reasoner_correct", 0.0)'),
        "safe pays a program that ran nothing": ('return {"ran": 0.1 * ran, "step": 0.9 * right}', 'return {"ran": 0.0 * ran, "step": 0.9 * right}'),
        "the judge's verdict is not the team's": ('if roles[-1] == "judge" else "reasoner"]', 'if False else "reasoner"]'),
    },
    (G + "coding/debate.py", T + "games/test_code_debate.py"): {
        "the tester faces the program to come": ('beside("golden", 0.0, call.role != "coder")', 'beside("golden", 0.0, False)', T + "workflows/test_forms.py"),
        "a right test is paid nothing": ('"right": 0.1 * right, "kills"', '"right": 0.0 * right, "kills"'),
        "printed: a valid test is paid nothing": ('return {"valid": 0.2 * valid, "right": 0.8 * right}', 'return {"valid": 0.0 * valid, "right": 0.8 * right}'),
    },
    (G + "programs.py", T + "games/test_plan_path_text.py"): {
        "the Tool's claim is everybody's": ("claim = min(claims.get(call.role, initial), answer[\"before\"])", "claim = min([initial, *claims.values(), answer[\"before\"]])"),
        "safe pays for what another did": ("claim = min(claims.get(call.role, initial), answer[\"before\"])", "claim = claims.get(call.role, initial)"),
        "both roles are paid for execution": ('kind = "proposes" if proposes else "executes"', 'kind = "executes"'),
        "what was made pays both": ("(proposed if call.role == \"tool\" else made)[call.turn]", "made[call.turn]"),
    },
    (G + "external/textarena.py", RIVALS): {
        "every seat has the first one's result": ('broadcast(lambda path, seat=seat: path.fields["paid"][seat], (name,)', 'broadcast(lambda path, seat=seat: path.fields["paid"][0], (name,)'),
        "results are told of the first seat": ('metrics[f"result_{name}"] = lambda path, seat=seat: path.fields["paid"][seat]', 'metrics[f"result_{name}"] = lambda path, seat=seat: path.fields["paid"][0]'),
        "invalid moves are the first seat's": ('path.fields["invalid"].count(seat)', 'path.fields["invalid"].count(0)'),
    },
    (W + "forms.py", T + "workflows/test_forms.py"): {
        "seats of a role improve on each other": ("speaker = call.role, call.items", "speaker = call.role, ()"),
        "outcome pays the result": ("float(solved[call.role](call,", "float(team[call.role](call,"),
        "a role is improved on by another": ("speaker = call.role, call.items", "speaker = \"\", call.items"),
    },
}  # fmt: skip
