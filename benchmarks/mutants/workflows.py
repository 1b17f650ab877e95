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
        "async calls left behind have no bound": ("if line.left >= SPARE * self._limit:", "if False:"),
        "a call that cancels itself cancels its play": ("if task.cancelled():\n                    raise", "if False:\n                    raise"),
        "late async calls are not counted": ("self._late[tool] += 1", "self._late[tool] += 0"),
        "a late call is not left behind": ("await asyncio.wait({task}, timeout=GRACE_S)", "await asyncio.wait({task}, timeout=3600)"),
    },
    (W + "samples.py", T + "test_workflow_rewards.py " + T + "test_workflow_assignment.py " + T + "test_workflow_tree.py"): {
        "aborted episodes are trained": ('excluded = "aborted"', 'excluded = ""'),
        "models off the schedule are trained": ("elif call.model not in trains:", "elif False:"),
        "a call before a fork is paid by its first way": ("_mean(pays[:1] if rollout.pick else pays)", "_mean(pays[:1])"),
        "broken answers are imitated": ("and (s.call.legal or not legal)", ""),
        "teams of different tasks are one group": ("env=(number, _group(", "env=(0, _group("),
        "seats with other prompts are one group": ("call.parents, call.prompt_ids", "call.parents", T + "test_candidates_when_made.py"),
        "raw and sampled log-probs are exchanged": ("call.log_probs if raw else call.sampled_log_probs", "call.sampled_log_probs if raw else call.log_probs", T + "test_workflow_rewards.py " + T + "test_workflow_engine.py"),
    },
    (W + "rewards.py", T + "test_workflow_rewards.py"): {
        "a broadcast has no weight": ("value = weight * score(trajectory)", "value = score(trajectory)"),
        "exempt calls are paid": ("if not (exempt and exempt(call))]", "]"),
        "a penalty reaches all roles": ("calls = [call for call in _calls(trajectory, roles) if not", "calls = [call for call in trajectory.calls if not"),
        "a start that is computed is none": ("(start(trajectory) if callable(start) else start)", "(0.0 if callable(start) else start)"),
        "a score's own name is its scorer's": ("weight * value, name or scorer)", "weight * value, scorer)"),
        "a coach is heard whole": ("weight: float | int = 0.1, roles", "weight: float | int = 1.0, roles"),
        "the coach pays all roles": ("return scored(COACH, roles, weight)", "return scored(COACH, None, weight)"),
        "a joint reward is local": ("0.0), name, team=True) for call in calls for f, name", "0.0), name) for call in calls for f, name"),
        "the first value of a turn counts": ("by_turn = trajectory.per_turn(scores) if", "by_turn = dict(reversed(trajectory.written(scores))) if"),
        "what is paid added up is paid for the team": ("total[3] or award.team_paid", "True"),
        "parts of what is added up need not be finite": ("(award.team, award.local, *award.components.values())", "(award.team, award.local)"),
        "a component has its last value": ("total[2][name] = total[2].get(name, 0.0) + float(value)", "total[2][name] = float(value)"),
        "a broken format is free": ("0.0 if call.legal else -weight", "0.0"),
        "an improvement is paid from the start again": ("            before = by_turn[turn]\n", ""),
        "the delayed pay is one turn late": ("by_turn[after] - by_turn[turn] for", "by_turn[turn] - by_turn[after] for"),
        "team and local are exchanged": ("team, local = (award.value, 0.0) if award.team else", "team, local = (0.0, award.value) if award.team else"),
        "NaN is paid": ("if not is_finite_number(value):", "if False:"),
        "a broadcast reaches all roles": ("for call in _calls(trajectory, roles)]\n\n    return _described(reward, f\"broadcast", "for call in _calls(trajectory, None)]\n\n    return _described(reward, f\"broadcast"),
    },
    (W + "metrics.py", T + "test_workflow_rewards.py " + T + "test_workflow_controller.py"): {
        "aborted episodes have a vote": ("if not episode.aborted else ()", ""),
        "the aborted share is the played one": ('"aborted_share": 1.0 - len(played)', '"aborted_share": len(played)'),
    },
    (W + "answers.py", T + "test_workflow_answers.py"): {
        "articles count": ('_ARTICLES.sub(" ", text)', "text"),
        "F1 is precision": ("return 2 * precision * recall / (precision + recall)", "return precision"),
        "repeated words count each time": (
            "sum((collections.Counter(words) & collections.Counter(gold_words)).values())", "sum(word in gold_words for word in words)"
        ),
        "any accepted answer but the best": ("return max(_f1(", "return min(_f1("),
    },
    (W + "renderer.py", T + "test_workflow_roles.py " + T + "test_workflow_controller.py"): {
        "too much is trimmed": ("low, high, best = 1, len(value), None", "low, high, best = len(value) // 2, len(value), None"),
        "an unfinished reply loses its last token": ("ids[:-1] if finished else ids", "ids[:-1]"),
    },
    (W + "parsers.py", T + "test_workflow_roles.py"): {
        "one word too many passes": (
            "if max_words is not None and len(text.split()) > max_words:", "if max_words is not None and len(text.split()) > max_words + 1:"
        ),
        "unknown keys pass": ("if extra := [key for key in values if key not in fields]:", "if extra := []:"),
        "a text may occur twice": ("if distinct and len(set(items))", "if False and len(set(items))"),
        "a second block passes": ("if len(blocks) != 1:", "if not blocks:"),
    },
    (W + "calls.py", T + "test_speaking.py"): {
        "a controller's settings are the roles' own": ("settings, stops = self._settings or role.settings, self._policy_stops[model]", "settings, stops = role.settings, self._policy_stops[model]"),
        "an outside model draws as the role says whatever the controller's settings": ("settings = self._settings or node.role.settings", "settings = node.role.settings"),
        "an outside model has its own budget": ("options |= dict(stop=node.role.stop or None) | dict(player.options)", "options = dict(player.options) | options | dict(stop=node.role.stop or None)"),
        "an outside model is told no stops": ("dict(stop=node.role.stop or None) | dict(player.options)", "dict(player.options)"),
        "an outside model draws from all tokens": ("temperature=settings.temperature, top_p=settings.top_p)", "temperature=settings.temperature, top_p=1.0)"),
        "a response of just the most characters is cut": ("len(text) > MAX_TEXT else", "len(text) >= MAX_TEXT else"),
        "the engine waits without end": ("stops, role.stop, float(role.timeout_s))", "stops, role.stop)"),
        "a policy hears no stop texts": ("stops, role.stop, float(role.timeout_s))", "stops, (), float(role.timeout_s))"),
        "a response that was cancelled is played": ("done.finish in (\"timeout\", \"cancelled\")", "done.finish in (\"timeout\",)"),
        "entropies are lost": ("sampled_log_probs=done.sampled_log_probs, entropy=done.entropy,", "sampled_log_probs=done.sampled_log_probs,"),
        "kept ids are lost": ("kept_ids=done.kept_ids, finish", "finish"),
        "versions are told where there is one": ("versions=done.versions if done.mixed else None", "versions=done.versions"),
        "one tool call more is made": ("enumerate(calls[:MAX_TOOL_CALLS])", "enumerate(calls[: MAX_TOOL_CALLS + 1])"),
        "as many calls as may be made are too many": ("if len(calls) > MAX_TOOL_CALLS:", "if len(calls) >= MAX_TOOL_CALLS:"),
        "a role's tool was tried once": ("seconds=seconds, attempts=attempts, replaced=answer.replaced, refused=refused)", "seconds=seconds, attempts=1, replaced=answer.replaced, refused=refused)"),
        "a refusal has no kind": ("type(refusal.__cause__ or refusal).__name__", "type(refusal).__name__"),
        "what a tool's answer replaced is not counted": ("arguments.replaced + answer.replaced + text.replaced", "arguments.replaced + text.replaced"),
        "a prompt of just its budget is too long": ("if len(conversation.ids) <= node.role.max_prompt:", "if len(conversation.ids) < node.role.max_prompt:"),
        "a round of tools less": ("range(role.max_tool_rounds + 1)", "range(role.max_tool_rounds)"),
        "uses of tools have one parent": ("answered[number], last = ((event,), answer), event.id", "answered[number] = ((event,), answer)"),
        "a reason has any length": ("read_text(f\"error: {refusal}\"[:MAX_REASON])", "read_text(f\"error: {refusal}\")"),
        "later rounds are of the first round's group": ("group=group if number == 0 else f\"{request}:{branch}\"", "group=group"),
    },
    ("marl_llm/workflows/mcp_tools.py", "tests/workflows/test_mcp_tools.py"): {
        "an error of an MCP server is an answer": ("if result.ok and result.value.is_error:", "if False:"),
        "an MCP tool may have any name": ("if not re.fullmatch(TOOL_NAME, tool.name):", "if False:"),
        "any schema is one of an object": ("or schema.value.get(\"type\") != \"object\"", ""),
        "an MCP tool fills the prompt": ("> MAX_TOLD:", "> MAX_TOLD * 100:"),
        "a call has no deadline of its own": ("timeout_s + PING_GRACE_S)", "timeout_s)"),
    },
    ("marl_llm/tools/_mcp_http.py", "tests/tools/test_mcp_http.py"): {
        "an MCP server's answer has any size": ("size > MAX_LINE", "False"),
        "an MCP server may compress": ("response.headers.get(\"content-encoding\", \"identity\").lower() != \"identity\"", "False"),
        "a status is an answer": ("if kind is not None and request.method == \"POST\":", "if False:"),
        "a page is an error of a tool": ("if not _is_error(body):", "if False:"),
        "an MCP server's session may have any name": ("if not (session_id.isascii() and session_id.isprintable()):", "if False:"),
        "a key in two pieces is told": ("without_key(rest + chunk)", "without_key(chunk)"),
        "a redirect tells the key": ("redacted(value, self.key)) for", "value) for"),
        "a dropped connection ends nothing": ("        except (httpx2.TransportError, OSError) as error:\n            self._connection", "        except ZeroDivisionError as error:\n            self._connection"),
        "a stream of a server's own is opened": ("if request.method == \"GET\":", "if False:"),
        "the last reason counts": ("self._fault = self._fault or McpFailure", "self._fault = McpFailure"),
    },
    ("marl_llm/tools/mcp_server.py", "tests/workflows/test_mcp_tools.py"): {
        "an MCP server that has ended is asked again": ("(self._stop.is_set() or opened.exception() or opened.result().ended.is_set())", "False"),
        "an MCP server that is deaf goes on": ("        except (TimeoutError, McpFailure):\n            await self._end()", "        except (TimeoutError, McpFailure):\n            pass"),
        "every deadline ends an MCP server": ("            await self._end_unless_alive()\n", "            await self._end()\n"),
        "each call starts an MCP server": ("if self._holder is None or self._holder.done():", "if True:"),
        "a group of errors is told": ("while isinstance(error, ExceptionGroup):", "while False:"),
        "why an MCP server failed has many lines": ("flatten_text(message, MAX_MESSAGE)", "message"),
        "a closed MCP server goes on": ("            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()\n", ""),
    },
    (W + "agent_tools.py", T + "test_sub_agents.py::test_a_call_whose_prompt_is_too_long_keeps_its_place_and_counts"): {
        "a sub-agent that could not read takes no place": ("if use.refused == PromptTooLong.__name__]", "if False]"),
    },
    (W + "calls.py", T + "test_role_tools.py::test_an_answer_that_cannot_be_shown_is_a_refusal"): {
        "an answer that cannot be shown ends the run": ("        except Exception as error:\n            raise ToolRefusal(f\"the answer cannot be shown", "        except KeyError as error:\n            raise ToolRefusal(f\"the answer cannot be shown"),
    },
    (W + "scoring.py", T + "test_scoring.py"): {
        "a text is a score": ("or not is_finite_number(score.value):", "or score.value is None:"),
    },
    (W + "rewards.py", T + "test_workflow_rewards.py::test_a_reward_with_a_fault_is_named"): {
        "what is no number ends the run without a name": ("if not is_finite_number(value):", "if not abs(value) < 1e300:"),
    },
    (W + "views.py", T + "test_scoring.py::test_what_ran_beside_an_action_was_not_before_it"): {
        "what ran beside an action was before it": ("        if event.id in ids:\n", "        if True:\n"),
        "only the last event was before an action": ("            ids |= set(event.parents)\n", ""),
    },
    (W + "function_replay.py", T + "test_function_team.py::test_an_error_tells_no_hidden_value_unless_it_is_revealed"): {
        "a tool's error tells what is hidden": ("_withheld(error, secret) if secret is not None else", ""),
        "a computation's error tells what is hidden": ("if secret is None or reveals or", "if True or"),
        "an error that is revealed is withheld": ("secret if field == HIDDEN_RESULT else None)", "secret)"),
    },
    (W + "calls.py", T + "test_continuing_roles.py::test_an_outside_model_reads_the_whole_conversation"): {
        "an outside model's conversation goes on in ids": ("if role.continues and isinstance(self._assignment.model(role.name), Outside):", "if False:"),
    },
    (W + "storage.py", T + "test_workflow_storage.py"): {
        "keys become texts": ("if not all(isinstance(key, str) for key in value):", "if False:"),
        "a stored task has no cluster": ("about.get(\"stratum\", \"\"), about.get(\"cluster\", \"\"))", "about.get(\"stratum\", \"\"))"),
    },
}
