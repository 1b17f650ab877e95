"""Slow, readable NumPy twins of the functions under test: float64, one loop per index, no vectorisation to get wrong."""

import math

import numpy as np


def close(actual, desired, rtol):
    """Assert equality to `rtol` of the largest magnitude: entries that cancel to nearly nothing are judged on that scale too."""
    actual, desired = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
    assert actual.shape == desired.shape, (actual.shape, desired.shape)
    scale = np.max(np.abs(desired), initial=0.0)
    np.testing.assert_allclose(actual, desired, rtol=rtol, atol=rtol * scale)


def members(ids, where):
    """Rows of each group, in order."""
    groups = {}
    for row, group in enumerate(ids):
        if where[row]:
            groups.setdefault(int(group), []).append(row)
    return groups


def group_ids(keys, where):
    """Number the distinct keys in sorted order; -1 where masked."""
    distinct = sorted({tuple(int(x) for x in key) for key, ok in zip(keys, where) if ok})
    return np.array([distinct.index(tuple(int(x) for x in key)) if ok else -1 for key, ok in zip(keys, where)])


def group_relative(returns, ids, where, scale="std", ddof=1, epsilon=1e-6, weights=None, singleton="zero"):
    """Distance to the (weighted) mean of the group, over its spread."""
    weights = np.ones(len(returns)) if weights is None else np.asarray(weights, float)
    out = np.zeros(len(returns))
    rows_in_use = [row for row in range(len(returns)) if where[row]]
    for rows in members(ids, where).values():
        if len(rows) == 1 and singleton == "raw":
            out[rows[0]] = returns[rows[0]] / (1 + epsilon if scale in ("std", "range") else 1)
            continue
        if len({returns[row] for row in rows}) == 1:
            continue
        votes = sum(weights[row] for row in rows)
        mean = sum(weights[row] * returns[row] for row in rows) / votes
        spread = sum(weights[row] * (returns[row] - mean) ** 2 for row in rows)
        for row in rows:
            out[row] = returns[row] - mean
            if scale == "std":
                out[row] /= math.sqrt(spread / (votes - ddof if votes > ddof else 1)) + epsilon
            if scale == "range":
                out[row] /= max(returns[r] for r in rows) - min(returns[r] for r in rows) + epsilon
            if scale == "batch":
                out[row] /= np.std([returns[r] for r in rows_in_use], ddof=ddof) + epsilon
    return out


def leave_one_out(returns, ids, where):
    """Distance to the mean of the others; 0 for a group of one."""
    out = np.zeros(len(returns))
    for rows in members(ids, where).values():
        for row in rows:
            others = [returns[r] for r in rows if r != row]
            out[row] = returns[row] - sum(others) / len(others) if others else 0.0
    return out


def rewards_to_go(rewards, turn, chain, gamma, where, joint=False):
    """Discounted sum over this and later turns of the same chain."""
    out = np.zeros(len(rewards))
    for s in range(len(rewards)):
        later = {}
        for other in range(len(rewards)):
            if where[s] and where[other] and chain[other] == chain[s] and turn[other] >= turn[s]:
                later.setdefault(int(turn[other]), []).append(rewards[other])
        for t, paid in later.items():
            out[s] += gamma ** (t - turn[s]) * (sum(paid) / len(paid) if joint else sum(paid))
    return out


def gae(rewards, values, gamma, lam, where):
    """GAE on each row with the masked tokens cut out, then put back as zeros."""
    advantages, targets = np.zeros_like(rewards), np.zeros_like(rewards)
    for s in range(len(rewards)):
        tokens = [r for r in range(rewards.shape[1]) if where[s, r]]
        for place, r in enumerate(tokens):
            total = 0.0
            for later in range(place, len(tokens)):
                q = tokens[later]
                after = values[s, tokens[later + 1]] if later + 1 < len(tokens) else 0.0
                total += (gamma * lam) ** (later - place) * (rewards[s, q] + gamma * after - values[s, q])
            advantages[s, r], targets[s, r] = total, total + values[s, r]
    return advantages, targets


def ratio(new, old, where, level):
    """Importance ratio of each token, or of its row, laid out per token."""
    out = np.ones_like(new)
    for s in range(len(new)):
        tokens = [r for r in range(new.shape[1]) if where[s, r]]
        total = sum(new[s, r] - old[s, r] for r in tokens)
        for r in tokens:
            log = {"token": new[s, r] - old[s, r], "product": total}.get(level, total / len(tokens))
            out[s, r] = math.exp(log)
    return out


def clipped(new, old, advantages, low, high, level, dual, where):
    """PPO's loss per token, 0 where masked; `advantages` [S, R]."""
    out = np.zeros_like(new)
    rho = ratio(new, old, where, level)
    for s, r in np.argwhere(where):
        a, x = advantages[s, r], rho[s, r]
        loss = max(-a * x, -a * min(max(x, 1 - low), 1 + high))
        out[s, r] = min(loss, -a * dual) if dual is not None and a < 0 else loss
    return out


def reduced(x, where, how, max_length=None, empty_rows=False):
    """Reduction of a per-token loss, row by row."""
    rows = [[x[s, r] for r in range(x.shape[1]) if where[s, r]] for s in range(len(x))]
    if how == "token_mean":
        return sum(map(sum, rows)) / max(sum(map(len, rows)), 1)
    count = len(rows) if empty_rows else max(sum(bool(row) for row in rows), 1)
    if how == "sequence_mean_token_mean":
        return sum(sum(row) / max(len(row), 1) for row in rows) / count
    return sum(map(sum, rows)) / count / (max_length if how == "constant" else 1)
