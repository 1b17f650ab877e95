"""Pictures of a workflow: Mermaid for Markdown and notebooks, SVG for a page that loads nothing.

Both are drawn from one list of boxes and arrows: roles are round, tools square, choices and loops diamonds; bars open and close what runs
at the same time.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping

from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.nodes import Call, Choose, Each, FunctionNode, Node, Repeat, Sequence, Stop, Together, Tool


@dataclasses.dataclass(frozen=True)
class DrawnBox:
    """One node of the picture. `shape` is one of role, tool, choice, bar, end."""

    name: str
    label: str
    shape: str


@dataclasses.dataclass(frozen=True)
class Arrow:
    """One edge; `back` marks the way back of a loop."""

    source: str
    target: str
    label: str = ""
    back: bool = False


@dataclasses.dataclass
class _Picture:
    """Boxes and arrows while they are drawn. An open end is a box with the label that its next arrow will have."""

    models: Mapping[str, str]
    boxes: list[DrawnBox]
    arrows: list[Arrow]

    def add(self, label: str, shape: str, ends: list[tuple[str, str]]) -> str:
        name = f"n{len(self.boxes)}"
        self.boxes.append(DrawnBox(name, label, shape))
        self.arrows += [Arrow(source, name, text) for source, text in ends]
        return name

    def draw(self, node: Node, ends: list[tuple[str, str]], exits: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Draws a node behind `ends` and returns its own open ends; those of a `stop` go to `exits`."""
        if isinstance(node, Call):
            model = self.models.get(node.role.name)
            return [(self.add(node.name + (f"\n({model})" if model else ""), "role", ends), "")]
        if isinstance(node, Tool):
            return [(self.add(node.name, "tool", ends), "")]
        if isinstance(node, Sequence):
            for part in node.parts:
                ends = self.draw(part, ends, exits)
            return ends
        if isinstance(node, Stop):
            exits += ends
            return []
        if isinstance(node, Choose):
            box = self.add(f"{node.name}?", "choice", ends)
            texts = {True: "yes", False: "no"}
            return [end for key, case in node.cases.items() for end in self.draw(case, [(box, texts.get(key, str(key)))], exits)]
        if isinstance(node, Together):
            bar = self.add("together", "bar", ends)
            inside = [end for part in node.parts for end in self.draw(part, [(bar, "")], exits)]
            return [(self.add("all done", "bar", inside), "")]
        if isinstance(node, Each):
            bar = self.add(f"each {node.item} in {node.over}, at most {node.at_most}", "bar", ends)
            return [(self.add("all done", "bar", self.draw(node.body, [(bar, "")], exits)), "")]
        if isinstance(node, FunctionNode):
            bar = self.add(f"{node.name}: at most {node.at_most} requests", "bar", ends)
            inside = [end for part in node.calls.values() for end in self.draw(part, [(bar, "")], exits)]
            self.arrows += [Arrow(box, bar, back=True) for box, _ in inside]
            return [(bar, "")]
        return self._loop(node, ends)

    def _loop(self, node: Repeat, ends: list[tuple[str, str]]) -> list[tuple[str, str]]:
        head = self.add(f"{node.name}: at most {node.at_most} rounds", "bar", ends)
        stops: list[tuple[str, str]] = []
        after = self.draw(node.body, [(head, "")], stops)
        if after:
            condition = getattr(node.until, "__name__", "until") if node.until else "rounds left"
            box = self.add(f"{condition}?", "choice", after)
            self.arrows.append(Arrow(box, head, "no" if node.until else "yes", back=True))
            after = [(box, "yes" if node.until else "no")]
        return after + stops


def picture(workflow: Workflow, models: Mapping[str, str] | None = None) -> tuple[list[DrawnBox], list[Arrow]]:
    """Boxes and arrows of a workflow, in the order of play. `models` (role -> model) adds who plays whom."""
    drawing = _Picture(dict(models or {}), [], [])
    start = drawing.add(", ".join(workflow.inputs) or "start", "end", [])
    exits: list[tuple[str, str]] = []
    ends = drawing.draw(workflow.body, [(start, "")], exits)
    drawing.add("end", "end", ends + exits)
    return drawing.boxes, drawing.arrows


