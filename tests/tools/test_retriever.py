"""The retriever: ranks against a BM25 written from its formula, files in and out, the server's form, and what is a failure."""

import asyncio
import collections
import functools
import http.client
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
from misbehaving_server import MisbehavingServer

from marl_llm.tools import BM25Index, DenseIndex, FailureKind, Hit, Retriever, RetrieverClient, build_bm25, build_dense
from marl_llm.tools.retriever import RetrieverServer, open_index, open_server, read_passages
from marl_llm.tools.retriever.words import words

K1, B = 0.9, 0.4


@functools.cache
def word_counts(texts: tuple[str, ...]) -> tuple[list[collections.Counter], list[int], collections.Counter]:
    """Words of each passage with their counts, its length, and in how many passages each word stands."""
    split = [re.findall(r"\w+", text.lower()) for text in texts]
    return (
        [collections.Counter(words) for words in split],
        [len(words) for words in split],
        collections.Counter(w for words in split for w in set(words)),
    )


def reference_bm25(texts: list[str], query: str, topk: int, k1: float = K1, b: float = B) -> list[tuple[int, float]]:
    """BM25 (Lucene's form), passage by passage; equal scores in the order of the passages; the smallest summand is added first."""
    counts, lengths, df = word_counts(tuple(texts))
    mean = sum(lengths) / len(lengths)
    query_counts = collections.Counter(re.findall(r"\w+", query.lower()))
    found = []
    for row, (tf, length) in enumerate(zip(counts, lengths)):
        summands = []
        for word, repeats in query_counts.items():
            if word in tf:
                idf = math.log(1 + (len(counts) - df[word] + 0.5) / (df[word] + 0.5))
                summands.append(repeats * idf * tf[word] / (tf[word] + k1 * (1 - b + b * length / mean)))
        if summands:
            found.append((-sum(sorted(summands)), row))
    return [(row, -negated) for negated, row in sorted(found)[:topk]]


def make_texts(seed: int, count: int, words: int, longest: int) -> list[str]:
    """Passages of Zipf-distributed words; short ones over a small vocabulary give many equal scores."""
    rng = random.Random(seed)
    names = [f"w{n}" for n in range(words)]
    return [" ".join(rng.choices(names, [1 / (n + 1) for n in range(words)], k=rng.randint(0, longest))) for _ in range(count)]


def passages_of(texts: list[str]) -> list[dict]:
    return [dict(id=str(row), contents=text) for row, text in enumerate(texts)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    texts = make_texts(0, 2000, 150, 14)
    return texts, build_bm25(passages_of(texts), tmp_path_factory.mktemp("bm25") / "index", stopwords=None)


def test_ranks_are_the_references(corpus):
    """Long and short queries, frequent and rare words, repeated and unknown ones, and more ties than places."""
    texts, index = corpus
    rng = random.Random(1)
    tied = 0
    for trial in range(120):
        words = [f"w{min(int(rng.paretovariate(0.6)) - 1, 160)}" for _ in range(rng.randint(1, 8))]
        query, topk = " ".join(words), (1, 2, 5, 40)[trial % 4]
        expected = reference_bm25(texts, query, topk + 1)
        found = index.rank([query], topk)[0]
        assert [row for row, _ in found] == [row for row, _ in expected[:topk]]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected[:topk]], rel=1e-12)
        tied += len({score for _, score in expected}) < len(expected)
    assert tied > 20


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.0, 0.4), (2.0, 0.0), (1.2, 1.0)])
def test_constants_reach_the_scores(tmp_path, k1, b):
    texts = make_texts(2, 300, 60, 12)
    index = build_bm25(passages_of(texts), tmp_path / "index", k1, b, stopwords=None)
    for query in ("w0 w1 w2", "w5 w30 w59"):
        expected = reference_bm25(texts, query, 10, k1, b)
        found = index.rank([query], 10)[0]
        assert [row for row, _ in found] == [row for row, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-12)


def test_a_score_does_not_depend_on_the_order_of_the_query(corpus):
    _, index = corpus
    words = "w0 w3 w9 w27 w81 w140".split()
    forms = [" ".join(words[shift:] + words[:shift]) for shift in range(6)]
    assert len({tuple(ranked) for ranked in index.rank(forms, 30)}) == 1


