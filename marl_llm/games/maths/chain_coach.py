"""What a coach knows of `chain_maths`: the rubric that scores an action, and the short text that a small coach reads in its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.games.maths.chain import FILLER, POINTS, Chain, chain_answer, filler_of, read_chain, read_problem, unfilled
from marl_llm.games.maths.sums import spaced
from marl_llm.workflows import RoleCall


def chain_rubric(
    information: str = "full", filler_price: float | int = 0.25, phase_at: float | int = 0.0
) -> Callable[[Any], tuple[float, bool | None, str]]:
    """(value in [0, 10], whether the answer is right, reason) of an action, from what the environment knows of it and no hidden field.

    | role | 10 to 0 |
    |---|---|
    | solver | 8 its expression is the problem's; 5 another of the same value; 2 wrong |
    | executor | 9 its program printed what its input asks for, or it says so behind one; 7 it says so without a program; 3 its program is wrong; 2 its words are; one less for each time that the same program has run |
    | verifier | 10 right, in digits or by pointing; 6 wrong, but taken from what it read, where the right answer was not; 1 wrong otherwise |

    An illegal action has 0, and one that was asked nothing, because the solver said nothing that can be read, 6. What the executor's input asks for is the value of the solver's expression, and with full information that of
    the problem too. `filler_price` is taken off for each piece of filler, once the run's rolling success (`view.history`) has reached `phase_at`:
    first the task is to be done, then well (MAPPA, E.4).
    """  # noqa: E501

    def score(view: Any) -> tuple[float, bool | None, str]:
        gold, writes = read_problem(view.task["problem"]), view.call.writes
        right = answered(view) == str(gold.value) if view.call.role == "verifier" else None
        if not view.call.legal:
            return 0.0, right, f"illegal: {view.call.illegal}"
        judge = {"solver": _score_solver, "executor": _score_executor, "verifier": _score_verifier}[view.call.role]
        value, why = judge(view, gold, writes, information)
        price = filler_price if view.history.get("success", 0.0) >= phase_at else 0.0
        return max(0.0, value - price * filler_of(view.call.text)), right, why

    return score


def _score_solver(view: Any, gold: Chain, writes: Mapping[str, Any], information: str) -> tuple[float, str]:
    if writes["solution"] == gold.expression:
        return 8.0, "its expression is the problem's"
    return (5.0, "the same value by another way") if writes["solved"] == str(gold.value) else (2.0, "a wrong expression")


def _score_executor(view: Any, gold: Chain, writes: Mapping[str, Any], information: str) -> tuple[float, str]:
    expected = {view.before["solved"]} - {""} | ({str(gold.value)} if information == "full" else set())
    if not expected:
        return 6.0, "it was asked nothing"
    before = [call.writes["code"] for call in view.own_earlier if call.writes.get("code")]
    if not writes["code"]:
        if writes["executed"] not in expected:
            return 2.0, "wrong words"
        return (9.0, "right words behind a program") if before else (7.0, "right words without a program")
    printed = [use.writes["printed"] for use in view.observations if use.writes.get("printed")]
    repeated = before.count(writes["code"])
    right = bool(printed) and printed[-1] in expected
    return (9.0 if right else 3.0) - repeated, ("a right program" if right else "a wrong program") + f", run {repeated} times before"


def _score_verifier(view: Any, gold: Chain, writes: Mapping[str, Any], information: str) -> tuple[float, str]:
    read = {view.before["printed"], view.before["executed"]} | ({view.before["claim"]} if information == "full" else set())
    answer = answered(view)
    if answer == str(gold.value):
        return 10.0, "right"
    if str(gold.value) in read:
        return 1.0, "wrong, though it read the answer"
    return (6.0, "wrong, as all that it read") if answer in read - {""} else (1.0, "wrong, and not what it read")


def answered(view: Any) -> str:
    """The number that a verifier's action gave, in digits or by pointing; "" where it gave none."""
    return chain_answer(view.call.writes["answer"], *(view.before[field] for field in POINTS.values()))


# ---- what an action changed


def chain_contribution(view: Any) -> float:
    """The play's result minus that with the teacher's action in place of this one (MAPPA, F, by counterfactual): −1, 0 or 1.

    The teacher's solver is right, its executor runs what it was given, its verifier takes what was printed, else said, else claimed. Later
    actions are replayed as they were, but what they had copied follows what they copied it from: a program that was the solver's
    expression, words that were its value or the program's, digits that were one of the values that the verifier read.
    """
    calls = [event for event in (*view.earlier, view.call, *view.later) if isinstance(event, RoleCall)]
    return float(view.result) - float(_replayed(calls, read_problem(view.task["problem"]), view.call.id))


