"""Looks at runs: `python -m marl_llm view RUN [RUN ...]`.

    python -m marl_llm view runs/first                        a page on this machine, while the run goes on too
    python -m marl_llm view runs/first runs/second            two runs, compared on the same tasks
    python -m marl_llm view runs/first --html plays.html      one file to send
    python -m marl_llm view runs/first --report               its report.html and plots/, as they are now
    python -m marl_llm view runs/first --text                 the list of plays in the terminal
    python -m marl_llm view runs/first --text --play ID       one play in the terminal
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import webbrowser

READS = {"text": ("play", "search"), "html": ("most",), "": ("port", "no_browser")}  # way of looking, "" the browser -> its options


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser("marl_llm view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", nargs="+", help="a run directory")
    p.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0: a free one")
    p.add_argument("--no_browser", action="store_true", help="print the address and open nothing")
    p.add_argument("--html", metavar="FILE", help="write the page with the plays in it, and end")
    p.add_argument("--report", action="store_true", help="write report.html and plots/ into the run directory, and end")
    p.add_argument("--most", type=int, default=2000, help="plays of a run in that file, the last ones (%(default)s)")
    p.add_argument("--text", action="store_true", help="print to the terminal, and end")
    p.add_argument("--play", metavar="ID", help="with --text: this play")
    p.add_argument("--search", metavar="TEXT", default="", help="with --text: plays in whose texts this occurs")
    return p


def _why_idle(asked: argparse.Namespace) -> str:
    """Which option would have no effect and why; nothing where there is none."""
    ways = [way for way in ("text", "report", "html") if getattr(asked, way)]  # in this order they are carried out
    way = ways[0] if ways else ""
    reasons = {other: f"--{way} alone is carried out" for other in ways[1:]}
    for of, names in READS.items():
        if of != way:
            why = f"it goes with --{of}" if of else f"--{way} serves no page"
            reasons |= {name: why for name in names if getattr(asked, name) != parser().get_default(name)}
    if asked.play and asked.search:
        reasons["search"] = "--play names the play"
    return "".join([f"--{name} would have no effect: {why}" for name, why in reasons.items()][:1])


def main(argv: list[str] | None = None) -> int:
    """Carries the command out. 2: what was asked for is not there."""
    asked = parser().parse_args(argv)
    from marl_llm.reporting.files import LineError, replace_file
    from marl_llm.viewing.runs import StoredRun, ViewError

    try:
        if why := _why_idle(asked):
            raise ViewError(why)
        runs = [StoredRun(run) for run in asked.run]
        if asked.text:
            from marl_llm.viewing.terminal import list_text, play_text

            if asked.play:
                for run in runs:
                    run.refresh()
                print("\n\n".join(play_text(run, asked.play, sys.stdout.isatty()) for run in runs))
            else:
                print("\n\n".join(list_text(run, asked.search) for run in runs))
            return 0
        if asked.report:
            from marl_llm.viewing.onefile import write_report

            for run in runs:
                print(write_report(run.path))
            return 0
        if asked.html:
            from marl_llm.viewing.onefile import one_file

            page = one_file(runs, asked.most).encode()
            replace_file(asked.html, page)
            print(f"{pathlib.Path(asked.html).resolve()}: {len(page) / 2**20:.1f} MiB")
            return 0
        from marl_llm.viewing.server import ViewServer

        with ViewServer(runs, asked.port) as server:
            print(f"{server.url}   (Ctrl-C ends it)", flush=True)
            if not asked.no_browser:
                webbrowser.open(server.url)
            server.wait()
        return 0
    except KeyError as error:
        print(f"error: there is no play {error}; leave --play out for the list", file=sys.stderr)
        return 2
    except (ViewError, LineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
