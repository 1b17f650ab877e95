"""Faults in how files that somebody else made are read and shown."""

DATA, RUNS, HOSTILE = "tests/test_data_files.py", "tests/viewing/test_viewing.py", "tests/viewing/test_hostile_runs.py"

FAULTS = {
    ("marl_llm/models/tensor_files.py", "tests/models/test_hostile_checkpoints.py"): {
        "a header of any number of tensors is read": ("bounds=HEADER_BOUNDS, ", ""),
    },
    ("marl_llm/runs/sections.py", "tests/experiments/test_config.py"): {
        "a rate that is set is replaced": ("isinstance(by_models, ByModels) and values[field.name] is None:", "isinstance(by_models, ByModels):"),
        "one model with adapters is enough": ("2 if all(options.get(\"lora_rank\") for options in checkpoints)", "2 if any(options.get(\"lora_rank\") for options in checkpoints)"),
        "random models beside checkpoints count": ('checkpoints = [options for options in trained if options.get("path")]', "checkpoints = trained"),
    },
    ("marl_llm/runs/run_files.py", "tests/experiments/test_run_files.py"): {
        "the first plays are kept alone": ("kept = [*first, *worst_plays(others, WORST)]", "kept = first"),
        "the worst of all plays are kept": ("[len(first) :] if count", " if count"),
        "the worst plays before training are kept": ('if count and when != "before" else []', "if count else []"),
    },
    ("marl_llm/reporting/episodes.py", "tests/reporting/test_episodes.py"): {
        "the best plays count as the worst": ("sorted(sorted(played, key=score)[:count])", "sorted(sorted(played, key=score)[-count:])"),
        "an aborted play is a worst one": ('if episode["status"] != "aborted"]', "]"),
    },
    ("marl_llm/workflows/storage.py", "tests/workflows/test_workflow_storage.py"): {
        "an episode of several paths is not found by one of them": ("if names.intersection(_path_names(episode, when))", "if record_name(episode, when) in names"),
    },
    ("marl_llm/data_files.py", DATA): {
        "a file of any number of rows is read": ("if most is not None and rows > most:", "if False:"),
        "parquet may unpack to anything": ("left -= _weight(row)", "left -= 0"),
        "a swollen gzip file is read": ("number, left = number + 1, left - len(line)", "number, left = number + 1, left"),
        "a byte-order mark in front of an empty line is a row": ("line.removeprefix(codecs.BOM_UTF8).strip()", "line.strip()"),
    },
    ("marl_llm/games/search/data.py", DATA): {
        "an article is an accepted answer": ("if normalise_answer(text))", "if text)"),
    },
    ("marl_llm/games/coding/data.py", DATA): {
        "a missing input is the text None": ("if any(line is None for line in lines):", "if False:"),
        "a long number of a test has no place": ("except (ValueError, RecursionError) as error:  # Python writes", "except RecursionError as error:  # Python writes"),
    },
    ("marl_llm/games/search/data.py", "tests/games/test_search_workflows.py"): {
        "a missing answer is not left out": ("if answer is not None and answer == answer]", "]"),
        "a list is an accepted answer": ("if unknown := [", "if unknown := [] and ["),
    },
    ("marl_llm/viewing/runs.py", RUNS): {
        "a search does not normalise": ('unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())', "text.lower()"),
        "a search looks at the names of fields": ("yield from _texts(item)", "yield from _texts(item)\n        yield from value if isinstance(value, Mapping) else ()"),
    },
    ("marl_llm/viewing/onefile.py", RUNS): {
        "no play is all plays": ("    if most < 1:\n", "    if False:\n"),
    },
    ("marl_llm/viewing/terminal.py", HOSTILE): {
        "a role's name is obeyed by the terminal": ("visible(f\"[{number}] turn {step['turn']} {step['role']} read\")", "f\"[{number}] turn {step['turn']} {step['role']} read\""),
        "a tool's name is obeyed by the terminal": ("visible(use['node'])", "use['node']"),
    },
    ("marl_llm/viewing/runs.py", HOSTILE): {
        "plays of other types are shown": ("episodes.validate_episode(play)", "play", HOSTILE),
        "tokens of other types are shown": ("episodes.validate_tokens(tokens, play)", "play", HOSTILE),
        "scores of any size are averaged": ('is_bounded_number(score)', "isinstance(score, int | float)"),
        "rewards of any size are added up": ('check_number(reward, f"steps[{i}], {ascii(name):.60}", -LARGEST_REWARD, LARGEST_REWARD)', "pass"),
    },
    ("marl_llm/viewing/charts.py", HOSTILE): {
        "bands of any size are drawn": ("([_drawable(r.get(key)) for r in whole] for", "([r.get(key) for r in whole] for"),
    },
}  # fmt: skip
