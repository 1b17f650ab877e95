"""Builds and serves passage indexes.

python -m marl_llm.tools.retriever build --passages wiki.jsonl more.parquet --index DIR
python -m marl_llm.tools.retriever serve --index DIR --port 8000
python -m marl_llm.tools.retriever search --index DIR --topk 3 "who wrote the Iliad"
"""

import argparse
import json
import os
import signal
import sys
import time

from marl_llm.tools._chat_backends import read_key
from marl_llm.tools.retriever.bm25 import build_bm25
from marl_llm.tools.retriever.interface import LocalRetriever
from marl_llm.tools.retriever.passages import read_passages
from marl_llm.tools.retriever.server import RetrieverServer, open_index


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m marl_llm.tools.retriever", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="make a BM25 index from passages")
    build.add_argument("--passages", nargs="+", required=True, help=".jsonl, .jsonl.gz or .parquet files")
    build.add_argument("--index", required=True, help="a new directory")
    build.add_argument("--k1", type=float, default=0.9)
    build.add_argument("--b", type=float, default=0.4)
    build.add_argument("--stopwords", default="en", help="a language that bm25s knows, or 'none'")
    serve = commands.add_parser("serve", help="answer /retrieve over HTTP")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen; any other than this machine needs --key_env")
    serve.add_argument("--key_env", default=None, help="environment variable with the key that clients must send as a bearer token")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    serve.add_argument("--workers", type=int, default=1, help="processes that share the port and the mapped index")
    serve.add_argument("--deadline_s", type=float, default=30.0, help="per request")
    search = commands.add_parser("search", help="print the hits of one query")
    search.add_argument("query")
    for command in (serve, search):
        command.add_argument("--index", required=True)
        command.add_argument("--topk", type=int, default=3, help="hits per query")
        command.add_argument("--encoder", default=None, help="of a dense index: package.module:function")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    args = _parser().parse_args(arguments)
    start = time.monotonic()
    try:
        if args.command == "build":
            stopwords = None if args.stopwords == "none" else args.stopwords
            index = build_bm25(read_passages(args.passages), args.index, args.k1, args.b, stopwords, progress=sys.stderr.isatty())
            print(f"{args.index}: {len(index):,} passages, {len(index.vocabulary):,} words, {time.monotonic() - start:.1f} s")
            return 0
        retriever = open_index(args.index, args.encoder)
    except (OSError, ValueError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if args.command == "search":
        for hit in retriever.search([args.query], args.topk).outcome()[0]:
            print(f"{hit.score:.4f}  {json.dumps(hit.document, ensure_ascii=False)}")
        return 0
    return _serve(retriever, args, start)


def _serve(retriever: LocalRetriever, args: argparse.Namespace, start: float) -> int:
    try:
        key = read_key(args.key_env)
    except ValueError as error:
        print(f"--key_env: {error}", file=sys.stderr)
        return 2
    if args.workers < 1 or (args.workers > 1 and args.port == 0):
        print("--workers must be at least 1, and several need a --port of their own to share", file=sys.stderr)
        return 2
    children = []
    for _ in range(args.workers - 1):
        child = os.fork()
        if child == 0:
            children = []
            break
        children.append(child)
    try:
        server = RetrieverServer(retriever, args.host, args.port, args.topk, args.deadline_s, key, share_port=args.workers > 1)
    except ValueError as error:
        _end(children)
        print(f"--host={args.host}, --key_env={args.key_env}: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if len(children) == args.workers - 1:
        print(f"{server.url}/retrieve: {len(retriever.passages):,} passages, ready after {time.monotonic() - start:.2f} s", flush=True)
    try:
        server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _end(children)
    return 0


def _end(children: list[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


if __name__ == "__main__":
    sys.exit(main())
