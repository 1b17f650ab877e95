"""Many plays whose every action is scored by a server on this machine: none lost, none doubled, and what a call costs.

    python -m benchmarks.coach --plays=1000 --turns=9 --concurrency=64
"""

from __future__ import annotations

import argparse
import collections
import json
import resource
import threading
import time

import numpy as np

from marl_llm.coaching import ChatCoach, CoachGuide, coached, of_client
from marl_llm.sampling.requests import Completion
from marl_llm.serving import ChatServer
from marl_llm.text import ByteTokenizer
from marl_llm.tools.chat import ChatClient, ChatReply, OpenAICompatible
from marl_llm.workflows import Controller, PlainText, Role, Task, Workflow, plain, repeat, shared
from marl_llm.workflows.samples import sample_table


class Counting:
    """A model without a model that says of every action a number, and counts how often it was asked."""

    def __init__(self):
        self.asked, self.most, self._now, self._lock = collections.Counter(), 0, 0, threading.Lock()

    def __call__(self, messages, options) -> ChatReply:
        with self._lock:
            self.asked[messages[1]["content"]] += 1
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.001)
        with self._lock:
            self._now -= 1
        return ChatReply(f"as it is\nSCORE: {len(messages[1]['content']) % 11}", "stop", 100, 6)


class Echo:
    """Answers every request with its identity."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    async def generate(self, request) -> Completion:
        """See `Generator`."""
        tokens = np.asarray([*self._tokenizer.encode(f"{request.seed}"), *self._tokenizer.stop_ids], np.int32)
        zeros = np.zeros(tokens.size)
        return Completion(tokens, zeros, zeros, zeros, "stop", 0)


def measure(plays: int, turns: int, concurrency: int) -> dict:
    """Figures of one rollout."""
    tokenizer = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))
    role = Role("speaker", "{question} {said}", parse=plain("said"), writes={"said": ""}, max_tokens=64)
    workflow = Workflow("loop", repeat(role, at_most=turns), ("question",), start={"said": ""})
    guide, model = CoachGuide("One speaker.", {"speaker": "speaks"}), Counting()
    tasks = [Task(number, {"question": f"q{number}"}) for number in range(plays)]
    start, cpu = time.perf_counter(), time.process_time()
    with ChatServer({"coach": model}, concurrency=concurrency) as server:
        with ChatClient(OpenAICompatible(server.url, "coach", None), concurrency=concurrency) as client:
            played = coached(workflow, ChatCoach(of_client(client), guide), guide)
            with Controller(played, shared(played), Echo(tokenizer), PlainText(tokenizer, tokenizer.stop_ids)) as controller:
                rollout = controller.play(tasks)
            counts = client.metrics()
    rows = sample_table(rollout).samples
    return dict(
        actions=len(rows), scored=sum("coach" in row.components for row in rows), asked=sum(model.asked.values()),
        asked_twice=sum(count > 1 for count in model.asked.values()), calls=counts["chat/calls"], retries=counts["chat/retries"],
        aborted=sum(episode.aborted for episode in rollout.episodes), most_at_once=model.most,
        seconds=round(time.perf_counter() - start, 1), cpu_seconds=round(time.process_time() - cpu, 1),
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )  # fmt: skip


if __name__ == "__main__":
    flags = argparse.ArgumentParser()
    for name, default in (("plays", 1000), ("turns", 9), ("concurrency", 64)):
        flags.add_argument(f"--{name}", type=int, default=default)
    print(json.dumps(measure(**vars(flags.parse_args())), indent=1))
