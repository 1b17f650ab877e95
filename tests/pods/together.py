"""Three steps of a small team, on as many processes as there are: what `test_processes.py` runs. Prints one JSON line."""

import hashlib
import json
import pathlib
import sys

import jax
import numpy as np

from marl_llm.training import processes

how, devices, folder, begin, steps, cache = sys.argv[1:7]  # of the process, in all, of the run, steps of it, of compiled programs
background = "background" in sys.argv[7:]
count = processes.start(how, lost_after_s=60.0)
from marl_llm import training  # noqa: E402
from marl_llm.algorithms import make_recipe  # noqa: E402
from marl_llm.games import make_game  # noqa: E402
from marl_llm.models import init_params  # noqa: E402
from marl_llm.models.presets import make_model_config  # noqa: E402
from marl_llm.workflows import Assignment  # noqa: E402

jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
training.compile_quickly()
training.use_cpu_devices(int(devices) // count)
mesh = training.make_mesh()
game = make_game("plan_path", height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=2)
recipe = make_recipe("at_grpo", group_size=4, entropy_coef=0.02)  # few groups of an untrained model differ, and entropy moves it too
shape = make_model_config("nano", game.tokenizer.vocab_size)
spec = training.ModelSpec(shape, init_params(shape, jax.random.key(0)))
options = training.LearnerOptions(recipe, training.make_optimizer(), row_tokens=256, minibatch=4)
assignment = Assignment({role.name: "shared" for role in game.roles})
checkpoints, found = training.Checkpoints(pathlib.Path(folder), background=background), []
with processes.Watch(60.0), checkpoints, training.make_team(game, assignment, {"shared": spec}, options, mesh) as team:
    if int(begin):
        state = checkpoints.state(int(begin))
        like = team.policies()
        team.restore_start(checkpoints.restore_params(int(begin), like))
        team.restore(checkpoints.restore(int(begin), like), state)
    for step in range(int(begin), int(steps)):
        batch = team.play(step, first=4 * step, count=4)
        gradient = team.learn(batch, 1e-3)["shared"]["grad_norm"]
        processes.agreed_stop(step, False, samples=len(batch.tokens), norm=team.norm())
        ids = np.asarray(batch.tokens.ids)
        found.append(hashlib.sha256(ids.tobytes() + np.asarray(batch.table.team).tobytes()).hexdigest())
    checkpoints.save(int(steps), team.policies(), team.state())
    params = processes.fetch(team.policies()["shared"].params, mesh)
    if background:  # the arrays that are being written are given away
        team.learn(batch, 1.0)
        checkpoints.save(int(steps) + 1, team.policies(), team.state())
    total = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()
if processes.leads():
    print(json.dumps({"samples": found, "parameters": total, "processes": jax.process_count(), "devices": mesh.size, "gradient": gradient}))