def test_equal_passages_come_in_their_order(tmp_path):
    index = build_bm25(passages_of(["b a", "a b", "a", "a b", "c"]), tmp_path / "index", stopwords=None)
    assert [row for row, _ in index.rank(["b"], 2)[0]] == [0, 1]
    assert [row for row, _ in index.rank(["A  B"], 5)[0]] == [0, 1, 3, 2]


def test_the_same_summands_in_another_order_are_the_same_score(tmp_path):
    """Four words in the same number of passages, in all distributions of 1, 2, 3 and 5 occurrences: 24 equal scores, in their order."""
    texts = [" ".join(" ".join([word] * n) for word, n in zip("abcd", counts)) for counts in itertools.permutations((1, 2, 3, 5))]
    index = build_bm25(passages_of([*texts, "e f", "g"]), tmp_path / "index", stopwords=None)
    ranked = index.rank(["d b a c"], 24)[0]
    assert [row for row, _ in ranked] == list(range(24))
    assert len({score for _, score in ranked}) == 1


def test_a_batch_is_its_queries_and_leaves_nothing_behind(corpus):
    _, index = corpus
    queries = [f"w{n} w{(7 * n) % 150}" for n in range(40)]
    together = index.rank(queries, 5)
    assert together == [index.rank([query], 5)[0] for query in reversed(queries)][::-1]
    assert not index._sums.any()


def test_threads_get_the_same(corpus):
    _, index = corpus
    queries = [f"w{n} w{n // 3} w{n // 9}" for n in range(60)]
    expected, found = index.rank(queries, 5), {}
    threads = [threading.Thread(target=lambda name=name: found.__setitem__(name, index.rank(queries, 5))) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[name] for name in range(4)] == [expected] * 4


def test_queries_that_match_nothing_have_no_hits(corpus):
    _, index = corpus
    assert index.search(["", "unknown", "?!", "w0"], 2).outcome()[:3] == [[], [], []]
    assert index.search([], 2).outcome() == []


def test_stop_words_are_left_out_of_both_sides(tmp_path):
    index = build_bm25(passages_of(["the cat and the dog", "the end"]), tmp_path / "index")
    assert index.rank(["the"], 5) == [[]]
    assert [row for row, _ in index.rank(["the CAT"], 5)[0]] == [0]
    assert "the" in index.stopwords


def test_jsonl_gzip_and_parquet_give_the_same_index(tmp_path):
    import gzip

    import pyarrow
    import pyarrow.parquet

    rows = [dict(id=n, title=f"T{n}", text=f"über wort{n % 7} 日本 \u2028 {n}", year=n) for n in range(30)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "p.jsonl").write_text(lines + "\n", encoding="utf-8")
    with gzip.open(tmp_path / "p.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    read = [list(read_passages([tmp_path / name])) for name in ("p.jsonl", "p.jsonl.gz", "p.parquet")]
    assert read[0] == read[1] == read[2]
    assert [passage["id"] for passage in read[0]] == list(range(30))
    assert read[0][3] == rows[3] | dict(contents=f"T3\n{rows[3]['text']}")
    index = build_bm25(read[2], tmp_path / "index", stopwords=None)
    assert [hit.document for hit in index.search(["ÜBER wort3 t3"], 1).outcome()[0]] == [read[0][3]]


def test_scripts_without_spaces_are_found_by_their_characters_and_pairs(tmp_path):
    passages = {
        "北京是中国的首都": ["首都", "北京", "都"],
        "上海在长江口": ["长江", "海"],
        "東京タワーは日本にあります": ["東京タワー", "日本", "ﾀﾜｰ", "あります"],
        "ประเทศไทยมีเมืองหลวงคือกรุงเทพ": ["เมืองหลวง", "กรุงเทพ"],
        "ពួកគេរស់នៅភ្នំពេញ": ["ភ្នំពេញ"],
        "ວຽງຈັນເປັນນະຄອນຫຼວງ": ["ນະຄອນ"],
        "ရန်ကုန်မြို့": ["မြို့"],
        "대한민국의 수도는 서울이다": ["서울이다", "대한민국의"],
        "हिन्दी भाषा": ["हिन्दी"],
        "GPT４模型 の Straße": ["gpt4", "模型", "STRASSE", "ＧＰＴ4"],
        "ein Café über der Spree": ["café", "ÜBER", "Café"],
    }
    index = build_bm25(passages_of(list(passages)), tmp_path / "index", stopwords=None)
    for row, queries in enumerate(passages.values()):
        for query in queries:
            assert [place for place, _ in index.rank([query], 1)[0]] == [row], query


def test_words_of_a_text():
    assert words("北京2008年, Tokyo東京!") == ["北", "京", "北京", "2008", "年", "tokyo", "東", "京", "東京"]
    assert words("กำ") == words("กํา")  # one letter or two, by NFKC
    assert words("naïve_case ＡＢＣ don't") == ["naïve_case", "abc", "don", "t"]
    assert words("我们", frozenset({"我"})) == ["们", "我们"]
    assert words("") == words("。、!　") == []


def test_an_index_whose_words_were_cut_by_an_older_rule_is_refused(tmp_path):
    build_bm25(passages_of(["one two"]), tmp_path / "index")
    about = tmp_path / "index" / "index.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | dict(format=1)))
    for opened in (BM25Index, open_index):
        with pytest.raises(ValueError, match="holds an index of kind 'bm25', format 1; expected kind 'bm25', format 2: build it again"):
            opened(tmp_path / "index")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"contents": "a"}\n{"contents": ', r"p\.jsonl, line 2: not JSON"),
        ("p.jsonl", "[1]\n", "line 1: a JSON list; expected an object"),
        ("p.jsonl", '{"id": 1, "body": "a"}\n', r"needs the field 'contents'.*\['body', 'id'\]"),
        ("p.jsonl", '{"id": 1, "text": "a"}\n{"id": "1", "text": "b"}\n', r"p\.jsonl, line 2: the id '1' occurs twice"),
        ("p.csv", "a,b", "unknown kind of file '.csv'; use .parquet, .jsonl"),
    ],
)
def test_bad_passages_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_passages([tmp_path / name]))


