"""The update of one model from the rows of a rollout.

Rows are groups in packed form (a prompt once, its K responses beside it). The whole update is one per-device program: the rows of all
devices are gathered (they are small: ids and a few floats), advantages are computed over all of them, and a loop of minibatches
follows in which each device takes its share of every minibatch, a micro-batch at a time, and sums and counts are added over micro-batches
and devices before the division. So loss and gradient depend on neither (law 5), and statistics over "the whole batch" are truly that.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from marl_llm.algorithms import Recipe, Samples, advantages_for, count_for
from marl_llm.games import Game
from marl_llm.models import TRAIN, ModelConfig, score_responses
from marl_llm.models.sharding import ways
from marl_llm.rollout import Table, flatten_rows, pad_to
from marl_llm.training.mesh import data_axis, gathered, over_data, position
from marl_llm.training.policy import Policy
from marl_llm.training.steps import exact_step, microbatch_size, policy_loss


class Rows(NamedTuple):
    """Training rows of one model: G groups of K responses. Padded rows (`where` False) carry no weight."""

    prompt: Int[Array, "G P"]
    prompt_where: Bool[Array, "G P"]
    tokens: Int[Array, "G K R"]
    token_where: Bool[Array, "G K R"]
    log_probs: Float[Array, "G K R"]  # of the distribution that was sampled from
    team: Float[Array, "G K"]
    local: Float[Array, "G K"]
    env: Int[Array, "G"]
    agent: Int[Array, "G"]
    turn: Int[Array, "G"]
    trajectory: Int[Array, "G"]  # env * B + play
    where: Bool[Array, "G"]


def buffer_sizes(games: list[Game]) -> tuple[int, int]:
    """The longest prompt and the longest response of any role of any game, in tokens."""
    roles = [r for game in games for r in game.roles]
    return max(r.prompt_tokens for r in roles), max(r.response_tokens for r in roles)


def rows_from(game: Game, tables: dict[str, Table], env: Int[Array, "E"], prompt_tokens: int, response_tokens: int) -> Rows:
    """Stacks the tables of all roles, padded to common lengths. Agents are numbered in the order of `game.roles`."""
    parts = []
    for agent, name in enumerate(r.name for r in game.roles):  # not the dict's order: JAX sorts a dict's keys
        t, e, b, k, _ = tables[name].responses.tokens.shape
        table = flatten_rows(pad_to(tables[name], prompt_tokens, response_tokens, k, game.tokenizer.pad_id))
        grid = jnp.meshgrid(jnp.arange(t), env, jnp.arange(b), indexing="ij")
        turn, env_id, play = (x.reshape(-1).astype(jnp.int32) for x in grid)
        parts.append(
            Rows(
                table.prompt.ids,
                table.prompt.where,
                table.responses.tokens,
                table.responses.where,
                table.responses.sampled_log_probs,
                table.rewards.team,
                table.rewards.local,
                env_id,
                jnp.full_like(env_id, agent),
                turn,
                env_id * b + play,
                table.where,
            )
        )
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def fingerprint(rows: Rows) -> Int[Array, "G"]:
    """A 32-bit hash of each row's prompt ids, blind to padding, for the check that groups compare like with like (law 3)."""

    def mix(h, column):
        token, real = column
        new = (h ^ token.astype(jnp.uint32)) * jnp.uint32(16_777_619)  # FNV-1a over tokens, with a final xor-shift
        return jnp.where(real, new ^ (new >> 15), h), None

    start = jnp.full(rows.where.shape, 2_166_136_261, jnp.uint32)
    h, _ = jax.lax.scan(mix, start, (rows.prompt.T, rows.prompt_where.T))
    return jax.lax.bitcast_convert_type(h, jnp.int32)


def to_samples(rows: Rows) -> Samples:
    """The flat `[S]` table that `advantages_for` reads; S = G K. A branch of a tree shares its row's trajectory."""
    k = rows.tokens.shape[1]
    spread = lambda x: jnp.repeat(x, k)  # noqa: E731
    return Samples(
        instance=spread(rows.env),
        env=spread(rows.env),
        agent=spread(rows.agent),
        turn=spread(rows.turn),
        trajectory=spread(rows.trajectory),
        team=rows.team.reshape(-1),
        local=rows.local.reshape(-1),
        where=spread(rows.where),
        tokens=jnp.sum(rows.token_where, axis=-1).reshape(-1),
        prompt_ids=spread(fingerprint(rows)),
    )


