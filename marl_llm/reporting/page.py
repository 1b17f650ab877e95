"""The HTML of the report: escaping, small building blocks, and the style sheet. No data, no figures."""

import html
import math
from collections.abc import Iterable, Sequence

# C0 and C1 controls, and the marks that reorder text, would let a model's output disturb the page around it.
_CONTROLS = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"} | dict.fromkeys(range(0x7F, 0xA0), "\ufffd")
_CONTROLS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F], "\ufffd")
_CONTROLS |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # lone surrogates are no UTF-8


def visible(text: object) -> str:
    """`text` with control characters, reordering marks and lone surrogates made visible."""
    return str(text).translate(_CONTROLS)


def escape(text: object) -> str:
    """`text` as inert HTML, fit for element content and quoted attributes; see also `visible`."""
    return html.escape(visible(text), quote=True)


def percent(share: object, digits: int = 1) -> str:
    """A share in [0, 1] as "87.5 %"; "–" for anything that is no finite number."""
    return "–" if not is_number(share) else f"{100 * float(share):.{digits}f}\u00a0%"


def number(value: object, digits: int = 3) -> str:
    """A number with `digits` significant digits; "–" for anything that is no finite number."""
    if not is_number(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{float(value):.{digits}g}"


def is_number(value: object) -> bool:
    """Is `value` a finite int or float (and no bool)?"""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def duration(seconds: float | int) -> str:
    """Seconds as "2 min 52 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {s} s"


def missing(what: str, why: str) -> str:
    """A quiet paragraph in place of something that is not there."""
    return f'<p class="missing"><b>{escape(what)}</b> {escape(why)}</p>'


def section(title: str, body: str, intro: str = "") -> str:
    """A titled section; `body` is HTML, the rest is text."""
    lead = f'<p class="intro">{escape(intro)}</p>' if intro else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def details(summary: str, body: str) -> str:
    """A collapsed block; `summary` and `body` are HTML."""
    return f"<details><summary>{summary}</summary>{body}</details>"


def title(name: str) -> str:
    """The name of a metric as words, e.g. "All passed" of all_passed."""
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways on a narrow screen; `head` is text, cells are HTML."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def document(title: str, body: str) -> str:
    """The whole page: nothing in it refers to another file or host."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # no script, no request, whatever slips in
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{CSS}</style></head>\n'
        f"<body><main>{body}</main></body></html>\n"
    )


# Each series has one hex value per theme. Charts are drawn with the light ones and refer to these variables in the page.
LIGHT = ("#2a6fbb", "#d0661c", "#2f8f57", "#8457b8", "#c2403a", "#1b8a99", "#9a6b1f", "#b0478c")
DARK = ("#6aa9ee", "#f09a57", "#6cc48d", "#b795e4", "#f0827b", "#5cc3d0", "#d4ab63", "#e58cc6")
GRID, MUTED = "#dde1e6", "#5b6470"  # grid lines, axis text

