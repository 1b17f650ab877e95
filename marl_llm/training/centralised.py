"""What a centralised critic reads: what all roles have read and said before, in front of the prompt that is answered.

The value of response token t of a call may use, in this order:

    1. of every call of the play that came before, whichever role's: its prompt and its response
    2. of the calls at the same time: their prompts, not their responses
    3. the call's own prompt, and its own response before t

and nothing else, so that no baseline depends on the action that it judges. The policy reads 3 alone: training is centralised, play is not.
That is CoLLM-CC's critic of joint histories (Liu et al., Learning Decentralized LLM Collaboration with Multi-Agent Actor Critic, arXiv
2601.21972). There all agents share one critic; here every model has its own, which starts from the model.

A text that a later prompt begins with, as in a conversation that continues, is read there and not twice. A role that is alone and whose
prompts hold all of its past has the values of a critic that is not centralised. Of a history that is longer than a row the latest ids are
kept: `row_tokens` less the prompt and the role's budget. The drawn response must not decide that, for its length is known at its end only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from marl_llm.algorithms import Recipe, Samples
from marl_llm.text.vocabularies import vocabulary_difference
from marl_llm.training.packing import Tokens
from marl_llm.workflows import Assignment, Environment, Inside, Renderer, Rollout, WorkflowError
from marl_llm.workflows.samples import SampleTable
from marl_llm.workflows.trajectory import Episode, RoleCall

Spoken = tuple[bytes, bytes]  # ids of a prompt and of its response, as the bytes of int32


def joint_history(before: Iterable[Spoken], together: Iterable[bytes], prompt: bytes) -> bytes:
    """The ids that a centralised critic reads in front of a prompt, of whole calls; all as the bytes of int32.

    Args:
      before: of the calls before, in the order of play. together: prompts of the calls at the same time; `prompt` itself may be among them.

    >>> joint_history([(b"Q1..", b"A1.."), (b"Q1..A1..more", b"A2..")], [b"Q3.."], b"Q4..")
    b'Q1..A1..moreA2..Q3..'
    """
    texts: list[bytes] = []
    for prompt_ids, response_ids in (*before, *((prompt_ids, b"") for prompt_ids in together), (prompt, b"")):
        texts = [text for text in texts if not prompt_ids.startswith(text)] + [prompt_ids + response_ids]
    return b"".join(texts[:-1])


def with_histories(tokens: Tokens, table: Samples, histories: Mapping[int, bytes], row_tokens: int) -> tuple[Tokens, dict[str, float]]:
    """Tokens whose `joint` has histories in front of the prompts, and figures.

    Args:
      table: with the role's budget per sample. histories: of the samples that train, by number. row_tokens: of a packed row.

    Figures: history_tokens, the mean length of what is kept; history_cut, the share of histories that were longer than that.
    """
    ids, log_probs = np.asarray(tokens.ids), np.asarray(tokens.log_probs)
    kept, prompts = [], []
    for i, (begin, size) in enumerate(zip(tokens.prompt_at, tokens.prompt_size)):
        history = np.frombuffer(histories.get(i, b""), np.int32)
        room = max(0, row_tokens - int(size) - int(table.budget[i]))
        kept.append(min(len(history), room))
        prompts.append(np.concatenate([history[len(history) - kept[-1] :], ids[begin : begin + size]]).astype(np.int32))
    sizes, numbers = np.asarray([prompt.size for prompt in prompts], np.int32), {}
    joint = dataclasses.replace(
        tokens,
        ids=np.concatenate([*prompts, ids[len(ids) - len(log_probs) :]]).astype(np.int32),
        log_probs=log_probs,
        prompt_at=(np.cumsum(sizes) - sizes).astype(np.int32),
        prompt_size=sizes,
        prompt=np.asarray([numbers.setdefault(prompt.tobytes(), len(numbers)) for prompt in prompts], np.int32),
        shape=None,
        kept_ids=None,
    )
    cut = [kept[i] * ids.itemsize < len(history) for i, history in histories.items()]
    count = max(len(cut), 1)
    figures = {"history_tokens": sum(kept[i] for i in histories) / count, "history_cut": sum(cut) / count}
    return dataclasses.replace(tokens, joint=joint), figures


def of_compiled(stages: Sequence[Sequence[str]], tokens: Tokens, table: Samples, row_tokens: int) -> tuple[Tokens, dict[str, float]]:
    """`with_histories` of a compiled rollout, whose prompts have one response each. `stages`: of the game."""
    ids, first = np.asarray(tokens.ids, np.int32), tokens.ids.shape[0] - tokens.log_probs.shape[0]

    def spoken(i: int) -> Spoken:
        begin, response = tokens.prompt_at[i], first + tokens.response_at[i]
        return ids[begin : begin + tokens.prompt_size[i]].tobytes(), ids[response : response + tokens.size[i]].tobytes()

    stage = np.asarray([number for number, roles in enumerate(stages) for _ in roles])[table.agent]
    time, plays = table.turn * len(stages) + stage, {}
    for i in np.argsort(table.order, kind="stable").tolist():
        plays.setdefault(int(table.trajectory[i]), []).append(i)
    histories = {}
    for i in np.flatnonzero(table.where).tolist():
        play = plays[int(table.trajectory[i])]
        before = [spoken(j) for j in play if time[j] < time[i]]
        together = [spoken(j)[0] for j in play if time[j] == time[i]]
        histories[i] = joint_history(before, together, spoken(i)[0])
    return with_histories(tokens, table, histories, row_tokens)


def of_hosted(
    rollout: Rollout, samples: SampleTable, tokens: Tokens, table: Samples, row_tokens: int
) -> tuple[Tokens, dict[str, float]]:
    """`with_histories` of the samples of a hosted rollout that train. Before a call are the calls that it follows, by the play's graph."""
    by_call = {(e.task.number, call): history for e in rollout.episodes for call, history in _of_episode(e).items()}
    histories = {i: by_call[sample.instance, sample.call.id] for i, sample in enumerate(samples.trained())}
    return with_histories(tokens, table, histories, row_tokens)