def test_a_failed_build_leaves_no_index_and_an_index_is_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match="has a word"):
        build_bm25(passages_of(["?", "!"]), tmp_path / "index")
    with pytest.raises(FileNotFoundError, match="holds no index"):
        BM25Index(tmp_path / "index")
    build_bm25(passages_of(["a1"]), tmp_path / "index")
    with pytest.raises(FileExistsError, match="never overwritten"):
        build_bm25(passages_of(["a1"]), tmp_path / "index")
    with pytest.raises(ValueError, match="k1 must"):
        build_bm25(passages_of(["a1"]), tmp_path / "other", b=1.5)


def test_a_cut_or_foreign_index_is_refused(tmp_path):
    build_bm25(passages_of(["one two", "three"]), tmp_path / "index")
    blob = tmp_path / "index" / "passages.jsonl"
    blob.write_bytes(blob.read_bytes()[:-3])
    with pytest.raises(ValueError, match="build the index again"):
        BM25Index(tmp_path / "index")
    about = tmp_path / "index" / "index.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | dict(format=99)))
    with pytest.raises(ValueError, match="format 99"):
        BM25Index(tmp_path / "index")


def encode(texts):
    """Two features that need no model."""
    return np.asarray([[len(text), text.count("a")] for text in texts], np.float32)


def test_dense_ranks_are_exact_with_ties_in_order(tmp_path):
    rng = np.random.default_rng(0)
    embeddings = rng.integers(-3, 4, (500, 2)).astype(np.float32)
    index = build_dense(passages_of([f"p{n}" for n in range(500)]), embeddings, tmp_path / "index", encode)
    queries = ["aa b", "xyz", "aaaaaaaa"]
    for query, ranked in zip(queries, index.rank(queries, 25)):
        scores = embeddings @ encode([query])[0]
        expected = sorted(range(500), key=lambda row: (-scores[row], row))[:25]
        assert ranked == [(row, float(scores[row])) for row in expected]
    assert index.search(["aa b"], 1).outcome()[0][0].document["contents"] == f"p{index.rank(['aa b'], 1)[0][0][0]}"
    assert isinstance(index, Retriever)


def test_dense_blocks_do_not_change_the_ranks(tmp_path, monkeypatch):
    embeddings = np.random.default_rng(1).integers(-2, 3, (97, 2)).astype(np.float32)
    index = build_dense(passages_of([str(n) for n in range(97)]), embeddings, tmp_path / "index", encode)
    whole = index.rank(["ab", "a"], 10)
    monkeypatch.setattr("marl_llm.tools.retriever.dense.BLOCK", 10)
    assert index.rank(["ab", "a"], 10) == whole


