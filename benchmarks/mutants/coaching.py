"""Faults in what a coach that trains is paid for, and in the set of injections. Each was seen red when it was written."""

C, T = "marl_llm/coaching/", "tests/coaching/"
TRAINED = "tests/experiments/test_trained_coach.py"

FAULTS = {
    (C + "coach.py", T + "test_backward.py"): {
        "a contribution is capped as a score is": (" or view.residual is not None else self.guide.cap(view)", " else self.guide.cap(view)"),
    },
    (C + "backward.py", T + "test_backward.py"): {
        "who waits for a play is told of no error": ("play.done.set_exception(error)", "play.done.cancel()"),
        "the clocks of a play run on in a queue": ("with play.clock.shared():", "if True:"),
    },
    (C + "figures.py", T + "test_coach_figures.py"): {
        "candidates that were not picked are not counted": ("(*episode.trajectories, *episode.candidates)", "episode.trajectories"),
        "an action counts once per path": ("verdicts.setdefault(call.id, ", "verdicts.setdefault((path.branch, call.id), "),
        "an outcome is that of one path": ("outcomes[call.id].append(outcome)", "outcomes[call.id] = [outcome]"),
    },
    ("marl_llm/training/corrections.py", T + "test_corrections.py"): {
        "candidates that were not picked are not corrected": ("(*episode.trajectories, *episode.candidates)", "episode.trajectories"),
    },
    (C + "pairs.py", T + "test_pairs.py"): {
        "equal scores are an order": ("sum(score < other for other in better)", "sum(score <= other for other in better)"),
        "actions that look alike are compared": (" if actions[i].brief != action.brief]", "]"),
    },
    (C + "injections.py", T + "test_injections.py"): {
        "a lower score counts as raised": ("sum(b > a for a, b in known)", "sum(b != a for a, b in known)"),
        "the text is left out": ('response = f"{call.text}\\n{text}"', "response = call.text"),
    },
    (C + "history.py", T + "test_history.py"): {
        "a restored history holds any values": ('check_number(x, f"history.{name}")', "x"),
    },
    (C + "answers.py", T + "test_injections.py"): {
        "labels stand whole in what is quoted": (
            "return _LABEL.sub(lambda match: MARK.join(part for part in match.groups() if part), text)", "return text"
        ),
    },
    ("marl_llm/training/team.py", TRAINED): {
        "a coach that trains is in no checkpoint": (
            "self.models() | ({} if self.trained_coach is None else {COACH_POLICY: self.trained_coach.policy})", "self.models()"
        ),
    },
    ("marl_llm/training/trained_coach.py", TRAINED): {
        "a restored coach answers as it began": (
            'state["version"], "trained.coach.version"))\n        self._renew()', 'state["version"], "trained.coach.version"))'
        ),
        "a restored coach has any version": ('check_count(state["version"], "trained.coach.version")', 'state["version"]'),
        "its reward is upside down": ("rewards += [share_right(score, better, worse)", "rewards += [share_right(score, worse, better)"),
        "it answers as it began": ("RECIPE.kl_coef)\n        self._renew()", "RECIPE.kl_coef)"),
        "its drift has a sign": ("float(np.mean(np.abs(gaps)))", "float(np.mean(gaps))"),
    },
    ("marl_llm/serving/local.py", TRAINED): {
        "replies of old parameters are kept": ('backend.identity = f"{identity}+{version}"', "pass"),
    },
}  # fmt: skip
