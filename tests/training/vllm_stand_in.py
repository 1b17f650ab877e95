"""A server on a real socket that speaks vLLM 0.32's protocol of tokens and parameters, and draws with this library's own engine.

What it takes and what it answers was compared with the real one (tests/live/vllm_sampler.py): the same paths, fields and forms.
"""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
from http_stand_in import HttpStandIn, read_body, send

from marl_llm.models import load_pretrained, log_probs
from marl_llm.sampling import Engine, EngineConfig, Request, SamplingParams

SIZES = EngineConfig(max_num_seqs=16, prompt_tokens=4, response_tokens=2, decode_steps=2, admit=16)
DRAWING = {"max_tokens", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "detokenize", "temperature", "seed"}
_score = jax.jit(lambda config, params, ids: log_probs(config, params, ids[None]).log_probs[0], static_argnums=0)


class StandIn(HttpStandIn):
    """One model behind `url`. What a test may set:

    Attributes:
      label: of the parameters; a server that has just been started says "default".
      answers: how many more requests are answered before the server is gone; None: all.
      stubborn: whether it answers a reload and keeps what it has.
      spoil: what it makes of the object that it would answer a prompt with: another object, or bytes.
      asked, reloads: bodies of the prompts, and directories, in order.

    Args:
      key, identities: the root of its draws, and what the seed of a prompt stands for; without them its draws are its own.
    """

    def __init__(self, config, params, key=None, identities=None):
        super().__init__()
        self.engine = Engine({"policy": (config, params)}, jax.random.key(3) if key is None else key, sizes=SIZES)
        self._identities = identities or {}
        self.config, self.params, self.label = config, params, "default"
        self.answers, self.stubborn, self.paused, self.spoil = None, False, False, lambda answer: answer
        self.asked, self.reloads, self._lock = [], [], threading.Lock()

    def __exit__(self, *_):
        super().__exit__()
        self.engine.close()

    def handle(self, handler):
        body = read_body(handler)
        path = handler.path.partition("?")[0]
        with self._lock:
            gone = self.answers == 0
            if path == "/inference/v1/generate" and not gone:
                self.asked.append(body)
                self.answers = None if self.answers is None else self.answers - 1
        if gone:
            handler.close_connection = True
            return  # the connection ends without an answer
        does = {
            "/inference/v1/generate": self._generate, "/collective_rpc": self._reload, "/reset_prefix_cache": lambda _: {"success": True},
            "/update_weight_version": self._name, "/pause": lambda _: self._pause(True), "/resume": lambda _: self._pause(False),
        }  # fmt: skip
        send(handler, *(200, does[path](body)) if path in does else (404, {"detail": "Not Found"}))

    def _pause(self, paused):
        self.paused = paused
        return {"status": "paused" if paused else "resumed"}

    def _reload(self, body):
        assert body["method"] == "reload_weights"
        assert self.paused
        self.reloads.append(body["kwargs"]["weights_path"])
        if not self.stubborn:
            config, params = load_pretrained(self.reloads[-1])
            assert dataclasses.replace(config, tie_embeddings=self.config.tie_embeddings) == self.config
            self.engine.set_params("policy", params)
            self.params = params
        return {"results": [None]}

    def _name(self, body):
        assert self.paused
        self.label = body["new_version"]
        return {"success": True, "new_version": self.label}

    def _generate(self, body):
        prompt, p = body["token_ids"], body["sampling_params"]
        assert set(p) <= DRAWING, set(p) - DRAWING
        answer = {"model": "policy", "output_mode": "tokens", "prompt_token_ids": prompt if body.get("return_token_ids") else None}
        if "prompt_logprobs" in p:
            values = np.asarray(_score(self.config, self.params, jnp.asarray(prompt, jnp.int32)))
            scores = [{str(i): {"logprob": float(x), "rank": 1, "decoded_token": None}} for i, x in zip(prompt[1:], values[1:])]
            answer["prompt_logprobs"] = [None, *scores]
            ids, drawn, finish = [0], [-1.0], "length"
        else:
            seed = self._identities.get(p["seed"], tuple(p["seed"] >> shift & (2**31 - 1) for shift in (32, 1)))
            request = Request(
                tuple(prompt), seed, p["max_tokens"], settings=SamplingParams(p["temperature"]), stop_ids=tuple(p["stop_token_ids"])
            )
            done = self.engine.submit(request).result()
            ids, drawn, finish = done.tokens.tolist(), done.log_probs.tolist(), done.finish
        content = [{"token_id": i, "logprob": x, "rank": 1, "top_logprobs": []} for i, x in zip(ids, drawn)]
        choice = {"index": 0, "token_ids": ids, "finish_reason": finish, "stop_reason": None, "logprobs": {"content": content}}
        choice["weight_versions"] = [{"version": self.label, "start": 0, "end": len(ids)}]
        return self.spoil(answer | {"choices": [choice]})
