"""Writes tiny checkpoints of transformers and their figures to `tests/data/parity`. Needs the extra `parity`; the test suite does not.

    python tests/live/write_parity_data.py NAME ...        of `CASES`

A checkpoint has `config.json` as transformers 5 writes it and `config_legacy.json` with the keys of the checkpoints on the hub. The figures
are those of the same weights in float64: logits of rows padded on either side, log-probs, entropies, the gradient of the mean loss, a row
of 200 tokens, and greedy continuations, each step of which is a forward pass over the whole row.
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

DATA = pathlib.Path(__file__).parents[1] / "data" / "parity"
LENGTHS, WIDTH, LONG, DRAWN = (16, 9, 5, 1), 16, 200, 32  # tokens of the rows, and of what is drawn behind them
COMMON = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.15,
)  # fmt: skip
# name -> class, options, and the keys of the older generation in place of `rope_parameters`, `layer_types` and `dtype`
CASES = {
    "tiny-mistral": (
        "Mistral",
        dict(head_dim=16, sliding_window=5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        {"rope_theta": 1e4, "rope_scaling": None},
    ),
    "tiny-gemma3": (
        "Gemma3",
        dict(
            head_dim=16, sliding_window=5, query_pre_attn_scalar=24, tie_word_embeddings=True,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        {
            "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "tiny-smollm3": (
        "SmolLM3",
        dict(
            no_rope_layers=[1, 0, 1], no_rope_layer_interval=2, tie_word_embeddings=True, use_sliding_window=False,
            rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        ),
        {"rope_theta": 5e4, "rope_scaling": None},
    ),
}  # fmt: skip


def model_of(kind: str, options: dict) -> torch.nn.Module:
    """A model with nothing left at one or zero."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**(COMMON | options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def logits_of(model: torch.nn.Module, ids: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    return model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), position_ids=torch.tensor(positions)).logits


def picked(logits: torch.Tensor, ids: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the tokens behind the first."""
    return torch.log_softmax(logits[:, :-1] / temperature, -1).gather(-1, torch.tensor(ids[:, 1:]).long()[..., None])[..., 0]


def continued(model: torch.nn.Module, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """(greedy tokens, their log-probs, the smallest gap between the likeliest token and the next)."""
    drawn, scores, gap = [], [], np.inf
    for _ in range(DRAWN):
        logits = torch.log_softmax(logits_of(model, ids, mask)[:, -1], -1)
        best = torch.topk(logits, 2, dim=-1)
        gap = min(gap, float((best.values[:, 0] - best.values[:, 1]).min()))
        drawn.append(best.indices[:, 0].numpy())
        scores.append(best.values[:, 0].numpy())
        ids, mask = np.c_[ids, drawn[-1]], np.c_[mask, np.ones_like(drawn[-1])]
    return np.stack(drawn, 1).astype(np.int32), np.stack(scores, 1), gap


def figures(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """What `tests/models/test_parity.py` compares with, of a model in float64."""
    rng, lengths = np.random.default_rng(0), np.asarray(LENGTHS)[:, None]
    rows = [rng.integers(3, COMMON["vocab_size"], n) for n in LENGTHS]
    right = (np.arange(WIDTH)[None] < lengths).astype(np.int32)
    left = right[:, ::-1].copy()
    ids_right, ids_left = np.zeros((2, len(rows), WIDTH), np.int32)
    ids_right[right > 0] = ids_left[left > 0] = np.concatenate(rows)
    long = rng.integers(3, COMMON["vocab_size"], (1, LONG)).astype(np.int32)
    out = dict(ids_right=ids_right, mask_right=right, ids_left=ids_left, mask_left=left, long_ids=long)
    logits = logits_of(model, ids_right, right)
    probs = torch.log_softmax(logits, -1)
    loss = -(picked(logits, ids_right) * torch.tensor(right[:, 1:])).sum() / right[:, 1:].sum()
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    with torch.no_grad():
        out |= dict(
            logits64_right=logits.numpy(), loss=loss.numpy(), lp_T1_right=picked(logits, ids_right).numpy(),
            lp_T07_right=picked(logits, ids_right, 0.7).numpy(), ent_T1_right=-(probs.exp() * probs).sum(-1).numpy(),
            last_logits64_left=logits_of(model, ids_left, left)[:, -1].numpy(),
            long_lp=picked(logits_of(model, long, np.ones_like(long)), long).numpy(),
        )  # fmt: skip
        drawn, scores, gap = continued(model, ids_left, left)
    assert gap > 2e-4, f"two tokens are likeliest but for {gap}: float32 may draw the other"
    end = drawn[0, 10]
    ended = np.cumsum(drawn == end, 1) - (drawn == end) > 0
    out |= dict(gen_ids=drawn, gen_lp=scores, eos_id=np.asarray(end), gen_eos_ids=np.where(ended, 0, drawn))
    out |= dict(grad_names=np.asarray(list(gradients)), grad_norms=np.asarray([np.linalg.norm(g) for g in gradients.values()]))
    return out | {f"grad/{name}": g for name, g in gradients.items() if "norm" in name}


def write(name: str) -> None:
    kind, options, legacy = CASES[name]
    model = model_of(kind, options)
    model.save_pretrained(DATA / name)
    raw = json.loads((DATA / name / "config.json").read_text())
    older = {k: v for k, v in raw.items() if k not in ("rope_parameters", "layer_types", "dtype")}
    text = json.dumps(older | legacy | {"torch_dtype": "float32"}, indent=2)
    (DATA / name / "config_legacy.json").write_text(text + "\n")
    np.savez_compressed(DATA / f"parity_{name}.npz", **figures(model.double()))


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        write(chosen)