def to_mermaid(workflow: Workflow, models: Mapping[str, str] | None = None) -> str:
    """A Mermaid flowchart of the workflow, as text."""
    shapes = {"role": ("(", ")"), "tool": ("[", "]"), "choice": ("{", "}"), "bar": ("[[", "]]"), "end": ("([", "])")}
    boxes, arrows = picture(workflow, models)
    lines = ["flowchart TD"]
    for box in boxes:
        left, right = shapes[box.shape]
        lines.append(f'  {box.name}{left}"{_quoted(box.label)}"{right}')
    for arrow in arrows:
        line = "-.->" if arrow.back else "-->"
        lines.append(f"  {arrow.source} {line}" + (f'|"{_quoted(arrow.label)}"|' if arrow.label else "") + f" {arrow.target}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return html.escape(text, quote=True).replace("\n", "<br/>")


WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 190, 44, 26, 34, 24
FILLS = {"role": "#dbeafe", "tool": "#fef3c7", "choice": "#ede9fe", "bar": "#f3f4f6", "end": "#e5e7eb"}


def _ranks(boxes: list[DrawnBox], arrows: list[Arrow]) -> dict[str, int]:
    """Row of each box: one below the lowest box that leads to it. Arrows but the ways back only lead to later boxes of the list."""
    rank = dict.fromkeys((box.name for box in boxes), 0)
    for box in boxes:
        for arrow in arrows:
            if arrow.target == box.name and not arrow.back:
                rank[box.name] = max(rank[box.name], rank[arrow.source] + 1)
    return rank


def to_svg(workflow: Workflow, models: Mapping[str, str] | None = None) -> str:
    """The workflow as one SVG element, with no scripts, fonts or links."""
    boxes, arrows = picture(workflow, models)
    rank = _ranks(boxes, arrows)
    rows: dict[int, list[DrawnBox]] = {}
    for box in boxes:
        rows.setdefault(rank[box.name], []).append(box)
    widest = max(map(len, rows.values()))
    total = MARGIN * 2 + widest * WIDTH + (widest - 1) * GAP_X + 80  # 80 for the ways back on the right
    place: dict[str, tuple[float, float]] = {}
    for row, line in rows.items():
        left = (total - 80 - len(line) * WIDTH - (len(line) - 1) * GAP_X) / 2
        for column, box in enumerate(line):
            place[box.name] = (left + column * (WIDTH + GAP_X) + WIDTH / 2, MARGIN + row * (HEIGHT + GAP_Y) + HEIGHT / 2)
    height = MARGIN * 2 + len(rows) * HEIGHT + (len(rows) - 1) * GAP_Y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:g} {height:g}" width="{total:g}" height="{height:g}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="workflow {html.escape(workflow.name, quote=True)}">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#6b7280"/></marker></defs>',
    ]
    for arrow in arrows:
        (x1, y1), (x2, y2) = place[arrow.source], place[arrow.target]
        if arrow.back or rank[arrow.target] - rank[arrow.source] > 1:
            side = total - MARGIN - (20 if arrow.back else 40)
            x1, x2 = x1 + WIDTH / 2, x2 + WIDTH / 2
            path, label_x, label_y = f"M{x1:g} {y1:g}C{side:g} {y1:g} {side:g} {y2:g} {x2:g} {y2:g}", x1 + 4, y1 - 4
        else:
            path = f"M{x1:g} {y1 + HEIGHT / 2:g}L{x2:g} {y2 - HEIGHT / 2:g}"
            label_x, label_y = (x1 + x2) / 2 + 4, (y1 + y2) / 2
        dashes = ' stroke-dasharray="4 3"' if arrow.back else ""
        parts.append(f'<path d="{path}" fill="none" stroke="#6b7280"{dashes} marker-end="url(#tip)"/>')
        if arrow.label:
            parts.append(f'<text x="{label_x:g}" y="{label_y:g}" fill="#374151">{html.escape(arrow.label)}</text>')
    parts += [_shape(box, *place[box.name]) for box in boxes]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _shape(box: DrawnBox, x: float, y: float) -> str:
    style = f'fill="{FILLS[box.shape]}" stroke="#9ca3af"'
    if box.shape == "choice":
        w, h = WIDTH / 2, HEIGHT / 2
        shape = f'<polygon points="{x - w:g},{y:g} {x:g},{y - h:g} {x + w:g},{y:g} {x:g},{y + h:g}" {style}/>'
    else:
        corner = {"role": 16, "end": HEIGHT / 2}.get(box.shape, 2)
        left, top = x - WIDTH / 2, y - HEIGHT / 2
        shape = f'<rect x="{left:g}" y="{top:g}" width="{WIDTH}" height="{HEIGHT}" rx="{corner:g}" {style}/>'
    lines = box.label.split("\n")
    first = y + 4 - 7.5 * (len(lines) - 1)
    texts = "".join(
        f'<text x="{x:g}" y="{first + 15 * i:g}" text-anchor="middle" fill="#111827">{html.escape(_short(line))}</text>'
        for i, line in enumerate(lines)
    )
    return shape + texts


def _short(text: str) -> str:
    return text if len(text) <= 30 else text[:29] + "…"
