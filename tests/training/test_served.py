"""Who draws for a hosted team's models: what has no room is refused."""

import types

import jax
import pytest

from marl_llm.models import make_model_config
from marl_llm.training import Learner, make_mesh
from marl_llm.training.served import engines
from marl_llm.workflows import WorkflowError


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
