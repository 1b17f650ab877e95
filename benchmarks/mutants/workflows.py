"""Faults in teams on the host: play, pay, samples, metrics, prompts, parsers."""

W, T = "marl_llm/workflows/", "tests/workflows/"

FAULTS = {
    (W + "play.py", T + "test_workflow_tree.py " + T + "test_workflow_controller.py"): {
        "the greedy pick reads the first call's pay": (
            "call = next(call for call in trajectory.calls if call.request_number == number)", "call = trajectory.calls[0]"
        ),
        "the greedy pick takes the worst": ("return pays.index(max(pays))", "return pays.index(min(pays))"),
        "the greedy pick forgets alpha": ("float(of_team * team + of_local * local)", "float(team + of_local * local)"),
        "the greedy pick adds what the recipe leaves out": ("float(of_team * team + of_local * local)", "float(of_team * team + local)"),
        "until is asked before the first round": ("(number and loop.until and self._ask(", "(loop.until and self._ask("),
        "a loop makes one round more": ("if number == loop.at_most or (", "if number == loop.at_most + 1 or ("),
        "a stop leaves all loops": (
            "state = state._replace(todo=None if rest is None else rest[2])", "state = state._replace(todo=None)", T + "test_workflow_controller.py"
        ),
        "a round without a speaker is a turn": ("if state.spoken:\n            state = state._replace(turn", "if True:\n            state = state._replace(turn"),
        "each item runs at the same place": ("base + i * step_of(node.body)), i, {node.item", "base), i, {node.item"),
        "each takes more than it may": ("enumerate(items[: node.at_most])", "enumerate(items)"),
        "an error of the infrastructure outweighs the program's": (
            "key=lambda error: isinstance(error, PlayFailure))", "key=lambda error: not isinstance(error, PlayFailure))"
        ),
    },
    (W + "coroutines.py", T + "test_hanging_tools.py"): {
        "async tools have no limit": ("asyncio.Semaphore(self._limit)", "asyncio.Semaphore(1 << 20)"),
        "async calls left behind have no bound": ("if line.left >= self._spare:", "if False:"),
        "a call that cancels itself cancels its play": ("if task.cancelled():\n                    raise", "if False:\n                    raise"),
        "late async calls are not counted": ("self._late[tool] += 1", "self._late[tool] += 0"),
        "a late call is not left behind": ("await asyncio.wait({task}, timeout=GRACE_S)", "await asyncio.wait({task}, timeout=3600)"),
    },
    (W + "samples.py", T + "test_workflow_rewards.py " + T + "test_workflow_assignment.py " + T + "test_workflow_tree.py"): {
        "void episodes are trained": ('excluded = "void"', 'excluded = ""'),
        "models off the schedule are trained": ("elif call.model not in trains:", "elif False:"),
        "a call before a fork is paid by its first way": ("_mean(pays[:1] if rollout.pick else pays)", "_mean(pays[:1])"),
        "broken answers are imitated": ("and (s.call.legal or not legal)", ""),
        "teams of different tasks are one group": ("env=(number, _group(", "env=(0, _group("),
        "seats with other prompts are one group": ("call.parents, call.prompt_ids", "call.parents", T + "test_candidates_when_made.py"),
        "raw and sampled log-probs are exchanged": ("call.log_probs if raw else call.sampled_log_probs", "call.sampled_log_probs if raw else call.log_probs", T + "test_workflow_rewards.py " + T + "test_workflow_engine.py"),
    },
    (W + "rewards.py", T + "test_workflow_rewards.py"): {
        "a broken format is free": ("0.0 if call.legal else -weight", "0.0"),
        "an improvement is paid from the start again": ("            before = found[turn]\n", ""),
        "the delayed pay is one turn late": ("found[after] - found[turn] for", "found[turn] - found[after] for"),
        "team and local are exchanged": ("team, local = (award.value, 0.0) if award.team else", "team, local = (0.0, award.value) if award.team else"),
        "NaN is paid": ("if not math.isfinite(value):", "if False:"),
        "a broadcast reaches all roles": ("for call in _calls(trajectory, roles)]\n\n    return _described(reward, f\"broadcast", "for call in _calls(trajectory, None)]\n\n    return _described(reward, f\"broadcast"),
    },
    (W + "metrics.py", T + "test_workflow_rewards.py " + T + "test_workflow_controller.py"): {
        "void episodes have a vote": ("if not episode.void else ()", ""),
        "the void share is the played one": ('"void_share": 1.0 - len(played)', '"void_share": len(played)'),
    },
    (W + "answers.py", T + "test_workflow_answers.py"): {
        "articles count": ('_ARTICLES.sub(" ", text)', "text"),
        "F1 is precision": ("return 2 * precision * recall / (precision + recall)", "return precision"),
        "repeated words count each time": (
            "sum((collections.Counter(said) & collections.Counter(wanted)).values())", "sum(word in wanted for word in said)"
        ),
        "any accepted answer but the best": ("return max(_f1(", "return min(_f1("),
    },
    (W + "speech.py", T + "test_workflow_roles.py " + T + "test_workflow_controller.py"): {
        "too much is trimmed": ("low, high, best = 1, len(value), None", "low, high, best = len(value) // 2, len(value), None"),
        "an unfinished reply loses its last token": ("ids[:-1] if finished else ids", "ids[:-1]"),
    },
    (W + "parsers.py", T + "test_workflow_roles.py"): {
        "one word too many passes": (
            "if max_words is not None and len(text.split()) > max_words:", "if max_words is not None and len(text.split()) > max_words + 1:"
        ),
        "unknown keys pass": ("if extra := [key for key in found if key not in fields]:", "if extra := []:"),
        "a text may occur twice": ("if distinct and len(set(found))", "if False and len(set(found))"),
        "a second block passes": ("if len(blocks) != 1:", "if not blocks:"),
    },
}