def make_update(
    recipe: Recipe,
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    minibatch: int,
    epochs: int = 1,
    microbatch_tokens: int = 0,
    permute_rewards: bool = False,
):
    """Builds `update(policy, reference, rows, plays, learning_rate, key) -> (policy, metrics)`, jit-compiled, rows sharded over 'data'.

    Args:
      recipe: how rows become advantages and a loss. minibatch: groups per optimizer step, over all devices.
      epochs: passes over the rows. permute_rewards: the control that breaks the link between a row and its reward.
      microbatch_tokens: tokens (P + K R of each group) whose activations live at a time on a device; a group is never cut. 0: all at once.
    `rows` are those of all roles, so that statistics may run over the whole team; `plays [N]` says which agents the model plays and is
    trained on. Models of one architecture share the compiled function. `reference` is the parameters of the KL term (None when
    `recipe.kl_coef` is 0), `key` orders the rows. The policy is donated.
    Metrics: loss, clip_fraction, kl, entropy, grad_norm (mean over optimizer steps), log_prob_gap (largest |sampler - scorer| before
    the first step), updates, groups, the share of each agent's rows that are tied, and those of `advantages_for`.
    """
    axis = data_axis(mesh)
    devices = mesh.shape["data"] if axis else 1
    if minibatch < 1 or minibatch % devices:
        raise ValueError(f"minibatch={minibatch} groups do not divide over {devices} devices; choose a multiple of {devices}")
    if epochs < 1:
        raise ValueError(f"epochs={epochs}: the update must pass over its rows at least once")
    share = minibatch // devices
    microbatch_size(microbatch_tokens, 1, 1)  # refuses what is negative before anything is traced

    def local(policy: Policy, reference, rows: Rows, plays, learning_rate, key):
        rows = gathered(rows, axis)
        # one order for any number of devices: by identity, not by where a row was computed
        order = jnp.lexsort((rows.trajectory, rows.env, rows.turn, rows.agent))
        rows = jax.tree.map(lambda x: x[order], rows)
        g, k = rows.tokens.shape[:2]
        if permute_rewards:
            moved = jax.random.permutation(jax.random.fold_in(key, g), g)
            rows = rows._replace(team=rows.team[moved], local=rows.local[moved])
        with jax.named_scope("advantages"):
            flat, extra, tied = advantages_for(recipe, to_samples(rows))
            advantages, tied = flat.reshape(g, k), tied.reshape(g, k)
        mine = rows.where & plays[rows.agent]
        equal = jnp.all(tied, axis=-1)
        for agent in range(plays.shape[0]):
            rows_of = rows.where & (rows.agent == agent)
            extra[f"tied_share/{agent}"] = jnp.sum(equal & rows_of) / jnp.maximum(jnp.sum(rows_of), 1)
        useful = mine & ~(equal if recipe.skip_tied else jnp.zeros((g,), bool))
        count = jnp.sum(useful)
        # tied groups that are skipped may still count in the denominator (a stated field of the recipe)
        units = lambda w: count_for(recipe, where=(rows.token_where & w[:, None, None]).reshape(g * k, -1))  # noqa: E731
        dilution = units(mine) / jnp.maximum(units(useful), 1) if recipe.tied_in_denominator else 1.0
        steps = (count + minibatch - 1) // minibatch
        size = jnp.where(steps > 0, (count + steps - 1) // jnp.maximum(steps, 1), 0)  # even minibatches
        device = position(axis)

        size_of = rows.prompt.shape[1] + k * rows.tokens.shape[2]
        micro = microbatch_size(microbatch_tokens, size_of, share, ways("batch") if axis is None else 1)
        most = -(-share // micro)

        def loss_of(index, weight):
            """The loss of the groups at `index`, of which those with weight count, `micro` of them at a time."""

            def loss(params, j):
                part = lambda x: jax.lax.dynamic_slice_in_dim(x, j * micro, micro)  # noqa: E731
                at = part(index)
                take = jax.tree.map(lambda x: x[at], rows)
                where = take.token_where & part(weight)[:, None, None]
                scored = score_responses(config, params, take.prompt, take.prompt_where, take.tokens, recipe.temperature)
                ref = None
                if recipe.kl_coef:
                    ref = score_responses(config, reference, take.prompt, take.prompt_where, take.tokens, recipe.temperature).log_probs
                merge = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
                return policy_loss(
                    recipe,
                    *map(merge, (scored.log_probs, scored.entropy, take.log_probs)),
                    advantages[at].reshape(-1),
                    merge(where),
                    None if ref is None else merge(jax.lax.stop_gradient(ref)),
                )

            return loss

        def minibatch_step(i, carry):
            policy, sums, worst, epoch_key = carry
            epoch, j = i // jnp.maximum(steps, 1), i % jnp.maximum(steps, 1)
            dice = jax.random.uniform(jax.random.fold_in(epoch_key, epoch), (g,))
            ranked = jnp.argsort(jnp.where(useful, dice, 2.0))
            place = jnp.arange(most * micro) * devices + device
            rank = j * size + place
            weight = (place < size) & (rank < count)
            index = ranked[jnp.minimum(rank, g - 1)]
            batches = (jnp.sum(weight) + micro - 1) // micro  # groups that count come first, so the rest costs nothing
            policy, means, gap = exact_step(
                policy, loss_of(index, weight), batches, most, learning_rate, optimizer, axis, dilution
            )
            sums = jax.tree.map(jnp.add, sums, means) if sums is not None else means
            worst = jnp.where(i == 0, gap, worst)
            return policy, sums, worst, epoch_key

        shapes = jax.eval_shape(lambda c: minibatch_step(jnp.int32(0), c)[1], (policy, None, jnp.float32(0), key))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        policy, sums, gap, _ = jax.lax.fori_loop(
            0, steps * epochs, minibatch_step, (policy, zero, jnp.float32(0), key)
        )
        n = jnp.maximum(steps * epochs, 1)
        metrics = {name: value / n for name, value in sums.items()} | extra
        metrics |= {"log_prob_gap": gap, "updates": steps * epochs, "groups": jnp.sum(mine), "useful_groups": count}
        return policy, metrics

    mapped = over_data(local, mesh, TRAIN, in_specs=(P(), P(), P("data"), P(), P(), P()), out_specs=(P(), P()))
    return jax.jit(mapped, donate_argnums=(0,))
