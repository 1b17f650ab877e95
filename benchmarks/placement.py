"""When is a team faster on parts of the devices? Roofline times of `config.placement` for N models and K candidates; nothing is run.

    python -m benchmarks.placement [--preset=qwen3-1.7b] [--topology=h100:8] [--environments=64] [--prompt=1024] [--response=512]

N roles, each with a model of its own, on all devices by turns ("shared") and on 1/N of them each ("split"); see
`marl_llm.training.roofline.placements`. N need not divide the devices here. Prints a Markdown table: seconds of decoding one turn in
sequence and in parallel, and of one optimizer step of all models, shared / split.
"""

from __future__ import annotations

import argparse

from marl_llm.models import make_model_config
from marl_llm.training.roofline import CHIPS, placements

CANDIDATES = (1, 4)  # K


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="qwen3-1.7b")
    parser.add_argument("--topology", default="h100:8")
    for name, value in (("environments", 64), ("groups", 8), ("prompt", 1024), ("response", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    o = parser.parse_args()
    chip, devices = o.topology.split(":")
    shape, sizes = make_model_config(o.preset), dict(environments=o.environments, groups=o.groups, prompt=o.prompt, response=o.response)
    names = ("sequence", "parallel", "update")
    print("| N |" + "".join(f" K = {k}: {name} |" for k in CANDIDATES for name in names) + "\n" + "|---" * (1 + 3 * len(CANDIDATES)) + "|")
    for n in range(1, 8):
        estimates = [placements(shape, CHIPS[chip], n, int(devices), branches=k, **sizes) for k in CANDIDATES]
        cells = [f"{estimate['shared'][name]:.3f} / {estimate['split'][name]:.3f}" for estimate in estimates for name in names]
        print(f"| {n} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