def _replayed(calls: Sequence[Any], gold: Chain, taught: str) -> bool:
    """Whether a play is right in which the teacher does the action `taught`."""
    was, now = dict.fromkeys(POINTS, ""), dict.fromkeys(POINTS, "")  # values of printed, said and claims, as they were and as they become
    solved: tuple[Chain | None, Chain | None] = (None, None)
    answer = ""
    for call in calls:
        writes, own = call.writes, call.id == taught
        if call.role == "solver":
            written = read_chain(writes["solution"].split()) if writes["solution"] else None
            solved = (written, gold if own else written)
            was["claims"], now["claims"] = writes["claim"], str(gold.value) if own else writes["claim"]
        elif call.role == "executor":
            program = read_chain(unfilled(call.text)[2:-1]) if writes["code"] else None
            copied = {solved[0] and str(solved[0].value): solved[1] and str(solved[1].value), was["printed"]: now["printed"]}
            words = writes["executed"]
            follows = copied.get(words, words) if words else ""
            was["said"], now["said"] = words, "" if own else follows
            if program is not None:
                was["printed"] = str(program.value)
            if own or program is not None:
                ran = (solved[1] or gold) if own else solved[1] if program == solved[0] else program
                now["printed"] = str(ran.value)
        elif own:
            answer = now["printed"] or now["said"] or now["claims"]
        else:
            stated = writes["answer"]
            copied = {was[name]: now[name] for name in reversed(POINTS) if was[name]}
            answer = now[stated] if stated in POINTS else copied.get(stated, stated)
    return answer == str(gold.value)


# ---- what a teacher says in an action's place


def chain_better(view: Any) -> str:
    """What the rubric scores highest in an action's place, without filler; "" where the action said just that.

    The solver writes the problem's expression. The executor runs the solver's, or where there is none the problem's, and says what that
    printed. The verifier points to a value that is right, or else to the first that it has.
    """
    gold, fields = read_problem(view.task["problem"]), view.before
    if view.call.role == "solver":
        action = gold.expression
    elif view.call.role == "executor":
        chain = read_chain(fields["solution"].split()) if fields["solution"] else gold
        done = fields["printed"] == str(chain.value)
        action = f"value {spaced(chain.value)}" if done else f"print ( {chain.expression} )"
    else:
        values = {pointer: fields[field] for pointer, field in POINTS.items()}
        right = [pointer for pointer, value in values.items() if value == str(gold.value)]
        action = f"boxed {[*right, *filter(values.get, values), 'printed'][0]}"
    return "" if action == view.call.text else action


# ---- what a small coach reads
NOTHING = "_"


def chain_brief(view: Any) -> str:
    """An action in few words: who acted, its filler, and side by side, one place after the other, the signs and then the numbers of the
    problem, the solver's expression, the program that ran before and that of the action; then which values stand, by names.

        executor well  _ _ _ _ a a _ a  p p _ p b b _ c   solved x claims y said _ printed z

    It lays out what was asked and said and judges nothing: whether two columns agree is for its reader to see. Equal numbers have equal
    names in the order in which they come, the problem's first, and so have equal signs and equal values (of which the solver's expression
    comes first), so that a tiny model need not tell thirty numbers apart. Which value is right is not told. An illegal action is called so,
    and nothing else is said of it.
    """
    role, call = view.call.role, view.call
    if not call.legal:
        return f"{role} illegal"
    problem = _columns(read_problem(view.task["problem"]))
    after = {**dict.fromkeys(("solution", "solved", "claim", "executed", "printed"), ""), **view.after}
    before, now = _programs(view)
    texts = [problem, _columns(read_chain(after["solution"].split()) if after["solution"] else None), before, now]
    while len(texts) > 2 and not texts[-1]:
        texts.pop()
    texts = _named(texts)
    rows = [[column[i] if i < len(column) else (NOTHING, NOTHING) for column in texts] for i in range(max(map(len, texts)))]
    names: dict[str, str] = {}
    values = {"solved": after["solved"], "claims": after["claim"], "said": after["executed"], "printed": after["printed"]}
    if role == "verifier":
        values["boxed"] = answered(view)
    named_values = [f"{name} {names.setdefault(value, 'xyzvw'[len(names)]) if value else NOTHING}" for name, value in values.items()]
    filler = " ".join(FILLER[: filler_of(call.text)])
    table = " ".join(word for row in rows for kind in zip(*row) for word in kind)
    return " ".join(f"{role} {filler} {table} {' '.join(named_values)}".split())


def _columns(chain: Chain | None) -> list[tuple[str, str]]:
    """(sign, number) of each place."""
    words = [] if chain is None else chain.expression.split()
    return list(zip([NOTHING, *words[3::3]], [*words[1:2], *words[4::3]]))


def _named(texts: list[list[tuple[str, str]]]) -> list[list[tuple[str, str]]]:
    """The same columns with names in place of signs and numbers."""
    signs, numbers = {NOTHING: NOTHING}, {}
    for sign, number in itertools.chain.from_iterable(texts):
        signs.setdefault(sign, "-pqrstu"[min(len(signs), 6)])  # there are six
        numbers.setdefault(number, "abcdefghijklmno"[min(len(numbers), 14)])  # a sixteenth shares the last name
    return [[(signs[sign], numbers[number]) for sign, number in column] for column in texts]


def _programs(view: Any) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The last program that ran before the action, and the action's own."""
    ran = [call for call in view.earlier if getattr(call, "writes", {}).get("code") and hasattr(call, "role")]
    own = view.call.writes.get("code")
    return (_program(ran[-1]) if ran else []), (_program(view.call) if own else [])


def _program(call: Any) -> list[tuple[str, str]]:
    return _columns(read_chain(unfilled(call.text)[2:-1]))
