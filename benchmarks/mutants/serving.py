"""Faults in the local servers, their guard, and requests to other servers."""

G, S, H = "marl_llm/local_server.py", "marl_llm/serving/", "marl_llm/tools/_http.py"
GUARD, SERVING = "tests/test_local_server.py", "tests/serving/test_serving.py"
DIALECTS = "tests/serving/test_dialects.py"
FORMATS = "tests/serving/test_formats_served.py"
TOOLS, SESSIONS = "tests/serving/test_tools_served.py", "tests/serving/test_sessions.py"
RESENT = "tests/serving/test_resent.py"

FAULTS = {
    (G, GUARD): {
        "any host that begins like this machine is local": ("ipaddress.ip_address(host).is_loopback", 'host.startswith("127.")'),
        "a foreign host is served": ("not self.server.any_host and not names_this_machine(hosts[0])", "False"),
        "the first of several hosts counts": ("if len(hosts) != 1:", "if not hosts:"),
        "a page without an origin of its own is local": ("if len(origins) > 1 or not all", 'if len(origins) > 1 or origins != ["null"] and not all'),
        "any scheme is local": ('scheme.lower() in ("http", "https") and', "bool(scheme) and"),
        "a page of another site may read data": ("opens_page = self.command ==", "opens_page = True or self.command =="),
        "every type that begins like JSON is taken": (
            'kinds[0].partition(";")[0].strip().lower() != "application/json"', 'not kinds[0].strip().lower().startswith("application/json")'
        ),
        "a second length is not seen": ("if len(lengths) > 1 or not", "if not"),
        "a GET's body is the next request": ('raise Refused(400, "a GET has no body")', "pass"),
        "a key's beginning is the key": ("hmac.compare_digest(token.strip().encode(\"utf-8\", \"replace\"), key.encode())", "key.startswith(token)"),
        "another address needs no key": ("if key is None and not is_loopback(host):", "if False:"),
        "a drip keeps a thread": ("        left = self._ends - time.monotonic()", "        left = BODY_S"),
        "half a body is a body": ("if len(body) < int(length):", "if False:"),
        "a body of the largest size is refused": ("int(length) > self.max_body", "int(length) >= self.max_body"),
    },
    (S + "server.py", SERVING): {
        "one more waits": ("threading.BoundedSemaphore(concurrency + queue)", "threading.BoundedSemaphore(concurrency + queue + 1)"),
        "an episode's id may be longer": ("[\\w.:-]{1,128})/reward", "[\\w.:-]{1,})/reward"),
        "a completion's episode may be longer": ("[\\w.:-]{1,128}))?/v1", "[\\w.:-]{1,}))?/v1"),
        "no queue is no server": ("if concurrency < 1 or queue < 0:", "if concurrency < 1 or queue < 1:"),
        "tokens are not counted": ("        self._count(\"tokens\", tokens)\n", ""),
        "a client that left counts as refused": ("        except ClientLeft:\n            self._count(\"failed\")", "        except ClientLeft:\n            self._count(\"refused\")"),
        "a pay that is refused is not counted": ("        except ValueError as error:\n            self._count(\"refused\")\n            return 400", "        except ValueError as error:\n            return 400"),
        "a stopped server records": ("            raise EpisodeRefused(\"this server has stopped: nothing more is recorded\")", "            return"),
        "an episode's replies are numbered over all": ("\"number\": self._numbers[episode]}", "\"number\": sum(self._numbers.values())}"),
        "the key is not passed on": ("LocalServer(_Handler, self, port, key=key)", "LocalServer(_Handler, self, port)"),
        "the record is not closed": ("        if self._record is not None:\n            self._record.close()", "        pass"),
        "a reply is recorded after its pay": ("            self.check(episode)\n            for line in lines:", "            for line in lines:"),
        "an old file's episodes go on": ("if episode in self._old:", "if False:"),
        "a function's broken log-probs are served": ("            check_numbers(reply)\n", ""),
        "nobody waits": ("threading.BoundedSemaphore(concurrency + queue)", "threading.BoundedSemaphore(concurrency)"),
    },
    (S + "certain.py", SERVING): {
        "the whole reply is read for every chunk": ("self._held = [text[len(certain) :]]", "self._held = [text]"),
        "a beginning of a stop text is said": ("return text[: len(text) - longest_beginning(text, self._stops)]", "return text"),
        "newlines of the next chunk behind a thought are said": ("            self._strips_newlines = not text\n", "            self._strips_newlines = False\n"),
        "the shortest beginning of a stop text is held back": ("return max((n for mark in marks", "return min((n for mark in marks"),
    },
    (S + "completions.py", SERVING): {
        "a budget of one is refused": ("min(budgets) < 1:", "min(budgets) <= 1:"),
        "the larger budget is bounded alone": ("if budgets and min(budgets) < 1:", "if budgets and max(budgets) < 1:"),
        "usage is told unasked": ("        if self._request.usage:\n", "        if True:\n"),
        "an answer has no total of tokens": ("\"total_tokens\": prompt + drawn", "\"total_tokens\": drawn"),
        "greedy is temperature one": ("fields.get(\"temperature\") == 0, kind", "fields.get(\"temperature\") == 1, kind"),
        "a reward may be huge": ("abs(value) < LARGEST_REWARD", "abs(value) < 1e300"),
        "an endless top_p is taken": ("options.keys() & {\"temperature\", \"top_p\"}", "options.keys() & {\"temperature\"}"),
        "rewards alone pay nobody": ("if not (\"reward\" in fields or by_model)", "if not (\"reward\" in fields)"),
        "messages to completions are ignored": ("(\"messages\", *OF_CHATS) if kind", "OF_CHATS if kind"),
        "an answer tells no tokens of the prompt": ("sum(choice.reply.prompt_tokens or 0 for", "sum(0 for"),
        "true is taken for 1": ("value == neutral and isinstance(value, bool) == isinstance(neutral, bool)", "value == neutral"),
        "the larger of two budgets counts": ("max_tokens=min(budgets, default=None)", "max_tokens=max(budgets, default=None)"),
        "every chunk names the role": ("        self._begun.add(number)\n", ""),
    },
    (S + "tool_messages.py", SERVING): {
        "a developer speaks as a developer": ("\"system\" if message[\"role\"] == \"developer\" else message[\"role\"]", "message[\"role\"]"),
        "a content of null is taken of a user": ("if content is None and role == \"assistant\":", "if content is None:"),
        "a part that is no text is left out": ("        raise ValueError(f'{where}: parts like", "        return \"\"\n        raise ValueError(f'{where}: parts like"),
    },
    (S + "tool_messages.py", TOOLS): {
        "answers stand as they came": ("ordered += [answers[call] for call in calls]", "ordered += answers.values()"),
        "a call may have no answer": ("if missing := [call for call in calls if call not in answers]:", "if missing := []:"),
        "calls are read where none are wanted": ("return bool(self.offered) and self.choice != \"none\"", "return bool(self.offered)"),
        "a name that a model invented is refused": ("len(function[\"name\"]) > LONGEST_NAME:", "not _NAME.fullmatch(function[\"name\"]):"),
        "a call may have no id": ("if not call[\"id\"] or len(", "if len("),
        "a called name has any length": (" or len(function[\"name\"]) > LONGEST_NAME:", ":"),
        "any tool may be named": ("if function[\"name\"] not in names:", "if False:"),
    },
    (S + "sessions.py", SESSIONS): {
        "an episode knows another's replies": ("            return self._tree(episode).match(", "            return self._tree(\"\").match("),
        "models share their replies": ("json.dumps([model, list(tools)], sort_keys=True)", "json.dumps(list(tools), sort_keys=True)"),
        "a retry forks": ("known.next not in (\"\", keys[-1])", "known.next != \"\""),
        "the shortest beginning is kept": ("range(len(messages) - 1, 0, -1)", "range(1, len(messages))"),
        "what is encoded again is not counted": ("len(prompt) - relayed if encoded_again else 0", "0"),
        "the last that asked are forgotten": ("for old in self._trees.values() if", "for old in reversed(self._trees.values()) if"),
    },
    (S + "server.py", RESENT): {
        "a reply whose client has left is recorded": ("                if episode is not None and connection.is_closed():\n", "                if False:\n"),
        "a caller that left is asked of the model": ("        if episode is not None and connection.is_closed():  #", "        if False:  #"),
        "no request is sent again": ("else self._kept.find(key, connection)", "else (None, connection)"),
        "a stream that is told again has no text": ("            if kept is not None:\n                events.text(number, choice.streamed)\n", ""),
        "a late reply is recorded": ("                    check_in_time(replies)\n", "                    pass\n"),
        "a late reply is told without a reason": ("isinstance(error, NotFinite | LateReply)", "isinstance(error, NotFinite)"),
        "a request that was turned away is not counted": ("                self._kept.turn_away(self._kept.key(episode, kind, body), connection)\n", "                pass\n"),
        "a request that was turned away is drawn as its equal": ("kept, connection = (None, connection) if key", "kept, _ = (None, connection) if key"),
        "every request is sent again": ("strip() not in (\"\", \"0\")", "strip() != \"\""),
    },
    (S + "resent.py", RESENT): {
        "a new request gets the old reply": ("            self._answers.pop(key, None)\n            return None, connection", "            return self._answers.get(key), connection"),
        "episodes share their answers": ("(episode.encode(), kind.encode(), body)", "(b\"\", kind.encode(), body)"),
        "a request that is sent again has a number of its own": ("if is_retry else []", "if False else []"),
        "a dropped request keeps its number": ("        if answered:\n", "        if True:\n"),
        "a request that was turned away has its equal's reply": ("if connection.is_retry and self._turned_away[key]:", "if False:"),
        "a request that was turned away is new for ever": ("                self._turned_away -= collections.Counter([key])\n", ""),
        "a request that is turned away again is one more": ("        if connection.is_retry:\n            return\n", ""),
        "equal requests that are sent again share a number": ("key=lambda number: (self._users[number], number), default", "default"),
        "a number is free while another uses it": ("        if not self._users[number]:\n", "        if True:\n"),
    },
    (S + "policy.py", RESENT): {
        "a cancelled reply is in time": ("is_late=done.finish in (\"timeout\", \"cancelled\")", "is_late=done.finish == \"timeout\""),
        "a reply that ran out of time is in time": ("is_late=done.finish in (\"timeout\", \"cancelled\")", "is_late=done.finish == \"cancelled\""),
        "a reply of all its tokens is late": ("is_late=done.finish in (\"timeout\", \"cancelled\")", "is_late=done.finish != \"stop\""),
    },
    (S + "episodes.py", RESENT): {
        "top log-probs of another policy are told": ("if request.log_probs > 1 and self._temperature:", "if False:"),
        "log-probs are refused": ("if request.log_probs > 1 and self._temperature:", "if request.log_probs and self._temperature:"),
        "an evaluation tells no top log-probs": ("if request.log_probs > 1 and self._temperature:", "if request.log_probs > 1:"),
    },
    (G, RESENT): {
        "nobody leaves": ("bool(poll.poll(0)) and not", "False and not"),
    },
    (S + "policy.py", SESSIONS): {
        "all is encoded again": ("if model_request.past is not None:", "if False:"),
        "what was streamed is not known": ("streamed=streamed + rest", "streamed=reply.text"),
    },
    (S + "policy.py", TOOLS): {
        "a reply that ends at a stop text is cut off": ("text = shown if ended else", "text = shown if read.finished else"),
        "calls before a stop text are not read": ("if ended and not read.finished:", "if False:"),
        "what is behind a stop text is read": ("until_stop = said[:begin] + text_before(said[begin:], model_request.options.stop or ())", "until_stop = said"),
        "the prompt's own words hold the stop text": ("begin = len(self.renderer.tokenizer.decode(opening))", "begin = 0"),
        "calls of a reply that was cut off are made": ("if malformed or not ended or not", "if malformed or not"),
        "the stop text of a thought is not told": ("said = self._without_stop(drawn) if request.stop_strings else \"\"", "said = text"),
        "the first stop text of the request is told": ("default=\"\")\n        text, shown = text_before", "default=\"\") and request.stop_strings[0]\n        text, shown = text_before"),
        "a broken call is told twice": ("malformed = len(read.broken_calls) or int(cut_off)", "malformed = len(read.broken_calls) + int(cut_off)"),
    },
    (S + "anthropic_messages.py", TOOLS): {
        "a stop text is no stop sequence": ("choice.reply.stopped_by and not choice.calls:", "False:"),
        "a call behind which a stop text stands is no tool_use": ("choice.reply.stopped_by and not choice.calls:", "choice.reply.stopped_by:"),
    },
    (S + "expected.py", TOOLS): {
        "a call of any tool will do": ("use.name not in called,", "not called,"),
        "a tool that is not offered may be called": ("            return False\n", "            return True\n"),
    },
    (S + "completions.py", FORMATS): {
        "all replies are counted as the first": ("sum(choice.reply.completion_tokens or 0 for choice in choices)", "choices[0].reply.completion_tokens or 0"),
    },
    (S + "policy.py", FORMATS): {
        "replies to one request are the same": ("        parts += [draw] if draw else []\n", ""),
    },
    (S + "expected.py", FORMATS): {
        "any JSON is an object": ("isinstance(parsed.value, dict) if self.schema is None", "True if self.schema is None"),
        "a schema is not looked at": ("else fits(parsed.value, self.schema))", "else True)"),
    },
    (S + "anthropic_messages.py", DIALECTS): {
        "results of tools are left out": ("    return results + ([", "    return (["),
        "a call's arguments are told twice": ("self._start(_block(call, {}))", "self._start(_block(call, {\"x\": 1}) | {\"name\": \"\"})"),
        "one call alone is not asked for": ("({\"parallel_tool_calls\": False} if alone else {})", "{}"),
    },
    (S + "openai_responses.py", DIALECTS): {
        "events have one number": ("        self._sequence += 1\n", ""),
        "a call is a message of its own": ("if not (messages and messages[-1][\"role\"] == \"assistant\"):", "if True:"),
        "a reply that is cut off is complete": ("reply.finish_reason == \"length\"", "False"),
    },
    (S + "json_schema.py", TOOLS): {
        "true is the number 1": ("        return value is other\n", "        return value == other\n"),
        "a required value may be missing": ("if not all(name in value for name in schema.get(\"required\", ())):", "if False:"),
    },
    (H, "tests/tools/test_http.py"): {
        "no connection is kept": ("keepalive_expiry=KEEP_S", "keepalive_expiry=0"),
        "this machine is asked through the proxy": ('mounts=dict.fromkeys(("all://", "http://", "https://")) if direct else None', "mounts=None"),
        "cookies are kept": ("allowed_domains=()", ""),
        "answers are unpacked": ("response.aiter_raw()", "response.aiter_bytes()"),
        "a child asks through its parent's loop": ("    _made.cache_clear()\n", ""),
        "threads that are the first to ask make a loop each": ("    with _MAKING:\n        return _made()", "    return _made()"),
    },
    ("marl_llm/training/recorded.py", "tests/training/test_recorded.py"): {
        "a reply behind its pay is trained on": ("            if episode in paid:\n                raise RecordError(f\"{where}: a reply", "            if False:\n                raise RecordError(f\"{where}: a reply"),
    },
    ("marl_llm/workflows/finite.py", "tests/workflows/test_what_is_said.py"): {
        "NumPy's numbers are not looked at": ("isinstance(item, np.ndarray | np.inexact)", "isinstance(item, np.ndarray)"),
        "keys are not looked at": ("(*item, *item.values())", "(*item.values(),)"),
    },
    (S + "local.py", SERVING + " " + "tests/experiments/test_coached_runs.py"): {
        "a local model's own budget is not told": ("max_prompt=max_prompt, max_tokens=max_tokens)\n\n    def backend", "max_prompt=max_prompt)\n\n    def backend"),
    },
    (S + "scored_prompts.py", "tests/serving/test_scored_prompts.py"): {
        "a prompt is scored behind its echo alone": ("model.score(whole if scoring.echo else ids, scoring.most)", "model.score(ids, scoring.most)"),
        "a prompt has several replies": ("if fields.get(\"n\", 1) != 1:", "if False:"),
        "a token's own log-prob is the likeliest's": ("float(scores.log_probs[place]), int(", "float(scores.top_log_probs[place, 0]), int("),
        "an answer has any number of log-probs": ("* prompts > MOST_ENTRIES:", "* prompts > 10**9:"),
        "offsets count tokens": ("characters += len(text)", "characters += 1"),
    },
    (S + "policy.py", SERVING): {
        "a prompt of just the lane is refused": ("if not 0 < len(ids) <= most:", "if not 0 < len(ids) < most:"),
        "a prompt of just the most characters is refused": (") > MOST_CHARACTERS * most:", ") >= MOST_CHARACTERS * most:"),
        "a stream's request goes on when its client left": ("            handle.cancel()\n            raise", "            raise"),
        "sampled log-probs need not be finite": ("for name in (\"log_probs\", \"sampled_log_probs\"):\n        if not", "for name in (\"log_probs\",):\n        if not"),
        "the seed forgets the messages' order of keys": ("sort_keys=True).encode()).digest()", "sort_keys=False).encode()).digest()"),
        "whatever ended a reply is its length": ("drawn, ended = done.tokens.tolist(), done.finish == \"stop\"", "drawn, ended = done.tokens.tolist(), done.finish != \"length\""),
        "a word that is unknown is encoded": ("texts = model_request.texts(model_request.covered)\n", "texts = model_request.texts(model_request.covered)[:1]\n"),
        "a text's stop id is kept": ("self.renderer.tokenizer.decode(drawn[:-1] if drawn and drawn[-1] in self.renderer.stop_ids else drawn)", "self.renderer.tokenizer.decode(drawn)"),
        "a prompt of any length is encoded": ("> MOST_CHARACTERS * most:", "> 10**9:"),
        "a request may ask for more than the lane holds": ("min(options.max_tokens or self.max_tokens, self.max_tokens)", "options.max_tokens or self.max_tokens"),
        "a version that is given is not told": ("done.version if self.version is None else self.version", "done.version"),
    },
    ("marl_llm/untrusted.py", "tests/test_untrusted.py"): {
        "a value may be one container deeper": ("if depth == self._bounds.depth:", "if depth > self._bounds.depth:"),
        "a long line that begins with blanks is left out": ("if rest is line and not line.strip():", "if not line.strip():"),
        "a negative integer may have any size": ("not self._least < value < self._most", "not value < self._most"),
        "a replacement sign that was sent counts as replaced": ("valid.count(REPLACEMENT) - text.count(REPLACEMENT.encode())", "valid.count(REPLACEMENT)"),
    },
}
