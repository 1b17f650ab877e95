"""A teacher behind an endpoint: what it says is read whole, or is a failure of one line that names its address."""

import math
import threading
import time

import numpy as np
import pytest
from http_stand_in import HttpStandIn, read_body, send

from marl_llm.errors import TeacherError
from marl_llm.tools import teacher_endpoint
from marl_llm.tools.teacher_endpoint import StudentSample, TeacherEndpoint, TeacherServer, tail_log_probs

SAMPLE = StudentSample(np.asarray([1, 2]), np.asarray([3, 4, 5]))
KEY = "a-secret-key"


def told(prompt, top):
    """The log-probs of a teacher that gives token t the log-prob -t / 4, and finds 0 to `top - 1` the likeliest."""
    def entry(token):
        return {"logprob": -token / 4 - 1, "rank": token + 1, "decoded_token": f"<{token}>"}

    return [None, *({str(t): entry(t) for t in {token, *range(top)}} for token in prompt[1:])]


def answered(body):
    return 200, {"choices": [{"text": "", "prompt_logprobs": told(body["prompt"], body["prompt_logprobs"])}]}


class StandIn(HttpStandIn):
    """A server that answers its requests one after the other as `answers` say, and then with the last of them."""

    def __init__(self, *answers):
        super().__init__()
        self.answers, self.asked, self.keys, self._lock = list(answers), [], [], threading.Lock()

    def handle(self, handler):
        body = read_body(handler)
        with self._lock:
            self.asked.append((handler.path, body))
            self.keys.append(handler.headers.get("Authorization"))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        send(handler, *answer(body), {"Location": "/elsewhere/completions"})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(teacher_endpoint, "PAUSE_S", 0.01)
    monkeypatch.setenv("TEACHER_KEY", KEY)


def endpoint(url, timeout_s=20.0, vocab_size=50):
    return TeacherEndpoint(TeacherServer(url, "big", "TEACHER_KEY", timeout_s), vocab_size)


def changed(**fields):
    """A right answer with other fields in its choice."""
    def answer(body):
        status, said = answered(body)
        said["choices"][0] |= fields
        return status, said

    return answer


