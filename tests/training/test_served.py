"""Who draws for a hosted team's models: what has no room is refused."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from test_team import ECHO, ENVIRONMENT, FIRST, GRPO, SECOND, SHAPE, SPEC, SPEECH

from marl_llm.models import init_params, make_model_config
from marl_llm.sampling.drafting import Draft, Drafter
from marl_llm.training import HostedTeam, Learner, LearnerOptions, ModelSpec, PlayOptions, make_mesh, make_optimizer
from marl_llm.training.mesh import serving_mesh
from marl_llm.training.served import check_drafts, check_pool, check_tensor, engines
from marl_llm.workflows import WorkflowError, separate, sequence


def model(preset):
    learner = object.__new__(Learner)  # its shape and place alone: no parameters are made
    learner.config, learner.mesh = make_model_config(preset, compute_dtype="bfloat16"), make_mesh(1)
    return learner, {}


@pytest.mark.parametrize(("gib", "several", "fits"), [(16, True, False), (16, False, True), (32, True, True), (None, True, True)])
def test_whole_copies_that_no_device_of_a_process_can_hold_are_refused_with_their_sizes(gib, several, fits, monkeypatch):
    """One process may split a model over its devices; where nothing is known of the memory, nothing is refused."""
    models, made = {"coder": model("qwen3-8b"), "tester": model("qwen3-1.7b")}, []
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": gib * 2**30} if gib else None)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr("marl_llm.training.processes.spans", lambda mesh: several)

    def make(mesh, models):
        made.append(models)
        raise InterruptedError

    why = r"has 16\.00 GiB, .* whole copy .*: 'coder' 15\.26 GiB, 'tester' 3\.\d\d GiB\. Use a smaller"
    with pytest.raises(InterruptedError if fits else WorkflowError, match=None if fits else why):
        engines(models, make)
    assert len(made) == fits


def test_a_common_pool_needs_two_models_of_one_shape_that_an_engine_draws_for():
    def learner(preset="qwen3-1.7b", sampler=None, base=None):
        made = model(preset)[0]
        made.spec, made.base = types.SimpleNamespace(sampler=sampler), base
        return made

    base = {}
    check_pool({"a": learner(), "b": learner(), "c": learner("qwen3-8b")}, "shared", ())
    for learners, together in (
        ({"a": learner(), "b": learner("qwen3-8b")}, ()),
        ({"a": learner(), "b": learner(sampler="server")}, ()),
        ({"a": learner(base=base), "b": learner(base=base)}, ("a", "b")),  # one scheduler
    ):
        check_pool(learners, "own", together)
        with pytest.raises(WorkflowError, match="play.block_pool='shared' would have no effect: no two models on the same devices"):
            check_pool(learners, "shared", together)
    with pytest.raises(WorkflowError, match="play.block_pool='common' is unknown; the ways are own, shared"):
        check_pool({}, "common", ())


def test_devices_share_what_is_sampled_from_otherwise_than_an_update():
    """Parameters lie along 'fsdp' while they learn; sampled whole on each device, or split by heads over two of four, a step plays and
    learns the same, and the next one, with what was learned, too. A device holds half of the matrices then."""
    config = dataclasses.replace(SHAPE, key_value_heads=2)
    options = LearnerOptions(GRPO, make_optimizer(), row_tokens=16, minibatch=8)
    mesh = make_mesh(1, 4, 1, devices=jax.devices()[:4])

    def played(tensor):
        specs = {name: ModelSpec(config, init_params(config, jax.random.key(n)), SPEECH) for n, name in enumerate(("first", "second"))}
        play = PlayOptions(max_num_seqs=4, decode_steps=2, tensor=tensor)
        with HostedTeam(ENVIRONMENT, separate(ENVIRONMENT.workflow), specs, options, mesh, play=play) as team:
            batches = [team.play(0, 0, 4)]
            team.learn(batches[0], 0.05, None)
            batches.append(team.play(1, 4, 4))
            (scheduler, _) = team._current.engine._all
            kernel = team.learners["first"].params["block_0"]["attention"]["query"]["kernel"]
            assert kernel.sharding.shard_shape(kernel.shape) == (4, 2, 8)  # width 16 over four
            draws = [(np.asarray(batch.tokens.ids), np.asarray(batch.tokens.log_probs)) for batch in batches]
            held = [(x.sharding.shard_shape(x.shape), x.shape) for x in jax.tree.leaves(scheduler.weights.params) if x.ndim > 1]
            return draws, {np.prod(whole) // np.prod(part) for part, whole in held}, scheduler.store.parts

    (whole, ways, parts), (split, halves, fewer) = played(None), played(2)
    assert (ways, parts) == ({1}, 4)
    assert (halves, fewer) == ({2}, 2)
    for (ids, log_probs), (others, expected) in zip(whole, split, strict=True):
        np.testing.assert_array_equal(ids, others)
        np.testing.assert_allclose(log_probs, expected, atol=2e-5)
    assert not np.array_equal(whole[0][0], whole[1][0])


def test_devices_that_cannot_share_a_copy_are_told():
    split, mesh = make_mesh(2, 2, 2), make_mesh(2, 4, 1)
    assert serving_mesh(split, None) is serving_mesh(split, 2) is split
    assert dict(serving_mesh(mesh, 4).shape) == {"data": 2, "fsdp": 1, "tensor": 4}
    assert [*serving_mesh(mesh, 4).devices.flat] == [*mesh.devices.flat]  # or a copy would travel further
    learner, _ = model("qwen3-8b")
    learner.mesh, learner.spec = mesh, types.SimpleNamespace(sampler=None)
    check_tensor({"coder": learner}, 2)
    for wrong in (0, 3, 8):
        with pytest.raises(WorkflowError, match=rf"play\.tensor={wrong} does not divide the 4 devices along 'fsdp'.* \(model 'coder'\)"):
            check_tensor({"coder": learner}, wrong)
    learner.mesh = split
    with pytest.raises(WorkflowError, match=r"play\.tensor=4 needs an update without mesh\.tensor, which is 2"):
        check_tensor({"coder": learner}, 4)
    learner.spec.sampler = "vllm"
    with pytest.raises(WorkflowError, match=r"play\.tensor=2 would have no effect"):
        check_tensor({"coder": learner}, 2)


def test_a_team_plays_the_same_with_drafts_and_counts_them_step_by_step(monkeypatch):
    def drafts(self, running):
        most = {s: min(self.draft_tokens, s.request.max_tokens - s.drawn - 1) for s in running}
        return {s: Draft(s.last_token.repeat(n), 2) for s, n in most.items() if n > 0}

    monkeypatch.setattr(Drafter, "drafts", drafts)
    monkeypatch.setattr(Drafter, "choose", lambda self, rows, places, drafts: self.columns[-1])
    flow = sequence(*(dataclasses.replace(role, max_tokens=6) for role in (FIRST, SECOND)))
    longer = dataclasses.replace(ENVIRONMENT, workflow=dataclasses.replace(ECHO, body=flow))
    options = LearnerOptions(GRPO, make_optimizer(), row_tokens=64, minibatch=8)

    def played(draft_tokens):
        play = PlayOptions(max_num_seqs=16, decode_steps=2, draft_tokens=draft_tokens)
        specs = dict.fromkeys(("first", "second"), SPEC)
        with HostedTeam(longer, separate(longer.workflow), specs, options, make_mesh(1), play=play) as team:
            return [team.play(step, 6 * step, 6) for step in range(2)]

    for drafted, plain in zip(played(3), played(0), strict=True):
        np.testing.assert_array_equal(drafted.tokens.ids, plain.tokens.ids)
        np.testing.assert_allclose(drafted.tokens.log_probs, plain.tokens.log_probs, atol=2e-5)
        figures = {name: value for name, value in drafted.figures.items() if name.startswith("draft/")}
        assert 0 < figures["draft/accepted"] < figures["draft/drafted"] < 3 * 2 * 6 * 4 * 6
        assert figures["draft/accepted_share"] == figures["draft/accepted"] / figures["draft/drafted"]
        assert 0 < figures["draft/saved_steps"] <= figures["draft/accepted"]
        assert figures["draft/steps"] > 0
        assert not any(name.startswith("draft/") for name in plain.figures)


def test_drafts_need_an_engine_and_promise_no_bytes():
    learner, _ = model("qwen3-1.7b")
    learner.spec = types.SimpleNamespace(sampler=None)
    check_drafts({"coder": learner}, 4, False)
    check_drafts({"coder": learner}, 0, True)
    with pytest.raises(WorkflowError, match=r"play\.draft_tokens=4: batch_invariant promises equal bytes"):
        check_drafts({"coder": learner}, 4, True)
    learner.spec.sampler = "vllm"
    with pytest.raises(WorkflowError, match=r"play\.draft_tokens=4 would have no effect: servers of their own draw"):
        check_drafts({"coder": learner}, 4, False)