def test_dense_input_is_checked(tmp_path):
    passages = passages_of(["a", "b"])
    with pytest.raises(ValueError, match="2 passages and 3 embeddings"):
        build_dense(passages, np.zeros((3, 2), np.float32), tmp_path / "index", encode)
    with pytest.raises(ValueError, match="not finite"):
        build_dense(passages, np.full((2, 2), np.nan, np.float32), tmp_path / "index", encode)
    build_dense(passages, np.zeros((2, 2), np.float32), tmp_path / "index", encode)
    wrong = DenseIndex(tmp_path / "index", lambda texts: np.zeros((len(texts), 3), np.float32))
    with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
        wrong.rank(["a"], 1)
    with pytest.raises(ValueError, match="how queries are encoded"):
        open_index(tmp_path / "index")
    assert open_index(tmp_path / "index", "test_retriever:encode").rank(["a"], 1) == [[(0, 0.0)]]


def post(url: str, body: bytes) -> tuple[int, dict]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_server_speaks_the_form_of_search_r1(corpus):
    _, index = corpus
    hits = index.search(["w3 w50", "unknown"], 3).outcome()
    with RetrieverServer(index, topk=2) as server:
        ask = dict(queries=["w3 w50", "unknown"], topk=3, return_scores=True)
        status, answer = post(server.url + "/retrieve", json.dumps(ask).encode())
        assert status == 200
        assert answer == dict(result=[[dict(document=hit.document, score=hit.score) for hit in hits[0]], []])
        assert set(answer["result"][0][0]["document"]) == {"id", "contents"}
        _, plain = post(server.url + "/retrieve", json.dumps(dict(queries=["w3 w50"])).encode())
        assert plain == dict(result=[[hit.document for hit in hits[0][:2]]])
        with urllib.request.urlopen(server.url + "/health", timeout=20) as health:
            assert json.loads(health.read()) == dict(status="ok", passages=2000)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "Expecting JSON"),
        (b"[]", "must be an object"),
        (b'{"queries": "one"}', "list of strings"),
        (b'{"queries": [1]}', r"queries[0] must be a string"),
        (b'{"queries": ["a"], "topk": 0}', "between 1 and"),
        (b'{"queries": ["a"], "topk": "3"}', "must be an integer"),
        (b'{"queries": ["a"], "topk": 1000000}', "between 1 and"),
    ],
)
def test_the_server_says_what_is_wrong(corpus, body, said):
    with RetrieverServer(corpus[1]) as server:
        status, answer = post(server.url + "/retrieve", body)
        assert status == 400
        assert said in answer["error"]
        assert post(server.url + "/search", b"{}")[0] == 404


def test_a_connection_serves_many_requests(corpus):
    with RetrieverServer(corpus[1]) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
        for _ in range(3):
            connection.request("POST", "/retrieve", b'{"queries": ["w1"], "topk": 1}', {"Content-Type": "application/json"})
            assert len(json.loads(connection.getresponse().read())["result"][0]) == 1
        connection.close()


def test_a_client_brings_the_key_that_its_environment_holds(corpus, monkeypatch):
    with RetrieverServer(corpus[1], key="s3cret") as server:
        for client, kind in ((RetrieverClient(server.url), FailureKind.REFUSED), (open_server(server.url), FailureKind.REFUSED)):
            assert client.search(["w1"], 2).failure.kind == kind
            client.close()
        monkeypatch.setenv("MARL_LLM_RETRIEVER_KEY", "s3cret")
        for client in (open_server(server.url), RetrieverClient(server.url, key_env="MARL_LLM_RETRIEVER_KEY")):
            assert client.search(["w1"], 2).ok
            client.close()
    with pytest.raises(ValueError, match="unencrypted"):
        RetrieverClient("http://127.0.0.1.evil.com/", key_env="MARL_LLM_RETRIEVER_KEY")


def test_the_client_is_the_index(corpus):
    _, index = corpus
    queries = [f"w{n} w{n * n % 150}" for n in range(20)] + ["", "unknown"]

    async def ask(retriever):
        several = await asyncio.gather(*(retriever.asearch(queries[n : n + 5], 4) for n in range(0, 20, 5)))
        return [hits for result in several for hits in result.outcome()]

    with RetrieverServer(index) as server:
        client = RetrieverClient(server.url)
        assert isinstance(client, Retriever)
        assert isinstance(index, Retriever)
        assert client.search(queries, 4).outcome() == index.search(queries, 4).outcome()
        assert asyncio.run(ask(client)) == asyncio.run(ask(index)) == index.search(queries[:20], 4).outcome()
        for retriever in (client, index):
            with pytest.raises(TypeError, match="single query into a list"):
                retriever.search("w1", 4)
        client.close()


