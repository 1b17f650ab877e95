"""Small faults over all rooms that were written without a look at the tests: bounds, a field that is not passed on, keys, second halves."""

FAULTS = {
    ("marl_llm/evaluation/intervals.py", "tests/evaluation/test_intervals.py tests/evaluation/test_outcomes.py"): {
        "a difference's mean counts once among its squares": ("+ groups * mean**2\n", "+ mean**2\n"),
        "the high end is Wilson's alone": ("max(high for _, high in ends)", "ends[0][1]"),
    },
    ("marl_llm/coaching/pairs.py", "tests/coaching/test_pairs.py"): {
        "a tie with a worse play counts as right": ("sum(score > other for other in worse)", "sum(score >= other for other in worse)"),
        "equal briefs make a pair": (" if actions[i].brief != action.brief]", "]"),
    },
    ("marl_llm/workflows/splits.py", "tests/workflows/test_splits.py"): {
        "a listed task has its place in place of its number": ("in enumerate(drawn, first)]", "in enumerate(drawn)]"),
        "a listed task has no kind": ("dataclasses.replace(task, number=number, split=split)", "Task(number, task.fields, task.hidden, split)"),
        "a split's share begins at nothing": ("        place -= share\n", ""),
        "the last fifth is rounded up": ("min(HOLD_OUT, len(rows) // 5)", "min(HOLD_OUT, -(-len(rows) // 5))"),
    },
    ("marl_llm/viewing/summary.py", "tests/viewing/test_report.py"): {
        "the first length that shares the last row has its own": ('row["turns"] >= lengths', 'row["turns"] > lengths'),
        "a play is paid what its first role is": ('sum(r["paid"].values())', 'next(iter(r["paid"].values()))'),
    },
    ("marl_llm/reporting/files.py", "tests/reporting/test_metrics_writer.py tests/reporting/test_episodes.py"): {
        "a torn last line hides the faults before it": ("elif not torn or file.tell() < size:", "elif not torn:"),
    },
    ("marl_llm/text/streaming.py", "tests/text/test_huggingface.py"): {
        "all broken bytes at the end are held": ("min(tail, LONGEST_PART)", "tail"),
        "half a character stands before the next": ("end in ends if BROKEN not in tokenizer.decode(end)", "end in ends"),
        "many tokens are read as one": ("    for i in ids[:-1]:\n", "    for i in ():\n"),
    },
    ("marl_llm/tools/verdicts.py", "tests/tools/test_verdicts.py"): {
        "one result more than its size": ("len(self._known) >= self._size", "len(self._known) > self._size"),
        "who asks behind a cancelled judge gets that judge": (
            "                _forget(running, key, judging)  # at once: whoever asks next gets a judge that goes on\n", "",
        ),
        "keys depend on where parts lie in memory": ("pickler.fast = True", "pickler.fast = False"),
    },
    ("marl_llm/tools/_chat_store.py", "tests/tools/test_chat_client.py"): {
        "the last reply under a key stays": ("INSERT OR IGNORE", "INSERT OR REPLACE"),
        "the cap itself cannot be spent": ("self._spent() + usd > cap_usd", "self._spent() + usd >= cap_usd"),
    },
    ("marl_llm/games/kit/board_pay.py", "tests/games/test_sudoku.py tests/games/test_sokoban.py"): {
        "what cannot be read is charged as illegal too": ("-LEGAL * (well_formed & ~legal)", "-LEGAL * ~legal"),
    },
    ("marl_llm/games/sudoku/rewards.py", "tests/games/test_sudoku.py"): {
        "the Tool's sanity is its execution": ("MAIN * facts.consistent}", "MAIN * facts.into_blanks}"),
    },
    ("marl_llm/games/coding/schemes.py", "tests/games/test_aux_source.py tests/games/test_aux_team.py"): {
        "a redefined aux counts as used": ("if seen.redefined or not (seen", "if not (seen"),
    },
    ("marl_llm/viewing/seat.py", "tests/viewing/test_seat.py"): {
        "an answer to an earlier turn is heard": ('parsed["number"] != self._number', 'parsed["number"] > self._number'),
    },
    ("marl_llm/algorithms/returns.py", "tests/algorithms/test_returns.py tests/algorithms/test_dawdling.py"): {
        "an actor's own vote is its last alone": ("(votes - last + vote)", "votes"),
        "the trace is not discounted": ("gamma * gae_lambda * next_advantage", "gae_lambda * next_advantage"),
    },
    ("marl_llm/sampling/bursts.py", "tests/sampling/test_bursts.py"): {
        "one quiet turn ends a burst": ("(len(burst) > before or not quiet)", "len(burst) > before"),
        "a burst that keeps growing never ends": ("len(burst) == before, left - 1)", "len(burst) == before, left)"),
    },
    ("marl_llm/sampling/token_sampling.py", "tests/sampling/test_token_sampling.py"): {
        "ties at the border are rounded down": ("wanted = jnp.ceil(", "wanted = jnp.floor("),
        "a nucleus of 1 is rounded": ("keep &= nucleus | (settings.top_p >= 1.0)[..., None]", "keep &= nucleus"),
    },
    ("marl_llm/serving/sessions.py", "tests/serving/test_sessions.py"): {
        "tools are no part of a conversation": ("json.dumps([model, list(tools)], sort_keys=True)", "json.dumps([model], sort_keys=True)"),
        "the whole prompt counts as forked": ('relayed if forks else 0', 'len(prompt) if forks else 0'),
        "one reply fewer is kept": ("while self._replies > MOST_REPLIES:", "while self._replies >= MOST_REPLIES:"),
        "a developer's message is no system's": ('"system" if message["role"] == "developer" else message["role"]', 'message["role"]'),
    },
    ("marl_llm/serving/certain.py", "tests/serving/test_serving.py"): {
        "newlines behind thinking are taken of the first part alone": ("self._strips_newlines = not text", "self._strips_newlines = False"),
        "all but the last character of a mark is said": ("for n in range(1, len(mark))", "for n in range(1, len(mark) - 1)"),
    },
    ("marl_llm/checking/prolonging.py", "tests/checking/test_prolonging.py"): {
        "plays that score nothing are compared": ("0 < b.score <=", "0 <= b.score <="),
        "as many pairs as suffice are too few": ("if len(pairs) >= FEWEST:", "if len(pairs) > FEWEST:"),
    },
    ("marl_llm/training/minibatches.py", "tests/training/test_packing.py tests/training/test_update.py"): {
        "one prompt of two tasks is one": ("(int(table.instance[i]), int(tokens.prompt[i]))", "(0, int(tokens.prompt[i]))"),
    },
}  # fmt: skip
