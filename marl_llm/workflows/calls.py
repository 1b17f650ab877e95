"""One node at a time: a role's prompt, its response and what it means; a tool's call under its deadline."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.sampling.requests import Request, RequestError, SamplingParams
from marl_llm.text import Conversation, Message, ToolCall
from marl_llm.text.rendering import TemplateError
from marl_llm.tools.results import FailureKind, InfrastructureError, ToolResult
from marl_llm.tools.waiting import Expired, within
from marl_llm.untrusted import Said, read_text, read_value, valid_text
from marl_llm.workflows.agent_tools import Caller, SubAgentCall, SubAgentLimits
from marl_llm.workflows.assignment import Assignment, Outside, Scripted, ScriptTurn
from marl_llm.workflows.coroutines import Coroutines
from marl_llm.workflows.errors import PlayFailure, PromptTooLong, ToolRefusal, WorkflowError, from_error, from_tool
from marl_llm.workflows.finite import is_finite
from marl_llm.workflows.function_replay import FunctionStep, Journal, advance
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.nodes import Call, FunctionNode, Tool
from marl_llm.workflows.play import run_all
from marl_llm.workflows.renderer import Renderer, prompt_of, spoken_ids
from marl_llm.workflows.roles import BOUNDS, MAX_REASON, AgentTool, RoleTool
from marl_llm.workflows.state import RoleHistory, State
from marl_llm.workflows.threads import Late, Stalled, Threads
from marl_llm.workflows.trajectory import Event, RoleCall, Task, ToolUse

NO_TOKENS = np.zeros(0, np.int32)
MAX_TEXT = 1 << 20  # characters of one response from outside, or of one answer of a role's tool
MAX_TOOL_CALLS = 32  # in one response
# What a function raises because of the names that a role chose, not because of the machine.
OF_ARGUMENTS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


class Speaker:
    """Carries out role calls and tool calls for a controller, which owns the threads and the limits of tools.

    Args:
      settings: how tokens are drawn, in place of the roles' own.
    """

    def __init__(
        self,
        workflow: Workflow,
        assignment: Assignment,
        generator: Any,
        renderer: Mapping[str, Renderer],
        threads: Threads,
        coroutines: Coroutines,
        settings: SamplingParams | None = None,
    ):
        self._workflow, self._assignment, self._generator = workflow, assignment, generator
        self._renderer, self._settings = renderer, settings
        self._threads, self._coroutines = threads, coroutines
        self._policy_stops = {model: tuple(of_model.stop_ids) for model, of_model in renderer.items()}

    async def speak(
        self, node: Call, first: int, state: State, task: Task, identity: tuple[int, int, int], choice: int, asking_path: int
    ) -> tuple[tuple[Event, ...], State]:
        """One response of a role, or several with the tools that it calls in between; the events, and the state after them.

        Args:
          choice: which of the candidates for its prompt this is. asking_path: the path on which all of them were asked;
            `state.path_id` is this one's. first: the number of its first request.

        Raises `PlayFailure` or `WorkflowError`.
        """
        step, play, plays = identity
        role, group = node.role, f"{first}:{asking_path * plays + play}"
        branch = state.path_id * plays + play
        if branch >= 2**31:
            raise WorkflowError(f"node {node.name!r}: branch {branch} is beyond 2**31; fork fewer times, or play fewer instances")
        agent, model = self._workflow.agents[role.name], self._assignment.roles[role.name]
        common = dict(node=node.name, role=role.name, agent=agent, model=model, turn=state.turn, items=state.items, branch=branch)
        common["tool_use"] = state.tool_use
        events: list[Event] = []
        renderer = self._renderer.get(model)
        if role.continues and isinstance(self._assignment.model(role.name), Outside):
            renderer = None  # its replies have no ids that a conversation could go on from
        try:
            earlier = state.histories.get(role.name)
            opening = prompt_of(role, renderer, state.fields, earlier)
        except PromptTooLong as error:
            raise PlayFailure(node.name, "prompt", str(error), retriable=False) from error
        conversation, replaced = opening.conversation, opening.replaced
        messages = [*(earlier.messages if earlier else ()), *opening.messages]
        prompt = "\n".join(message.content for message in opening.messages)
        last, common["trimmed"] = state.last, opening.trimmed
        for number in range(role.max_tool_rounds + 1):
            seed = (step, task.number, agent, first + number, branch)
            prompt_ids = () if conversation is None else conversation.ids
            was_extended = conversation is not None and conversation.messages and len(conversation.turns) > 1
            common["rewritten"] = conversation.rewritten if was_extended else None
            request = first + number
            common |= dict(id=f"{node.name}:{request}:{branch}", parents=last, request_number=request, seed=seed, choice=choice)
            common |= dict(group=group if number == 0 else f"{request}:{branch}", prompt=prompt, prompt_ids=prompt_ids)
            common["messages"] = tuple(messages)
            drawn = sum(event.tokens.size for event in events if isinstance(event, RoleCall) and event.node == node.name)
            left = None if state.tokens_left is None else state.tokens_left - drawn
            response, conversation, tool_calls = await self._respond(node, state, conversation, messages, seed, left)
            text = read_text(response["text"])
            response["text"], replaced = text.value, replaced + text.replaced
            if role.tools and tool_calls and number < role.max_tool_rounds and (left is None or response["tokens"].size < left):
                call = RoleCall(**common, **response, writes={}, illegal=None, replaced=replaced)
                events.append(call)
                caller = Caller(node, first, call, state, tuple(events))
                uses, answers, last = await self._use_role_tools(caller, tool_calls, task, identity)
                events, replaced = [*events, *uses], 0
                messages = [*messages, Message("assistant", response["text"]), *answers]
                conversation, prompt = _extended(node, renderer, conversation, answers), "\n".join(message.content for message in answers)
                continue
            writes, illegal, more = role.hear(response["text"], response["tokens"].tolist(), state.fields)
            events.append(RoleCall(**common, **response, writes=writes, illegal=illegal, replaced=replaced + more))
            break
        after = state.after(*events)
        if role.continues:
            history = RoleHistory(conversation, (*messages, Message("assistant", response["text"])))
            after = after._replace(histories={**state.histories, role.name: history})
        return tuple(events), after

    async def _respond(
        self, node: Call, state: State, conversation: Conversation | None, messages: list[Message], seed: tuple[int, ...], left: int | None
    ) -> tuple[dict[str, Any], Conversation | None, tuple[ToolCall, ...]]:
        """What the role's player says, as fields of a `RoleCall`; the conversation with it; and the tools that it calls.

        `left`: most tokens that it may draw; None: the role's budget alone.
        """
        role, model = node.role, self._assignment.roles[node.role.name]
        player, renderer = self._assignment.model(role.name), self._renderer.get(model)
        if isinstance(player, Outside):
            return await self._from_outside(node, player, messages, seed[-1]), conversation, ()
        if isinstance(player, Scripted):
            response = self._from_script(node, player, state, messages, seed, renderer)
            if conversation is not None and (role.continues or role.tools):
                conversation = renderer.reply(conversation, response["tokens"].tolist())
            return response, conversation, renderer.read(conversation).tool_calls if role.tools and conversation is not None else ()
        max_tokens = role.max_tokens if left is None else min(left, role.max_tokens)
        response = await self._from_policy(node, model, () if conversation is None else conversation.ids, seed, max_tokens)
        try:
            conversation = renderer.reply(conversation, response["tokens"].tolist())
            reply = renderer.read(conversation)
        except ValueError as error:  # the vocabularies of model and tokenizer differ
            raise WorkflowError(f"node {node.name!r}: its response cannot be read: {error}") from error
        response["text"], response["unfinished_think"] = reply.content, reply.unfinished_think
        return response, conversation, reply.tool_calls

    def _from_script(
        self, node: Call, player: Scripted, state: State, messages: list[Message], seed: tuple[int, ...], renderer: Renderer | None
    ) -> dict[str, Any]:
        try:
            text = player.play(ScriptTurn(node.role, node.name, state.fields, tuple(messages), state.turn, seed))
        except Exception as error:
            raise WorkflowError(f"the scripted player of node {node.name!r} raised {type(error).__name__}: {error}") from error
        if isinstance(text, str):
            tokens = NO_TOKENS if renderer is None else np.asarray(spoken_ids(renderer, valid_text(text)), np.int32)
        elif isinstance(text, tuple):  # ids, as they are
            tokens = np.asarray(text, np.int32)
            text = "" if renderer is None else renderer.tokenizer.decode(text)
        else:
            kind = type(text).__name__
            raise WorkflowError(f"the scripted player of node {node.name!r} returned {kind}; it must return text, or a tuple of ids")
        return dict(text=text, tokens=tokens, log_probs=None, sampled_log_probs=None, finish="stop", version=0)

    async def _from_outside(self, node: Call, player: Outside, messages: list[Message], branch: int) -> dict[str, Any]:
        settings = self._settings or node.role.settings
        options = dict(max_tokens=node.role.max_tokens, temperature=settings.temperature, top_p=settings.top_p)
        options |= dict(stop=node.role.stop or None) | dict(player.options)
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            reply = await self._within(node.name, node.role.timeout_s, player.client.acomplete(plain, draw=branch, **options))
        except PlayFailure:
            raise
        except Exception as error:
            message = f"the outside model of node {node.name!r} raised {type(error).__name__}: {error}"
            raise from_error(node.name, error) or WorkflowError(message) from error
        if not isinstance(reply, ToolResult):
            raise WorkflowError(f"the outside model of node {node.name!r} gave {type(reply).__name__}, not a ToolResult of a reply")
        if not reply.ok:
            raise from_tool(node.name, reply.failure)
        text, finish = (getattr(reply.outcome(), name, None) for name in ("text", "finish_reason"))
        if not isinstance(text, str):
            raise PlayFailure(node.name, FailureKind.BAD_REPLY.value, f"a reply without text: {type(reply.outcome()).__name__}")
        finish = "length" if finish == "length" or len(text) > MAX_TEXT else "stop"
        return dict(text=text[:MAX_TEXT], tokens=NO_TOKENS, log_probs=None, sampled_log_probs=None, finish=finish, version=0)

    async def _from_policy(
        self, node: Call, model: str, prompt_ids: tuple[int, ...], seed: tuple[int, ...], max_tokens: int
    ) -> dict[str, Any]:
        role = node.role
        settings, stops = self._settings or role.settings, self._policy_stops[model]
        request = Request(prompt_ids, seed, max_tokens, model, settings, stops, role.stop, float(role.timeout_s))
        try:
            done = await self._within(node.name, role.timeout_s, self._generator.generate(request))
        except RequestError as error:
            raise WorkflowError(f"node {node.name!r}: the engine refuses its request: {error}") from error
        except (OSError, InfrastructureError) as error:
            raise from_error(node.name, error) from error
        if done.finish in ("timeout", "cancelled"):
            raise PlayFailure(node.name, FailureKind.DEADLINE.value, f"the response was {done.finish} after {len(done.tokens)} tokens")
        return dict(
            tokens=done.tokens, log_probs=done.log_probs, sampled_log_probs=done.sampled_log_probs, entropy=done.entropy,
            kept_ids=done.kept_ids, finish=done.finish, version=done.version, versions=done.versions if done.mixed else None,
        )  # fmt: skip

    async def advance(self, node: FunctionNode, task: Task, journal: Journal) -> FunctionStep:
        """What a team that is a function asks for next, or how it ended. Raises `PlayFailure`."""
        step, _ = await self._call(node.name, advance, [node, task, journal], {}, node.timeout_s + 1.0, False)
        return step

    async def use(self, node: Tool, number: int, state: State, identity: tuple[int, int, int]) -> ToolUse:
        """One tool call of the graph. Raises `PlayFailure` or `WorkflowError`."""
        start = time.perf_counter()
        branch = state.path_id * identity[2] + identity[1]
        try:
            inputs = [state.fields[field] for field in node.reads]
            value, attempts = await self._call(node.name, node.function, inputs, {}, node.timeout_s, node.instant)
        except PlayFailure:
            raise
        except Exception as error:
            message = f"tool {node.name!r} raised {type(error).__name__}: {error}"
            raise from_error(node.name, error) or WorkflowError(message) from error
        if len(node.writes) == 1 and not (isinstance(value, Mapping) and set(value) == set(node.writes)):
            value = {node.writes[0]: value}
        if not isinstance(value, Mapping) or set(value) != set(node.writes):
            got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise WorkflowError(f"tool {node.name!r} returned {got}; it writes {', '.join(node.writes)}: return a dictionary of these")
        checked = Said(dict(value)) if node.instant else read_value(dict(value), BOUNDS)  # what is instant says nothing from outside
        if not checked.ok:
            raise PlayFailure(node.name, FailureKind.BAD_REPLY.value, f"the tool's value cannot be used: {checked.problem}")
        if strange := [field for field, item in checked.value.items() if not is_finite(item)]:
            why = f"{node.name!r} wrote a number that is not finite into {strange[0]!r}: write a finite one, or None for no value"
            raise PlayFailure(node.name, FailureKind.BAD_REPLY.value, why)
        seconds = time.perf_counter() - start
        name = f"{node.name}:{number}:{branch}"
        writes = checked.value
        return ToolUse(name, node.name, state.last, state.turn, number, state.items, branch, writes, seconds, attempts, checked.replaced)

    async def _use_role_tools(
        self, caller: Caller, calls: tuple[ToolCall, ...], task: Task, identity: tuple[int, int, int]
    ) -> tuple[list[Event], list[Message], tuple[str, ...]]:
        """The tools that a role called within its response: what happened, their answers, and the ids of the events that are last.

        Functions run one after the other, and behind them all sub-agents beside each other. Whatever a role asks for is answered.
        """
        answered: dict[int, tuple[tuple[Event, ...], Said]] = {}
        admitted: dict[int, SubAgentCall] = {}
        tools, limits = {tool.name: tool for tool in caller.node.role.tools}, SubAgentLimits(caller)
        last = caller.called.id
        for number, call in enumerate(calls[:MAX_TOOL_CALLS]):
            start, shown = time.perf_counter(), call.name if call.name in tools else "unknown"
            use, attempts, refused = f"{caller.called.id}:{shown}:{number}", 1, None
            try:
                tool, arguments = _checked_call(tools, call)
                if isinstance(tool, AgentTool):
                    admitted[number] = limits.admit(tool, arguments.value, use)
                    continue
                answer, attempts = await self._use_role_tool(caller.node.name, tool, arguments)
            except ToolRefusal as refusal:
                answer, refused = _refusal(refusal)
            event = _tool_use(caller.called, shown, number, (last,), time.perf_counter() - start, answer, refused, attempts)
            answered[number], last = ((event,), answer), event.id
        jobs = [self._ask_agent(caller.called, number, sub_agent, task, identity) for number, sub_agent in admitted.items()]
        answered |= dict(zip(admitted, await run_all(jobs) if jobs else ()))
        ends = [answered[number][0][-1].id for number in admitted]
        events = [event for number in sorted(answered) for event in answered[number][0]]
        answers = [Message("tool", answered[number][1].value) for number in sorted(answered)]
        if len(calls) > MAX_TOOL_CALLS:
            answers.append(Message("tool", f"error: only the first {MAX_TOOL_CALLS} calls were made"))
        return events, answers, tuple([last] * (len(admitted) < len(answered)) + ends)

    async def _ask_agent(
        self, called: RoleCall, number: int, call: SubAgentCall, task: Task, identity: tuple[int, int, int]
    ) -> tuple[tuple[Event, ...], Said]:
        """A sub-episode: what happened, the use of the tool last, and what the caller reads. Raises `PlayFailure` or `WorkflowError`."""
        start, role, state = time.perf_counter(), call.node.role, call.state
        events, refused = (), None
        try:
            try:
                prompt_of(role, self._renderer.get(self._assignment.roles[role.name]), state.fields)
            except PromptTooLong as error:
                raise ToolRefusal(f"{role.name!r} cannot read it: {error}") from error
            events, _ = await self.speak(call.node, call.first, state, task, identity, 0, state.path_id)
            answer = read_text(call.answer(events)[:MAX_TEXT])
        except ToolRefusal as refusal:
            answer, refused = _refusal(refusal)
        tool, parents = call.node.name.rpartition(".")[2], (events[-1].id,) if events else (called.id,)
        use = _tool_use(called, tool, number, parents, time.perf_counter() - start, answer, refused)
        return (*events, use), answer

    async def _use_role_tool(self, node: str, tool: RoleTool, arguments: Said) -> tuple[Said, int]:
        """What the tool answers, as text, and in how many attempts.

        Raises `ToolRefusal` for a call that it cannot serve, for whatever reason: the role made it and is answered with the reason.
        """
        try:
            inspect.signature(tool.function).bind(**arguments.value)
        except TypeError as error:
            raise ToolRefusal(str(error)) from error
        try:
            value, attempts = await self._call(f"{node}.{tool.name}", tool.function, [], arguments.value, tool.timeout_s, False)
        except (PlayFailure, ToolRefusal):
            raise
        except Exception as error:
            failure = None if isinstance(error, OF_ARGUMENTS) else from_error(f"{node}.{tool.name}", error)
            raise failure or ToolRefusal(f"{type(error).__name__}: {error}") from error
        answer = read_value(value, BOUNDS)
        if not answer.ok:
            raise ToolRefusal(f"the answer cannot be read: {answer.problem}")
        try:
            text = read_text(str(answer.value)[:MAX_TEXT])
        except Exception as error:
            raise ToolRefusal(f"the answer cannot be shown: {type(error).__name__}: {error}") from error
        return Said(text.value, "", arguments.replaced + answer.replaced + text.replaced), attempts

    async def _call(
        self, node: str, function: Callable, positional: list[Any], named: dict[str, Any], timeout_s: float | int, instant: bool
    ) -> tuple[Any, int]:
        """What a function returns, wherever it has to run, and in how many attempts. What it raises is the caller's to judge."""
        try:
            if instant:
                result = function(*positional, **named)
            elif inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                result = await self._coroutines.run(lambda: function(*positional, **named), timeout_s, node)
            else:
                result = await self._threads.run(lambda: function(*positional, **named), timeout_s, node)
        except Late as error:
            raise PlayFailure(node, FailureKind.DEADLINE.value, str(error)) from None
        except Stalled as error:
            raise PlayFailure(node, FailureKind.UNAVAILABLE.value, str(error)) from None
        if not isinstance(result, ToolResult):
            return result, 1
        if result.failure is not None:
            raise from_tool(node, result.failure)
        return result.value, result.attempts

    async def _within(self, node: str, timeout_s: float | int, work: Any) -> Any:
        """What is awaited, or a failure of the play after the node's deadline; time in a tool's queue does not count."""
        try:
            return await within(timeout_s, work)
        except Expired as error:
            raise PlayFailure(node, FailureKind.DEADLINE.value, str(error)) from None


