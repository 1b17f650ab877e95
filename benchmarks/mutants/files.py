"""Faults in how files that somebody else made are read and shown."""

DATA, RUNS, HOSTILE = "tests/test_data_files.py", "tests/viewing/test_viewing.py", "tests/viewing/test_hostile_runs.py"

FAULTS = {
    ("marl_llm/data_files.py", DATA): {
        "a file of any number of rows is read": ("if most is not None and rows > most:", "if False:"),
        "parquet may unpack to anything": ("left -= _weight(row)", "left -= 0"),
        "a swollen gzip file is read": ("number, left = number + 1, left - len(line)", "number, left = number + 1, left"),
        "a byte-order mark in front of an empty line is a row": ("line.removeprefix(codecs.BOM_UTF8).strip()", "line.strip()"),
    },
    ("marl_llm/games/search/data.py", DATA): {
        "an article is an accepted answer": ("if normalise_answer(one))", "if one)"),
    },
    ("marl_llm/viewing/runs.py", RUNS): {
        "a search does not normalise": ('unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())', "text.lower()"),
        "a search looks at the names of fields": ("yield from _texts(item)", "yield from _texts(item)\n        yield from value if isinstance(value, Mapping) else ()"),
    },
    ("marl_llm/viewing/runs.py", HOSTILE): {
        "plays of other types are shown": ("episodes.validate_episode(play)", "play", HOSTILE),
        "tokens of other types are shown": ("episodes.validate_tokens(tokens, play)", "play", HOSTILE),
    },
}  # fmt: skip
