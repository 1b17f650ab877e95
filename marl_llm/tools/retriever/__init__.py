"""Passage retrieval: BM25 and dense, in process and over HTTP, behind one interface.

`python -m marl_llm.tools.retriever build --passages wiki.jsonl --index DIR` builds, `... serve --index DIR` serves.
"""

from marl_llm.tools.retriever.bm25 import BM25Index, build_bm25
from marl_llm.tools.retriever.client import RetrieverClient, open_server
from marl_llm.tools.retriever.dense import DenseIndex, build_dense
from marl_llm.tools.retriever.interface import Hit, LocalRetriever, Retriever
from marl_llm.tools.retriever.passages import PassageStore, read_passages
from marl_llm.tools.retriever.server import RetrieverServer, open_index

__all__ = [
    "BM25Index",
    "DenseIndex",
    "Hit",
    "LocalRetriever",
    "PassageStore",
    "Retriever",
    "RetrieverClient",
    "RetrieverServer",
    "build_bm25",
    "build_dense",
    "open_index",
    "open_server",
    "read_passages",
]
