"""Faults in judges, maths, retrieval, results."""

D, T = "marl_llm/tools/", "tests/tools/"

FAULTS = {
    (D + "sandbox/inside/seccomp.py", T + "test_sandbox.py::test_a11_host_files_are_neither_watched_nor_locked"): {
        "host files can be locked": (" flock=(73, 32),", ""),
        "host files can be watched": (" inotify_add_watch=(254, 27),", ""),
        "a watch can be made": (" inotify_init1=(294, 26),", ""),
        "leases are given": ("(36, 37, 38, 1024, 1026, 1031)", "(36, 37, 38, 1026, 1031)"),
        "open-file-description locks are given": ("(36, 37, 38, 1024, 1026, 1031)", "(1024, 1026, 1031)"),
    },
    (D + "sandbox/inside/seccomp.py", T + "test_sandbox.py::test_kernel_memory_that_no_limit_counts_is_refused"): {
        "buffers of sockets can grow": ("BUFFER_SIZES = (54, 208), (7, 8, 32, 33)", "BUFFER_SIZES = (54, 208), (8, 32, 33)"),
        "shared anonymous memory is given": ("[_ins(JSET, MAP_ANONYMOUS, 0, 2), _ins(JSET, MAP_SHARED, 0, 1), refuse]", "[]"),
    },
    (D + "sandbox/inside/candidate.py", T + "test_contest_idioms.py"): {
        "a module that ends itself has no function": ("            if plan is None:\n                raise", "            raise"),
    },
    (D + "sandbox/inside/interpreter.py", T + "test_contest_idioms.py"): {
        "streams of the zygote are kept": ("        setattr(sys, name, text)\n", ""),
        "the globals' files are not flushed": ("                held.flush()", "                pass"),
        "a judge's names replace built-in ones": ("if not hasattr(builtins, name)}", "}"),
    },
    (D + "verdicts.py", T + "test_verdicts.py"): {
        "the first asker's clock stands still": ("            with judging.clock.shared():\n                found = await", "            if True:\n                found = await"),
        "a judge that nobody awaits goes on": ("                judging.task.cancel()", "                pass"),
        "a closed loop's judges stay": ("self._running.setdefault(asyncio.get_running_loop(), {})", "self._running.setdefault(None, {})"),
        "keys join their parts": ("pickler.dump(parts)", 'pickler.dump("".join(map(str, parts)))'),
        "one more result is held": ("if len(self._known) >= self._size:", "if len(self._known) > self._size:"),
    },
    (D + "sandbox/inside/boot.py", T + "test_sandbox.py::test_a11_the_frames_below_a_program_name_no_path_of_the_host"): {
        "host paths stay in the zygote's frames": ("            del orders[name]", "            orders[name]"),
    },
    (D + "sandbox/cluster.py", T + "test_cluster.py"): {
        "jobs of a lost node are lost": ("        for job, _ in host.running.values():\n            self._again(job,", "        for job, _ in ():\n            self._again(job,"),
        "an answer of a node that was given up is taken": ("        if ticket not in host.running:\n            return\n", "        if ticket not in host.running:\n            for job in self._open:\n                self._settle(job, answer.result())\n            return\n"),
        "a job kills any number of nodes": ("TRIES = 3", "TRIES = 30"),
        "a node gets more than it can run": ("len(host.running) < host.slots and", "len(host.running) <= host.slots and"),
        "a job comes to the same node again": ("elif host := self._free(job.tried):", "elif host := self._free():"),
        "a failure of one node's sandbox is final": ("frozenset({FailureKind.CRASH, FailureKind.UNAVAILABLE})", "frozenset()"),
        "a closed sandbox goes on being asked": ("            if done.failure.kind is FailureKind.UNAVAILABLE:", "            if False:"),
        "a silent node is waited for": ("if any(due < now for _, due", "if any(due < 0 for _, due"),
        "a late job is run": ("            self._fail(job, Failure(FailureKind.DEADLINE", "            (job, Failure(FailureKind.DEADLINE"),
        "a node without a fence is used": ("elif isinstance(error := ready.exception(), SandboxError):", "elif isinstance(error := ready.exception(), KeyError):"),
        "closing leaves workers": ("        for host in self._hosts:\n            host.worker.stop()", "        for host in ():\n            host.worker.stop()"),
        "closing leaves jobs without an outcome": ("        for job in list(self._open):", "        for job in ():"),
        "no node is looked for where none is left": ("(not self._hosts or time.monotonic() > self._next_look)", "time.monotonic() > self._next_look"),
    },
    (D + "sandbox/on_ray.py", T + "test_cluster.py"): {
        "Ray keeps its handler of SIGTERM": ("        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)", "        pass"),
        "processes do not share": ("count // self._share", "count"),
        "dead nodes are used": ('if node["Alive"]]', "]"),
        "a dead actor breaks the thread": ("        call().future().add_done_callback(pass_on)\n    except Exception", "        call().future().add_done_callback(pass_on)\n    except KeyError"),
        "a closed sandbox is one that crashed": ("FailureKind.UNAVAILABLE if self._sandbox.closed else", "FailureKind.CRASH if self._sandbox.closed else"),
    },
    (D + "_compare.py", T + "test_judge.py"): {
        "inner spaces are ignored": (
            "a == e or _same_line(a, e, tolerance) for a, e in zip(got, want))", 'a.replace(" ", "") == e.replace(" ", "") or _same_line(a, e, tolerance) for a, e in zip(got, want))'
        ),
        "a line more or less passes": ("len(got) == len(want) and all(a == e or _same_line", "all(a == e or _same_line"),
        "integers have a tolerance": ('if expected.lstrip("+-").isdecimal():', "if False:"),
        "True passes for 1": ("return kind is wanted and body == expected\n    raise", "return body == expected\n    raise"),
        "a tuple passes for a list": ("(tuples_as_lists and wanted is list", "(wanted is list"),
        "a dictionary may have more keys": ("if kind is not dict or len(body) != len(expected):", "if kind is not dict:"),
        "1.0 and 1 are one member": ('f"{\'\' if kind is None else kind.__name__} {len(text)} {text}"', 'f"{len(text)} {text}"'),
        "the tolerance is relative to nothing": ("self.absolute + self.relative * abs(expected)", "self.absolute + self.relative"),
        "a complex number has a real part only": (" and tolerance.close(body.imag, expected.imag)", ""),
    },
    (D + "judge.py", T + "test_judge.py"): {
        "a loop's calls have no limit of their own": ("timeout_s, case_timeout_s, profile, environment)\n    execution = await", "timeout_s, None, profile, environment)\n    execution = await"),
        "no case is a pass": ("return bool(self.cases) and all(", "return all("),
        "the last line of a case counts": ('found.setdefault(said.value["case"], (said.value, said.replaced))', 'found[said.value["case"]] = (said.value, said.replaced)'),
        "a failed execution is a miss": ("for execution in executions:\n        if execution.failure is not None:", "for execution in ():\n        if execution.failure is not None:"),
        "a program that fails passes by its output": ('elif program.outcome != "ok":', "elif False:"),
    },
    (D + "_maths_worker.py", T + "test_maths.py"): {
        "spaces are removed before texts are compared": (
            '" ".join(answer.split()) == " ".join(target.split())', '"".join(answer.split()) == "".join(target.split())'
        ),
        "exact integers are close": ("    if exact_integers:\n", "    if False:\n"),
        "the tolerance is relative to small numbers": ("gap / max(1, abs(b)) <= delta", "gap / max(1, abs(b)) <= 1000 * delta"),
    },
    (D + "_maths_values.py", T + "test_maths_answers.py"): {
        "an integer is near": ("if equal or b.is_Integer or not (", "if equal or not ("),
        "units do not count": ("return not a or not b or a == b or (", "return True or ("),
        "a pair has no order": ('if target.kind != "set":', "if False:"),
        "an inequality has no direction": (' and (sign in ("=", "!=") or factor > 0))', ")"),
        "reversed ends are the empty set": ("return None if points == sympy.S.EmptySet else", "return"),
        "names do not count": ("return _name(answer.name) == _name(target.name) and same(", "return same("),
        "one member answers two": ("        left.pop(found)\n", ""),
    },
    (D + "_maths_read.py", T + "test_maths_answers.py"): {
        "a chain of equations may contradict itself": ("consistent = all(same(value, values[-1], 0) for value in values[:-1])", "consistent = True"),
        "digits behind a comma are thousands": (r",(?!\d{3}(?!\d))|;", r",(?!\d)|;"),
        "the sine of degrees is taken in radians": ("    if ANGLE_OF.search(text):", "    if False:"),
        "power towers are computed": (" or _is_huge(latex):", ":"),
        "any left side is a name": ("    if NAME.fullmatch(parts[0]):\n        values", "    if parts[0]:\n        values"),
        "at least is at most": ("if sign in (\">\", \"\\\\ge\"):", "if sign == \">\":"),
    },
    (D + "_maths_text.py", T + "test_maths_answers.py"): {
        "a choice may name two letters": ("found is None or LETTER.search(found[3])", "found is None"),
        "hedges are units": ("NO_UNITS.isdisjoint(words) and ", ""),
        "a period begins at the point": ("(10 ** len(period) - 1) * 10 ** len(part))", "10 ** len(period) - 1)"),
    },
    (D + "results.py", T + "test_results.py"): {
        "a refused call is tried again": ("FINAL_KINDS = frozenset({FailureKind.REFUSED, ", "FINAL_KINDS = frozenset({"),
        "a result may hold both": ("if (self.value is None) == (self.failure is None):", "if self.value is None and self.failure is None:"),
    },
    (D + "retriever/words.py", T + "test_retriever.py"): {
        "a sentence without spaces is one word": ("units + [\"\".join(pair) for pair in itertools.pairwise(units)]", "[run[0]]"),
        "a single character finds nothing": ("found += units + [", "found += ["),
        "half width is another letter": ('unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())', "text.casefold()"),
        "marks end a word": ("[\\w{marks}]", "\\w"),
    },
    (D + "retriever/bm25.py", T + "test_retriever.py"): {
        "words count once in a query": (", weight, weight * float(", ", 1, float("),
        "of equals the later passage comes first": ("np.lexsort((rows, -scores))[:topk]", "np.lexsort((-rows, -scores))[:topk]"),
        "sums are left from the query before": ("sums[column.rows] = 0.0", "sums[column.rows[:0]] = 0.0"),
        "the search stops too early": ("if rest[visited] < threshold * SLACK:", "if rest[visited] < 4 * threshold * SLACK:"),
        "an index of another format is read": ("or about.get(\"format\") != FORMATS.get(wanted)", ""),
        "summands of absent words": ("summands *= self.rows.take(position) == rows", "summands *= 1"),
    },
    (D + "_calls.py", "tests/workflows/test_waiting.py"): {
        "the clock of a dropped call stands still": ("        future.add_done_callback(lambda _: arrived())  # dropped before it began\n", ""),
    },
    (D + "_chat_backends.py", T + "test_chat_client.py"): {
        "other fields of the body share a cache": ("json.dumps([self.url, model, self._extra], sort_keys=True)", "json.dumps([self.url, model], sort_keys=True)"),
    },
    (D + "_chat_store.py", T + "test_chat_client.py"): {
        "the last reply under a key stays": ("INSERT OR IGNORE", "INSERT OR REPLACE"),
    },
    (D + "chat.py", T + "test_chat_client.py"): {
        "a shorter pause ends a longer one": ("self._paused_until = max(self._paused_until, time.monotonic() + seconds)", "self._paused_until = time.monotonic() + seconds"),
        "a reply of just its budget counts no tokens": ("0 <= count <= bound for", "0 <= count < bound for"),
    },
    (D + "_http.py", T + "test_http.py"): {
        "a password without a user may stand in a URL": ("if parts.username or parts.password:", "if parts.username:"),
    },
    (D + "maths.py", T + "test_maths.py"): {
        "a batch from a loop takes any form": ("self._calls.abatch([self._request(*pair, form)", "self._calls.abatch([self._request(*pair, \"any\")"),
    },
    (D + "mailbox.py", "tests/workflows/test_workflow_threads.py"): {
        "a cancelled future keeps what lies behind it": ("                continue", "                return"),
    },
    (D + "vllm.py", T + "test_vllm.py"): {
        "the first parameters drew all": ("any(span.get(\"version\") != label for span in spans)", "spans[0].get(\"version\") != label"),
    },
    (D + "waiting.py", "tests/workflows/test_waiting.py"): {
        "a clock that left stands still for ever": ("                if self._waits:\n                    own._change(-1)\n", "                pass\n"),
    },
    (D + "retriever/client.py", T + "test_retriever.py"): {
        "too many requests are refused for good": ("not in (408, 429)", "not in (408,)"),
    },
    (D + "retriever/passages.py", T + "test_retriever.py"): {
        "the id 0 is none": ("\"id\": str(row) if identity is None else identity", "\"id\": identity or str(row)"),
    },
    (D + "retriever/dense.py", T + "test_retriever.py"): {
        "rows of a later block are the first's": ("start + int(row)) for row", "int(row)) for row"),
    },
    (D + "sandbox/attempt.py", T + "test_sandbox.py"): {
        "output of just the limit is cut": ("size > cap) for", "size >= cap) for"),
    },
    (D + "sandbox/limits.py", T + "test_sandbox.py"): {
        "the kernel's CPU limit is a signal": ("    flags[\"timed_out\"] |= number == signals.SIGXCPU\n", ""),
    },
    (D + "sandbox/inside/snapshot.py", T + "test_sandbox.py"): {
        "files of a workspace count in bytes": ("total += -(-len(content) // PAGE) * PAGE", "total += len(content)"),
    },
}
