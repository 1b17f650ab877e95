"""A Qwen3-style decoder in plain NumPy float64, one token sequence at a time, written to be read beside the report."""

import numpy as np


def norm(x, weight, epsilon):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * weight


def rotate(x, position, theta):
    """Rotary embedding of one head at one position: pair i is (x[i], x[i + d/2]), turned by position * theta^(-2i/d)."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-2.0 * np.arange(half) / x.shape[-1])
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def forward(config, params, tokens):
    """Logits `[L, V]` of one sequence without padding: token i sees tokens 0 ... i, or the last ones of them in a layer with a window."""
    params = {name: _double(value) for name, value in params.items()}
    x = params["embedding"][tokens]
    length, group = len(tokens), config.query_heads // config.key_value_heads
    for y in range(config.layers):
        block = params[f"block_{y}"]
        attention = block["attention"]
        h = norm(x, block["attention_norm"]["weight"], config.norm_epsilon)
        q, k, v = (np.einsum("lD,Dhd->lhd", h, attention[name]["kernel"]) for name in ("query", "key", "value"))
        q = norm(q, attention["query_norm"]["weight"], config.norm_epsilon)
        k = norm(k, attention["key_norm"]["weight"], config.norm_epsilon)
        q = np.stack([rotate(q[i], i, config.rope_theta) for i in range(length)])
        k = np.stack([rotate(k[i], i, config.rope_theta) for i in range(length)])
        mixed = np.zeros((length, config.query_heads, config.head_dim))
        for i in range(length):
            first = max(0, i + 1 - config.window(y)) if config.window(y) else 0
            for head in range(config.query_heads):
                kept = k[first : i + 1, head // group] @ q[i, head] / np.sqrt(config.head_dim)
                weights = np.exp(kept - kept.max())
                mixed[i, head] = (weights / weights.sum()) @ v[first : i + 1, head // group]
        x = x + np.einsum("lhd,hdD->lD", mixed, attention["output"]["kernel"])
        h = norm(x, block["feed_forward_norm"]["weight"], config.norm_epsilon)
        gate = h @ block["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ block["up"]["kernel"])) @ block["down"]["kernel"]
    x = norm(x, params["final_norm"]["weight"], config.norm_epsilon)
    return x @ (params["embedding"].T if config.tie_embeddings else params["output"])


def response_log_probs(config, params, prompt, response, temperature=1.0):
    """Log-prob of every response token `[R]` and the entropy at its place `[R]`, under softmax(logits / temperature)."""
    logits = forward(config, params, np.concatenate([prompt, response]))[len(prompt) - 1 : -1] / temperature
    log_softmax = logits - logits.max(-1, keepdims=True)
    log_softmax = log_softmax - np.log(np.exp(log_softmax).sum(-1, keepdims=True))
    return log_softmax[np.arange(len(response)), response], -np.sum(np.exp(log_softmax) * log_softmax, -1)


def _double(tree):
    return {k: _double(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)
