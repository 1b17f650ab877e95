"""What a step needs, counted: bytes and FLOPs of a decode step, a prefill and an update, and what a chip can do.

Counts are those of the algorithm, without recomputation unless the config asks for it: two FLOPs per multiply-add, every matrix product
of the model, and attention over the keys that a token sees (a causal row sees half of them). Times are the larger of FLOPs over the
chip's rate and bytes over its bandwidth: no program can be faster.
"""

from __future__ import annotations

import dataclasses

from marl_llm.models import ModelConfig

GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts them. Vendors' figures: dense bf16 FLOP/s, bytes of HBM, bytes/s."""

    name: str
    flops: float
    memory: float
    bandwidth: float


CHIPS = {
    c.name: c
    for c in (
        Chip("v4", 275e12, 32 * GIB, 1228e9),
        Chip("v5e", 197e12, 16 * GIB, 819e9),
        Chip("v5p", 459e12, 95 * GIB, 2765e9),
        Chip("v6e", 918e12, 32 * GIB, 1640e9),
        Chip("tpu7x", 1153.5e12, 96 * GIB, 3690e9),  # half a chip: JAX sees its two cores as two devices
        Chip("a100", 312e12, 80e9, 2039e9),
        Chip("rtx4090", 165.2e12, 24e9, 1008e9),
        Chip("h100", 989e12, 80e9, 3350e9),
        Chip("h200", 989e12, 141e9, 4800e9),
    )
}
CHIP_NAMES = {  # JAX's device_kind -> name in CHIPS
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e",
    "TPU7x": "tpu7x", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GeForce RTX 4090": "rtx4090",
}  # fmt: skip


def chip_of(kind: str) -> Chip | None:
    """The data sheet of JAX's `device_kind`, or None."""
    return CHIPS.get(CHIP_NAMES.get(kind) or next((name for name in ("h100", "h200") if name in kind.lower()), ""))


@dataclasses.dataclass(frozen=True)
class Work:
    """One phase on one device."""

    flops: float | int
    bytes: float | int

    def seconds(self, chip: Chip) -> float:
        """The roofline time."""
        return max(self.flops / chip.flops, self.bytes / chip.bandwidth)


def matrix_parameters(config: ModelConfig) -> int:
    """Scalars that a token is multiplied with: all that it meets but the embedding's lookup and the head."""
    ends = config.vocab_size * config.width * (1 if config.tie_embeddings else 2)
    return config.active_parameters - ends


def forward_flops(config: ModelConfig, tokens: float | int, seen: float | int, heads: float | int) -> float | int:
    """FLOPs of a forward pass over `tokens`, that see `seen` keys on average, and of the head at `heads` positions."""
    attention = 4 * config.layers * config.query_heads * config.head_dim * seen
    return tokens * (2 * matrix_parameters(config) + attention) + heads * 2 * config.vocab_size * config.width


def weight_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    """The weights that a decode step reads: those of the layers and of the head."""
    return (matrix_parameters(config) + config.vocab_size * config.width) * itemsize


def cache_bytes(config: ModelConfig, tokens: float | int, itemsize: int = 2) -> float | int:
    """Keys and values of `tokens`, all layers."""
    return tokens * 2 * config.layers * config.key_value_heads * config.head_dim * itemsize


def decode_step(
    config: ModelConfig, prompts: float | int, branches: int, prompt: int, response: int, tensor: int, itemsize: int = 2
) -> Work:
    """One token for `group_size` responses to each of `prompts` (on this device's share), half way through the response.

    The weights are read once, a prompt's cache once for all its branches.
    """
    rows = prompts * branches
    flops = forward_flops(config, rows, prompt + response / 2, rows) / tensor
    cache = cache_bytes(config, prompts * prompt + rows * response / 2, itemsize)
    return Work(flops, (weight_bytes(config, itemsize) + cache) / tensor)