def test_samples_are_asked_for_as_ids_and_read_in_their_order():
    with StandIn(answered) as server:
        other = StudentSample(np.asarray([7]), np.asarray([8]))
        first, second = endpoint(server.url + "/").score([SAMPLE, other], top_k=2)
    path, body = next(asked for asked in server.asked if len(asked[1]["prompt"]) == 5)
    assert (path, body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == ("/v1/completions", [1, 2, 3, 4, 5], 2, 0)
    assert (body["model"], set(server.keys)) == ("big", {f"Bearer {KEY}"})
    np.testing.assert_allclose(first.log_probs, [-1.75, -2, -2.25])
    np.testing.assert_allclose(first.top_log_probs, [[-1, -1.25]] * 3)
    np.testing.assert_array_equal(first.top_ids, [[0, 1]] * 3)
    np.testing.assert_allclose(second.log_probs, [-3])
    np.testing.assert_allclose(tail_log_probs(first.top_log_probs), np.log1p(-np.exp(-1) - np.exp(-1.25)), rtol=1e-6)


def test_the_texts_of_ids_are_asked_for_and_hold_no_key():
    repeats = changed(prompt_logprobs=[None, {"3": {"decoded_token": f"<{KEY}>"}}, {"9": {"decoded_token": 5}}])
    with StandIn(answered, repeats) as server:
        assert endpoint(server.url).pieces([3, 9]) == {3: "<3>", 9: "<9>"}
        assert endpoint(server.url).pieces([3, 9]) == {3: "<[key]>"}


def test_nothing_is_scored_of_nothing():
    for prompt, response in (([], [1]), ([1], [])):
        with pytest.raises(ValueError, match="a teacher scores 1 or more behind 1"):
            StudentSample(np.asarray(prompt, int), np.asarray(response, int))


PASSING = (lambda _: (500, b"down"), lambda _: (429, b"busy"), lambda _: (200, b"{"), changed(prompt_logprobs=[None]))


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_asked_for_again(fault):
    with StandIn(fault, fault, answered) as server:
        np.testing.assert_allclose(endpoint(server.url).score([SAMPLE])[0].log_probs, [-1.75, -2, -2.25])
        assert len(server.asked) == 3


ENTRIES = told([1, 2, 3, 4, 5], 0)


def last(token="5", **fields):
    """An answer whose last token has these fields."""
    return changed(prompt_logprobs=[*ENTRIES[:-1], {token: fields}])


FAULTS = {
    "status": (lambda _: (503, b"down\nfor a while"), 4, "(unavailable): status 503: down for a while"),
    "refused": (lambda _: (400, b"no such model"), 1, "(refused): status 400: no such model"),
    "redirected": (lambda _: (302, b""), 1, "(refused): status 302"),
    "without log-probs": (changed(prompt_logprobs=None), 1, "(refused): its answers have no prompt_logprobs"),
    "no JSON": (lambda _: (200, b"<html>"), 4, "(bad_reply): the answer cannot be read: not JSON"),
    "NaN": (last(logprob=math.nan), 4, "(bad_reply): the answer cannot be read: a number that is not finite"),
    "no choice": (lambda _: (200, {"choices": []}), 4, "(bad_reply): the answer has not one choice"),
    "too few": (changed(prompt_logprobs=ENTRIES[:-1]), 4, "(bad_reply): prompt_logprobs are not one per token"),
    "another token": (changed(prompt_logprobs=[*ENTRIES[:-1], {"6": {"logprob": -1}}]), 4, "no entry of the token 5 in its place"),
    "positive": (last(logprob=0.5), 4, "(bad_reply): a log-prob of 0.5"),
    "vLLM's minus infinity": (last(logprob=-9999.0), 4, "(bad_reply): a log-prob of -9999"),
    "below all floats of 32 bits": (last(logprob=-1e300), 4, "(bad_reply): a log-prob of -1e+300"),
    "null": (last(logprob=None), 4, "(bad_reply): a log-prob that is no number but null"),
    "no number": (last(logprob="x"), 4, "(bad_reply): a log-prob that is no number but str"),
    "true": (last(logprob=True), 4, "(bad_reply): a log-prob that is no number but bool"),
    "no object": (changed(prompt_logprobs=[*ENTRIES[:-1], {"5": -1.0}]), 4, "(bad_reply): prompt_logprobs have no entry"),
    "its key": (lambda _: (400, KEY.encode()), 1, "status 400: [key]"),
    "its key where the message is cut": (lambda _: (400, b"x" * (500 - len(KEY) // 2) + KEY.encode()), 1, "status 400: xxx"),
    "what a terminal obeys": (lambda _: (400, b"\x1b[31mred\x00\r\n"), 1, "status 400: [31mred"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_teacher_that_does_not_answer_is_one_line_that_names_its_address(fault):
    answer, attempts, message = FAULTS[fault]
    with StandIn(answer) as server, pytest.raises(TeacherError) as found:
        endpoint(server.url).score([SAMPLE])
    line = str(found.value)
    assert (message in line, line.isprintable(), KEY[:6] in line, len(server.asked)) == (True, True, False, attempts), line
    assert line.startswith(f"the teacher 'big' at {server.url} gave no prompt log-probs")


def test_likeliest_tokens_must_be_as_many_as_were_asked_for_and_of_the_vocabulary():
    certain, twice = told([1, 2, 3, 4, 5], 2), told([1, 2, 3, 4, 5], 2)
    certain[-1] = {str(token): {"logprob": -0.1} for token in (0, 1, 5)}
    twice[-1] = {token: {"logprob": -1.5} for token in ("5", "05")}
    for server, vocab_size, message in (
        (StandIn(changed(prompt_logprobs=ENTRIES)), 50, "1 likeliest tokens in place of 2"),
        (StandIn(answered), 1, "the token '1', which the student's vocabulary of 1 has not"),
        (StandIn(changed(prompt_logprobs=certain)), 50, "probabilities of more than 1 together"),
        (StandIn(changed(prompt_logprobs=twice)), 50, "the token '05', which the student's vocabulary of 50 has not"),
    ):
        with server, pytest.raises(TeacherError, match=message):
            endpoint(server.url, vocab_size=vocab_size).score([SAMPLE], top_k=2)


def test_one_that_hangs_or_is_gone_fails_within_its_attempts_and_leaves_no_thread():
    hanging = threading.Event()
    start = time.monotonic()
    with StandIn(lambda body: hanging.wait(30) and answered(body) or answered(body)) as server:
        with pytest.raises(TeacherError, match=r"after 4 attempts \(deadline\): no complete answer in 0.2 s"):
            endpoint(server.url, 0.2).score([SAMPLE] * 20)
        hanging.set()
    with pytest.raises(TeacherError, match=r"after 4 attempts \(unavailable\)"):
        endpoint(server.url).score([SAMPLE])
    assert time.monotonic() - start < 15
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("teacher")] == []


def test_an_address_that_would_show_a_key_is_refused():
    for url, key_env, message in (
        ("ftp://x/v1", None, "not an http"),
        ("http://user:word@127.0.0.1/v1", None, "must not hold a user"),
        ("http://192.0.2.1/v1", "TEACHER_KEY", "would travel unencrypted"),
        ("https://192.0.2.1/v1", "NO_SUCH_VARIABLE", "holds no key"),
    ):
        with pytest.raises(ValueError, match=message):
            TeacherServer(url, "big", key_env)


def test_a_key_that_is_gone_is_named(monkeypatch):
    teacher = endpoint("http://127.0.0.1:9")
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(TeacherError, match=r"gave no prompt log-probs \(refused\): the environment variable TEACHER_KEY holds no key"):
        teacher.score([SAMPLE])
