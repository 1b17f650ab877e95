"""Ten families' chat templates, rendered by transformers and here: the same text. Needs the extra `parity`.

    pip install -e '.[test,parity]' && python -m pytest tests/live/templates_with_transformers.py
"""

import datetime
import pathlib
import sys

import pytest
import transformers
from tokenizers import Tokenizer, models

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "text"))
from checkpoint_text import SPECIALS, template_of

from marl_llm.text.jinja import JinjaTemplate
from marl_llm.text.loading import TOOL, TRIALS
from marl_llm.text.messages import as_dicts

THINKING = [{}, {"enable_thinking": False}]
OPTIONS = {"qwen3": THINKING, "glm4.6": THINKING, "llama3.2": [{"date_string": "1 May 2026"}]}


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("family", SPECIALS)
def test_a_template_renders_as_transformers_has_it(family, generate):
    ours = template_of(family)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), **ours.special_tokens)
    rendered, refused = 0, set()
    for trial in TRIALS:
        tooled = any(reply.tool_calls for reply in trial.replies)
        messages = list(trial.start)
        for reply, heard in zip(trial.replies, trial.heard, strict=True):
            messages += [reply, *heard]
        tools = [TOOL] if tooled else []
        for options in OPTIONS.get(family, [{}]):
            asked = dict(tools=tools or None, chat_template=ours.source, tokenize=False, add_generation_prompt=generate, **options)
            try:
                wanted = theirs.apply_chat_template(as_dicts(messages), **asked)
            except Exception as error:
                with pytest.raises(ValueError, match="refuses"):
                    ours.render(messages, tools, generate, **options)
                refused.add(type(error).__name__)
                continue
            now = JinjaTemplate(ours.source, ours.special_tokens, datetime.datetime.now())
            assert now.render(messages, tools, generate, **options) == wanted
            rendered += 1
    assert rendered >= 3
    assert refused <= {"TemplateError", "UndefinedError", "TypeError"}