def prefill(config: ModelConfig, prompts: float | int, prompt: int, tensor: int, itemsize: int = 2) -> Work:
    """The prompts once."""
    flops = forward_flops(config, prompts * prompt, prompt / 2, prompts) / tensor
    return Work(flops, (weight_bytes(config, itemsize) + cache_bytes(config, prompts * prompt, itemsize)) / tensor)


def update(
    config: ModelConfig, groups: float | int, branches: int, prompt: int, response: int, tensor: int, fsdp: int, adapters: int = 0
) -> Work:
    """One optimizer step on packed rows: forward, backward (twice that), what remat computes again; parameters and Adam's moments.

    A response token sees the prompt and half of its own branch. With so many parameters of `adapters` the weights are frozen: they are
    read, and the backward pass computes no gradient of them.
    """
    answers = groups * branches * response
    once = forward_flops(config, groups * prompt, prompt / 2, 0) + forward_flops(config, answers, prompt + response / 2, answers)
    weights = forward_flops(config, groups * prompt + answers, 0, answers)
    again = {"none": 0.0, "dots": 0.0, "full": 1.0}[config.remat]
    state = 4 * 7 * (adapters or config.parameters) + 4 * config.parameters * (adapters > 0)  # read p, m, v, g; write p, m, v in float32
    flops = once * (3 + again)
    if adapters:
        flops += 2 * adapters * (groups * prompt + answers) * (3 + again) - weights
    return Work(flops / tensor, state / (tensor * fsdp))


def scores(config: ModelConfig, groups: float | int, branches: int, prompt: int, response: int) -> float | int:
    """FLOPs of the attention scores of one pass over an optimizer step's rows. A backward pass that keeps none of them computes them again
    (FlashAttention, arXiv 2205.14135, section 3.1)."""
    seen = prompt * prompt / 2 + branches * response * (prompt + response / 2)
    return 2 * config.layers * config.query_heads * config.head_dim * groups * seen


def left_out(config: ModelConfig, tokens: float | int) -> float | int:
    """FLOPs that full remat does not compute again, though a layer's forward has them: its last product, which no gradient reads."""
    return 0 if config.experts else 2 * tokens * config.layers * config.width * config.feed_forward


def placements(
    config: ModelConfig,
    chip: Chip,
    models: int,
    positions: float | int,
    *,
    environments: int,
    groups: int,
    branches: int,
    prompt: int,
    response: int,
    tensor: int = 1,
    fsdp: int = 1,
    split_fsdp: int = 1,
    served: int = 0,
) -> dict[str, dict[str, float]]:
    """Seconds that decoding one turn and one round of optimizer steps take at least, for `models` of one shape, each with one role.

    "shared": every model has all `positions` (devices over tensor), by turns. "split": each has 1/`models` of them, at the same time.
    A wave is the decoding of one role's responses in all environments. As in Appendix G of Stronger-MAS, N roles that speak one after
    another are N waves whoever has the devices ("sequence", all tasks in step); side by side ("parallel"), or in an engine whose tasks
    have come to different roles, they are one wave of a split team, but N of a shared one, whose models take turns. A wave of a split
    team has `models` times as many rows per device. Communication is not counted.

    Args:
      environments, groups: tasks under way, and groups of an optimizer step, in all. fsdp, split_fsdp: devices that share a model's state.
      served: devices that share a layer's products while sampling; 0: `tensor`.
    """
    sizes, served = (branches, prompt, response), served or tensor

    def share(n):
        return environments * n * served / (positions * tensor)

    def wave(n):
        return response * decode_step(config, share(n), *sizes, served).seconds(chip)

    def step(n, f):
        return update(config, groups * n / positions, *sizes, tensor, f).seconds(chip)

    shared = {"sequence": models * wave(1), "parallel": models * wave(1), "update": models * step(1, fsdp)}
    return {"shared": shared, "split": {"sequence": models * wave(models), "parallel": wave(models), "update": step(models, split_fsdp)}}