def test_a_lost_server_is_a_failure_and_not_an_empty_result(corpus):
    with RetrieverServer(corpus[1]) as server:
        client = RetrieverClient(server.url, attempts=2)
    result = client.search(["w1"], 2)
    assert (result.value, result.failure.kind, result.attempts) == (None, FailureKind.UNAVAILABLE, 2)
    client.close()


GOOD = json.dumps(dict(result=[[dict(document=dict(id="1", contents="x"), score=1)]])).encode()


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (500, FailureKind.UNAVAILABLE),
        ("drop", FailureKind.UNAVAILABLE),
        ((200, {}, GOOD[:-4]), FailureKind.BAD_REPLY),
        ((200, {}, b'{"result": []}'), FailureKind.BAD_REPLY),
        ((200, {}, b'{"result": [[{"document": "x", "score": 1}]]}'), FailureKind.BAD_REPLY),
        ((200, {}, b'{"result": [[{"document": {}, "score": null}]]}'), FailureKind.BAD_REPLY),
        (404, FailureKind.REFUSED),
    ],
    ids=str,
)
def test_the_client_against_a_server_that_misbehaves(behaviour, kind):
    class Strange(MisbehavingServer):
        def handle(self, handler):
            handler.rfile.read(int(handler.headers["Content-Length"]))
            self.behave(handler, self.behaviours.popleft() if self.behaviours else "ok", GOOD)

    with Strange(behaviour) as server:
        client = RetrieverClient(server.url)
        again = client.search(["a"], 1)
        if kind == FailureKind.REFUSED:
            assert again.failure.kind == kind
        else:
            assert again.outcome() == [[Hit(dict(id="1", contents="x"), 1.0)]]
            assert again.attempts == 2
        client.close()
    if kind != FailureKind.REFUSED:
        with Strange(behaviour, behaviour) as server:
            client = RetrieverClient(server.url, attempts=2)
            assert client.search(["a"], 1).failure.kind == kind
            client.close()


def test_deadlines(corpus):
    _, index = corpus

    class Slow(BM25Index):
        def _top(self, query, topk):
            time.sleep(0.05)
            return super()._top(query, topk)

    slow = Slow.__new__(Slow)
    slow.__dict__ = dict(index.__dict__)
    result = slow.search(["w1"] * 50, 1, deadline_s=0.1)
    assert result.failure.kind == FailureKind.DEADLINE
    with RetrieverServer(slow) as server:
        client = RetrieverClient(server.url)
        assert client.search(["w1"] * 50, 1, deadline_s=0.2).failure.kind == FailureKind.DEADLINE
        assert client.search(["w1"], 1).ok
        client.close()