CSS = (
    f":root{{--muted:{MUTED};--grid:{GRID};"
    + "color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1c222b;--soft:#eef1f5;"
    + "--good:#1f7a45;--good-bg:#e2f4e9;--bad:#a63530;--bad-bg:#fbe9e7;--wall:#4a5361;"
    + "".join(f"--s{i}:{c};" for i, c in enumerate(LIGHT))
    + "}@media (prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1b2129;--ink:#e4e8ee;--muted:#9aa5b3;--grid:#343d4a;"
    + "--soft:#252d38;--good:#7fd6a0;--good-bg:#173626;--bad:#f3a09a;--bad-bg:#40201e;--wall:#8b97a8;"
    + "".join(f"--s{i}:{c};" for i, c in enumerate(DARK))
    + "}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:28px;line-height:1.2;margin:2px 0 8px;letter-spacing:-.01em}
h2{font-size:20px;margin:44px 0 4px}h3{font-size:16px;margin:0}h4{font-size:14px;margin:0}
p{margin:6px 0}a{color:var(--s0)}
.kicker,.label{color:var(--muted);font-size:12px;letter-spacing:.05em;text-transform:uppercase}
.summary{font-size:17px;max-width:46em}.intro,.note,footer{color:var(--muted);max-width:52em}
.note{font-size:13px}footer{margin-top:48px;font-size:13px}
code,pre,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.92em}
code{overflow-wrap:anywhere}
pre{margin:6px 0;padding:8px 10px;background:var(--soft);border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere;
max-height:22em;overflow:auto;unicode-bidi:isolate}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:14px 0}dt{color:var(--muted)}
dd{margin:0;min-width:0;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:14px 16px;min-width:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,200px),1fr));gap:12px;margin:16px 0}
.value{font-size:25px;font-weight:600;letter-spacing:-.01em;white-space:nowrap}.value small{font-size:15px;font-weight:400;
color:var(--muted)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px;margin:14px 0}
figure{margin:0}figcaption{margin-bottom:8px}figcaption p{color:var(--muted);font-size:13px;margin:2px 0}
figure svg{display:block;width:100%;height:auto}figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figure svg text{font-family:inherit!important}
.scroll{overflow-x:auto;margin:12px 0}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--grid);vertical-align:top}
th{color:var(--muted);font-weight:500;font-size:13px;white-space:nowrap}
td code,td b,td .note{white-space:nowrap;overflow-wrap:normal}
.bar{position:relative;display:inline-block;width:clamp(80px,12vw,140px);height:10px;border-radius:5px;background:var(--soft)}
.bar i,.bar b{position:absolute;top:0;bottom:0}.bar i{background:var(--s0);opacity:.35;border-radius:5px}
.bar b{width:3px;margin-left:-1.5px;top:-3px;bottom:-3px;background:var(--s0);border-radius:2px}
.missing{color:var(--muted);border:1px dashed var(--grid);border-radius:8px;padding:10px 14px;margin:10px 0}
.alarms{border-left:4px solid var(--bad);background:var(--bad-bg);border-radius:6px;padding:8px 16px;margin:18px 0}
.alarms ul{margin:4px 0;padding-left:18px}
details{margin:6px 0}.turn details{display:inline-block;vertical-align:top;margin:4px 16px 0 0}
.turn details[open]{display:block;margin-right:0}summary{cursor:pointer;color:var(--muted);font-size:13px}
.chip{display:inline-block;padding:0 8px;border-radius:10px;background:var(--soft);color:var(--muted);font-size:12px;
line-height:20px;white-space:nowrap;margin-right:4px}
.chip.good{background:var(--good-bg);color:var(--good)}.chip.bad{background:var(--bad-bg);color:var(--bad)}
.play{margin:18px 0 30px}.sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px;
margin-top:10px;align-items:start}
.side>header{display:flex;flex-wrap:wrap;gap:6px;align-items:center;padding-bottom:8px;border-bottom:1px solid var(--grid)}
.turn{display:grid;grid-template-columns:auto minmax(0,1fr);gap:12px;padding:12px 0;border-top:1px solid var(--grid)}
.turn:first-of-type{border-top:0}.turn.plain{grid-template-columns:minmax(0,1fr)}
.who{font-weight:600}.who i{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:6px}
.map{display:block;width:116px;height:auto}.branches td,.branches th{font-size:13px;padding:4px 10px 4px 0}
.branches tr.chosen td{font-weight:600}.branches td:first-child{max-width:22em;overflow-wrap:anywhere;white-space:pre-wrap;
unicode-bidi:isolate}
@media (max-width:560px){main{padding:18px 14px 40px}h1{font-size:23px}dl{grid-template-columns:1fr}dt{margin-top:6px}
.card{padding:12px}.map{width:92px}}
@media print{details{display:none}.card{break-inside:avoid}}
"""
)
