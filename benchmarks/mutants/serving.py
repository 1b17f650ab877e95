"""Faults in the local servers, their guard, and requests to other servers."""

G, S, H = "marl_llm/local_server.py", "marl_llm/serving/", "marl_llm/tools/_http.py"
GUARD, SERVING = "tests/test_local_server.py", "tests/serving/test_serving.py"

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
        "a reply is recorded after its pay": ("            self.check(episode)\n            self._file.append(json.dumps({\"episode\": episode, \"number\"", "            self._file.append(json.dumps({\"episode\": episode, \"number\""),
        "an old file's episodes go on": ("if episode in self._old:", "if False:"),
        "a function's broken log-probs are served": ("            check_numbers(reply)\n", ""),
        "nobody waits": ("threading.BoundedSemaphore(concurrency + queue)", "threading.BoundedSemaphore(concurrency)"),
    },
    (S + "certain.py", SERVING): {
        "the whole reply is read for every chunk": ("self._held = [text[len(certain) :]]", "self._held = [text]"),
        "a beginning of a stop text is said": ("return text[: len(text) - max(begun, default=0)]", "return text"),
        "newlines of the next chunk behind a thought are said": ("            self._strips_newlines = not text\n", "            self._strips_newlines = False\n"),
        "the shortest beginning of a stop text is held back": ("max(begun, default=0)", "min(begun, default=0)"),
    },
    (S + "completions.py", SERVING): {
        "true is taken for 1": ("value == neutral and isinstance(value, bool) == isinstance(neutral, bool)", "value == neutral"),
        "a part that is no text is left out": ("        raise ValueError(f'{where}: parts like", "        return \"\"\n        raise ValueError(f'{where}: parts like"),
        "the larger of two budgets counts": ("max_tokens=min(budgets, default=None)", "max_tokens=max(budgets, default=None)"),
        "every chunk names the role": ("        self._first = False\n", ""),
    },
    (H, "tests/tools/test_http.py"): {
        "no connection is kept": ("keepalive_expiry=KEEP_S", "keepalive_expiry=0"),
        "this machine is asked through the proxy": ('mounts=dict.fromkeys(("all://", "http://", "https://")) if direct else None', "mounts=None"),
        "cookies are kept": ("allowed_domains=()", ""),
        "answers are unpacked": ("response.aiter_raw()", "response.aiter_bytes()"),
        "a child asks through its parent's loop": ("os.register_at_fork(after_in_child=_clients.cache_clear)", "_ = None"),
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
    (S + "policy.py", SERVING): {
        "a prompt of any length is encoded": ("> MOST_CHARACTERS * self.max_prompt:", "> 10**9:"),
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