def _of_episode(episode: Episode) -> dict[str, bytes]:
    """Call id -> its history. Calls that follow the same events are asked at the same time."""
    events = episode.events()
    calls = [event for event in events if isinstance(event, RoleCall)]
    spoken = {call.id: _spoken(call) for call in calls}
    ancestors: dict[str, set[str]] = {}
    for event in events:  # parents stand before their children
        ancestors[event.id] = set(event.parents).union(*(ancestors.get(parent, ()) for parent in event.parents))
    histories = {}
    for call in calls:
        before = [text for name, text in spoken.items() if name in ancestors[call.id]]
        together = [spoken[e.id][0] for e in calls if e.parents == call.parents]
        histories[call.id] = joint_history(before, together, spoken[call.id][0])
    return histories


def _spoken(call: RoleCall) -> Spoken:
    return np.asarray(call.prompt_ids, np.int32).tobytes(), call.tokens.astype(np.int32).tobytes()


def check_centralised(
    recipe: Recipe, assignment: Assignment, environment: Environment | None = None, renderers: Mapping[str, Renderer] | None = None
) -> None:
    """Raises `WorkflowError` where a critic cannot read all roles. `environment`: None for a value-state game; `renderers`: of models.

    In a tree, hosted play asks the roles of a stage one after the other and compiled play at once: they would read different histories.
    """
    if recipe.sampling == "tree":
        raise WorkflowError("critic='centralised' reads plays without a second candidate: use recipe.sampling=chain or parallel")
    if environment is not None and environment.program is not None:
        raise WorkflowError("critic='centralised': a foreign program does not say which call followed which: use critic='own'")
    why = "critic='centralised' reads the ids of all roles"
    for role, name in assignment.roles.items():
        if not isinstance(assignment.model(role), Inside):
            raise WorkflowError(f"{why}, and {name!r}, which plays {role!r}, is no model of this program: use critic='own'")
    first, *others = renderers or [""]
    for name in others:
        if difference := vocabulary_difference(renderers[first].tokenizer, renderers[name].tokenizer):
            raise WorkflowError(f"{why}, and models {first!r} and {name!r} need one tokenizer: {difference}; use critic='own'")


__all__ = ["check_centralised", "joint_history", "of_compiled", "of_hosted", "with_histories"]