def _checked_call(tools: Mapping[str, RoleTool | AgentTool], call: ToolCall) -> tuple[RoleTool | AgentTool, Said]:
    """The tool that a role calls, and the arguments as they are read. Raises `ToolRefusal`."""
    tool, arguments = tools.get(call.name), read_value(dict(call.arguments), BOUNDS)
    if tool is None:
        raise ToolRefusal(f"there is no tool {call.name[:MAX_REASON]!r}; there are {', '.join(tools)}")
    if not arguments.ok:
        raise ToolRefusal(f"the arguments cannot be read: {arguments.problem}")
    return tool, arguments


def _refusal(refusal: ToolRefusal) -> tuple[Said, str]:
    """What the role reads of a call that could not be served, and the kind of reason."""
    return read_text(f"error: {refusal}"[:MAX_REASON]), type(refusal.__cause__ or refusal).__name__


def _extended(node: Call, renderer: Renderer, conversation: Conversation, answers: Sequence[Message]) -> Conversation:
    """The conversation with what tools answered. Raises `PlayFailure` where its role cannot read that."""
    try:
        conversation = renderer.extend(conversation, answers)
    except TemplateError as error:
        raise PlayFailure(node.name, "prompt", f"tool results: {error}", retriable=False) from error
    if len(conversation.ids) <= node.role.max_prompt:
        return conversation
    raise PlayFailure(node.name, "prompt", f"tool results grew the prompt to {len(conversation.ids)} tokens", retriable=False)


def _tool_use(
    called: RoleCall, tool: str, number: int, parents: tuple[str, ...], seconds: float, answer: Said, refused: str | None, attempts: int = 1
) -> ToolUse:
    """The use of a role's tool: the `number`-th that the response `called` asked for."""
    origin = dict(turn=called.turn, request_number=called.request_number, items=called.items, branch=called.branch)
    about = dict(writes={}, seconds=seconds, attempts=attempts, replaced=answer.replaced, refused=refused)
    return ToolUse(f"{called.id}:{tool}:{number}", f"{called.node}.{tool}", parents, **about, **origin)
