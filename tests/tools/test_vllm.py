"""What a vLLM server answers is what was asked for, whole and consistent, or a failure: never an exception, never half of an answer."""

import json

import pytest
from misbehaving_server import MisbehavingServer as ChatServer

from marl_llm.tools import FailureKind, VllmServer
from marl_llm.tools._chat_backends import BackendError
from marl_llm.tools.vllm import Asked, SampledIds, VllmClient


class MisbehavingServer(ChatServer):
    """The same for requests that hold no messages."""

    def handle(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.seen.append(dict(body=body, headers=dict(handler.headers), path=handler.path))
        self.behave(handler, self.behaviours.popleft(), b'{"choices": []}')


ASKED = Asked(prompt=(3, 4), max_tokens=3, stop_ids=(9,), vocab_size=10, label="run-1", settings={"seed": 5}, timeout_s=20.0)


def answer(ids=(5, 9), finish="stop", **changes):
    content = [{"token_id": i, "logprob": -0.5, "rank": 1, "top_logprobs": []} for i in ids]
    choice = {"index": 0, "token_ids": list(ids), "finish_reason": finish, "stop_reason": None, "logprobs": {"content": content}}
    choice["weight_versions"] = [{"version": "run-1", "start": 0, "end": len(ids)}]
    return {"prompt_token_ids": [3, 4], "choices": [choice | changes]}


def asked_of(*behaviours, asked=ASKED):
    said = [one if isinstance(one, tuple) or not isinstance(one, dict) else (200, {}, json.dumps(one).encode()) for one in behaviours]
    with MisbehavingServer(*said) as server:
        client = VllmClient(VllmServer(server.url, "/shared"), concurrency=2)
        try:
            return [client.submit(asked).result() for _ in said], server.seen, client.stats()
        finally:
            client.close()


def test_ids_go_out_and_ids_with_log_probs_come_back():
    full = answer((1, 2, 9), "length")  # the budget's last token may be a stop id
    found, seen, stats = asked_of(answer(), answer((1, 2, 3), "length"), full)
    assert [one.outcome() for one in found[:2]] == [SampledIds((5, 9), (-0.5, -0.5), "stop"), SampledIds((1, 2, 3), (-0.5,) * 3, "length")]
    assert found[2].ok
    assert seen[0]["path"] == "/inference/v1/generate"  # /v1 of the address is left out
    drawing = dict(max_tokens=3, stop_token_ids=[9], ignore_eos=True, logprobs=0, detokenize=False, seed=5)
    assert seen[0]["body"] == {"token_ids": [3, 4], "return_token_ids": True, "sampling_params": drawing}
    assert stats == {"requests": 3, "failed": 0, "stale": 0}


def logprob(value):
    return answer(logprobs={"content": [{"token_id": 5, "logprob": value}, {"token_id": 9, "logprob": -0.5}]})


NONSENSE = {
    "no object": (200, {}, b"[1, 2]"),
    "no JSON": (200, {}, b"<html>"),
    "an empty answer": (200, {}, b""),
    "NaN": (200, {}, json.dumps(logprob(float("nan"))).encode()),
    "no choices": {"prompt_token_ids": [3, 4]},
    "two choices": answer() | {"choices": [*answer()["choices"]] * 2},
    "another prompt": answer() | {"prompt_token_ids": [4, 3]},
    "no ids": answer(()),
    "text in place of ids": answer(token_ids="ab"),
    "true is no id": answer(token_ids=[True, 9]),
    "an id outside of the vocabulary": answer((10, 9)),
    "a negative id": answer((-1, 9)),
    "more than the budget": answer((1, 2, 3, 4), "length"),
    "a stop id in the middle": answer((9, 5), "length"),
    "stopped without a stop id": answer((5, 6), "stop"),
    "cut short": answer((5,), "length"),
    "aborted": answer((5,), "abort"),
    "no reason": answer(finish_reason=None),
    "no log-probs": answer(logprobs=None),
    "too few log-probs": answer(logprobs={"content": [{"token_id": 5, "logprob": -0.5}]}),
    "log-probs of other ids": answer(logprobs={"content": [{"token_id": i, "logprob": -0.5} for i in (6, 9)]}),
    "a log-prob above 0": logprob(0.2),
    "a log-prob that stands for minus infinity": logprob(-9999.0),
    "a log-prob as text": logprob("-0.5"),
    "no versions": answer(weight_versions=None),
}


def test_nonsense_is_a_failure_and_no_answer():
    found, _, stats = asked_of(*NONSENSE.values())
    for name, one in zip(NONSENSE, found, strict=True):
        assert not one.ok, name
        assert one.failure.kind == FailureKind.BAD_REPLY, (name, one.failure)
    assert stats == {"requests": len(NONSENSE), "failed": len(NONSENSE), "stale": 0}


def test_what_other_parameters_drew_is_no_answer():
    def spans(*labels):
        return [{"version": one, "start": n, "end": n + 1} for n, one in enumerate(labels)]

    swapped = answer(weight_versions=spans("run-0", "run-1"))  # changed between two tokens
    short = answer(weight_versions=spans("run-1"))  # of the first token only
    back = answer(weight_versions=spans("run-1", "run-0"))
    late = answer(weight_versions=[{"version": "run-1", "start": 1, "end": 2}])  # of the last token only
    found, _, stats = asked_of(answer(weight_versions=spans("default", "default")), swapped, short, back, late)
    assert [one.failure.kind for one in found] == [FailureKind.UNAVAILABLE] * 5
    assert "drawn with the parameters 'default, default', not 'run-1'" in found[0].failure.message
    assert stats["stale"] == 5


def test_a_server_that_is_gone_or_refuses_says_so():
    refused = (400, {}, b'{"error": {"message": "max_model_len is 2"}}')
    found, _, _ = asked_of("drop", 503, refused, "short_json")
    assert [one.failure.kind.value for one in found] == ["unavailable", "unavailable", "refused", "bad_reply"]
    assert "max_model_len is 2" in found[2].failure.message
    assert "/inference/v1/generate" in found[0].failure.message


def test_a_reload_that_fails_resumes_the_server_all_the_same():
    done = (200, {}, b"{}")
    with MisbehavingServer(done, 500, done) as server:
        client = VllmClient(VllmServer(server.url, "/shared"), concurrency=1)
        with pytest.raises(BackendError, match="/collective_rpc: status 500"):
            client.reload("/shared/a", "run-1")
        assert [one["path"].partition("?")[0] for one in server.seen] == ["/pause", "/collective_rpc", "/resume"]
        client.close()
    busy = (200, {}, b'{"success": false}')
    with MisbehavingServer(done, done, busy, done) as server:
        client = VllmClient(VllmServer(server.url, "/shared"), concurrency=1)
        with pytest.raises(BackendError, match="prefix cache could not be reset"):
            client.reload("/shared/a", "run-1")
        assert len(server.seen) == 4  # and no new label
        client.close()


def test_a_key_travels_encrypted_or_not_at_all(monkeypatch):
    monkeypatch.setenv("VLLM_TEST_KEY", "secret-key")
    with pytest.raises(ValueError, match="would travel unencrypted to example.com"):
        VllmServer("http://example.com/v1", "/shared", "VLLM_TEST_KEY")
    with MisbehavingServer((401, {}, b"bad secret-key")) as server:
        client = VllmClient(VllmServer(server.url, "/shared", "VLLM_TEST_KEY"), concurrency=1)
        found = client.submit(ASKED).result()
        client.close()
        assert server.seen[0]["headers"]["Authorization"] == "Bearer secret-key"
    assert "secret-key" not in found.failure.message