def test_the_command_line_builds_searches_and_serves(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(dict(contents=f"planet number{n}")) + "\n" for n in range(20)))
    command = [sys.executable, "-m", "marl_llm.tools.retriever"]
    index = str(tmp_path / "index")
    subprocess.run([*command, "build", "--passages", str(tmp_path / "p.jsonl"), "--index", index], check=True, capture_output=True)
    found = subprocess.run([*command, "search", "--index", index, "--topk", "1", "number7"], check=True, capture_output=True, text=True)
    assert json.loads(found.stdout.split("  ", 1)[1]) == dict(id="7", contents="planet number7")
    for more, why in ((["--host", "0.0.0.0"], "give it a key"), (["--key_env", "NOT_SET_HERE"], "NOT_SET_HERE holds no key")):
        refused = subprocess.run([*command, "serve", "--index", index, *more], capture_output=True, text=True, timeout=60)
        assert (refused.returncode, why in refused.stderr, refused.stderr.count("\n")) == (2, True, 1)
    refused = subprocess.run([*command, "serve", "--index", str(tmp_path / "none")], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "holds no index" in refused.stderr
    with subprocess.Popen([*command, "serve", "--index", index, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split(":  ")[0].split("/retrieve")[0]
        client = RetrieverClient(url)
        assert client.search(["number3"], 1).outcome()[0][0].document["id"] == "3"
        client.close()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0


# ---- whatever a server or a client says (A8, A9)

DEEP = b'{"queries":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def answer_with(**hit) -> bytes:
    return json.dumps({"result": [[dict(document={"id": "1", "contents": "a"}, score=1.5) | hit]]}).encode()


class Answers(MisbehavingServer):
    """Gives its behaviours in answer to any body."""

    def handle(self, handler):
        handler.rfile.read(int(handler.headers["Content-Length"]))
        self.behave(handler, self.behaviours.popleft(), b"")


BAD_ANSWERS = {
    "deep": b'{"result":' + b"[" * 100_000, "huge score": answer_with(score=10**400), "nan": answer_with(score=math.nan),
    "inf": answer_with(score=math.inf), "true": answer_with(score=True), "no contents": answer_with(document={"id": "1"}),
    "contents": answer_with(document={"contents": 3}), "text": answer_with(document="a"), "digits": b"[" + b"9" * 5000 + b"]",
    "object": b'{"result": {"0": []}}', "null": b"null", "bytes": b"\xff\x00",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a8_an_answer_that_is_no_list_of_documents_is_a_bad_reply(name):
    with Answers((200, {}, BAD_ANSWERS[name])) as server:
        client = RetrieverClient(server.url, attempts=1)
        assert client.search(["a"], 1).failure.kind == FailureKind.BAD_REPLY
        client.close()


def test_a3_half_a_character_in_a_document_is_replaced():
    with Answers((200, {}, answer_with(document={"contents": "half \ud83d"}))) as server:
        client = RetrieverClient(server.url, attempts=1)
        assert client.search(["a\ud83d"], 1).outcome()[0][0].document == {"contents": "half \ufffd"}
        client.close()


def raw(url: str, head: str, body: bytes = b"") -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"POST /retrieve HTTP/1.1\r\nHost: {host}\r\n{head}\r\n\r\n".encode() + body)
        return connection.recv(65536)


@pytest.mark.parametrize(
    ("length", "status"), [("²", 400), ("-5", 400), ("1e3", 400), ("9" * 5000, 413), ("٣", 400), ("+3", 400), ("", 411), ("99999999", 413)]
)
def test_a9_a_length_that_is_none_is_answered(corpus, length, status):
    with RetrieverServer(corpus[1]) as server:
        answer = raw(server.url, f"Content-Length: {length}")
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (DEEP, "too_many"), (b'{"queries": [' + b"9" * 5000 + b"]}", "number"), (b"\xff\xfe", "not_json"), (b'{"queries": NaN}', "number"),
        (json.dumps({"queries": ["x" * 20_000]}).encode(), "20000 characters; at most 16384"),
        (b'{"queries": ["a"], "topk": 1e999}', "number"),
    ],
)  # fmt: skip
def test_a9_a_request_that_cannot_be_read_gets_400_and_the_reason(corpus, body, said):
    with RetrieverServer(corpus[1]) as server:
        status, answer = post(server.url + "/retrieve", body)
        assert (status, said in answer["error"]) == (400, True)


def test_a9_the_longest_query_takes_a_moment_and_a_longer_one_is_refused(corpus):
    index = corpus[1]
    longest = " ".join(f"w{n % 150}x{n}" for n in range(4000))[:16_384]
    tick = time.monotonic()
    assert index.search([longest], 5).ok
    assert time.monotonic() - tick < 2
    with pytest.raises(ValueError, match="at most 16384"):
        index.search([longest + "x"], 5)


@pytest.mark.parametrize("where", ["columns", "lock", "dense"])
def test_a9_the_deadline_is_looked_at_within_a_query(tmp_path, monkeypatch, corpus, where):
    index = corpus[1]
    if where == "dense":
        index = build_dense(passages_of(["a", "b", "c", "d"]), np.ones((4, 2), np.float32), tmp_path / "index", encode)
        monkeypatch.setattr("marl_llm.tools.retriever.dense.BLOCK", 1)
        monkeypatch.setattr(index, "_encode", lambda texts: time.sleep(0.02) or encode(texts))
    elif where == "columns":
        slow = index.vocabulary.column
        monkeypatch.setattr(index.vocabulary, "column", lambda word: time.sleep(0.01) or slow(word))
    else:
        index._lock.acquire()
    tick = time.monotonic()
    found = index.search([" ".join(f"w{n}" for n in range(400))], 5, deadline_s=0.01 if where == "dense" else 0.05)
    if where == "lock":
        index._lock.release()
    assert found.failure.kind == FailureKind.DEADLINE
    assert time.monotonic() - tick < 3  # 400 words at 0.01 s each would be 4 s
    assert where == "dense" or not index._sums.any()
