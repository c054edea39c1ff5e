"""A few shapes of SVG, and the style sheet: colours follow the reader's light or dark scheme."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

LANE_COLOURS = (
    ("#56b4e9", "#3d8fc4", "#0b1f2e"),
    ("#e69f00", "#c98a00", "#2a1d00"),
    ("#2fbf93", "#1f9672", "#04241a"),
    ("#d48cb6", "#b56a97", "#2b1020"),
    ("#e8dc4a", "#b8ad2f", "#262200"),
    ("#8aa4d6", "#6580b8", "#0e1830"),
    ("#e07b4f", "#c2613a", "#2d1005"),
    ("#b8c0c8", "#8b949e", "#14181d"),
)
"""Of each lane: fill on light ground, fill on dark ground, text on both."""

_LIGHT = {"ground": "#ffffff", "panel": "#f6f8fa", "edge": "#d0d7de", "ink": "#1f2328", "soft": "#57606a"}
_DARK = {"ground": "#0d1117", "panel": "#161b22", "edge": "#30363d", "ink": "#e6edf3", "soft": "#9da7b3"}


class Drawing:
    """Shapes in the order of their drawing. Coordinates are user units; text is escaped here."""

    def __init__(self, *, width: int, title: str, description: str) -> None:
        self._width = width
        self._title = title
        self._description = description
        self._shapes: list[str] = []
        self.bottom = 0.0
        """How far down anything was drawn."""

    def rect(self, x: float, y: float, width: float, height: float, style: str, *, radius: float = 4) -> None:
        """A rectangle of CSS class `style`."""
        box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self._shapes.append(f"<rect {box} class={quoteattr(style)}/>")
        self.bottom = max(self.bottom, y + height)

    def text(self, x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> None:
        """Text whose baseline starts, has its middle, or ends at ``(x, y)``."""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        dress = f" class={quoteattr(style)}" if style else ""
        self._shapes.append(f'<text x="{x:g}" y="{y:g}"{place}{dress}>{escape(text)}</text>')
        self.bottom = max(self.bottom, y + 4)

    def path(self, path: str, style: str) -> None:
        """A path of CSS class `style`."""
        self._shapes.append(f'<path d="{path}" class={quoteattr(style)}/>')

    def finish(self, margin: int) -> str:
        """The file's text."""
        height = round(self.bottom + margin)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {height}" width="{self._width}" '
            f'height="{height}" role="img" aria-labelledby="title desc" '
            'font-family="system-ui, \'DejaVu Sans\', sans-serif" font-size="12">'
        )
        parts = [
            head,
            f'<title id="title">{escape(self._title)}</title>',
            f'<desc id="desc">{escape(self._description)}</desc>',
            f"<style>{_style_sheet()}</style>",
            f'<rect width="{self._width}" height="{height}" class="ground"/>',
            *self._shapes,
            "</svg>",
        ]
        return "\n".join(parts) + "\n"


def _style_sheet() -> str:
    lines = [
        ".title { font-size: 19px; font-weight: 650; }",
        ".head { font-size: 14px; font-weight: 650; }",
        ".bold { font-weight: 650; }",
        ".small { font-size: 10px; }",
        ".mono { font-family: ui-monospace, 'DejaVu Sans Mono', monospace; font-size: 11px; }",
        ".frame { fill: none; }",
        ".arrow, .cut, .half { fill: none; }",
        ".arrow { stroke-width: 1.4; }",
        ".cut { stroke-width: 1.6; stroke-dasharray: 3 3; }",
        ".half { stroke-width: 2; }",
        *_scheme(_LIGHT, 0),
        "@media (prefers-color-scheme: dark) {",
        *_scheme(_DARK, 1),
        "}",
    ]
    return "\n" + "\n".join(lines) + "\n"


def _scheme(colours: dict[str, str], fill: int) -> list[str]:
    return [
        f".ground {{ fill: {colours['ground']}; }}",
        f".panel {{ fill: {colours['panel']}; stroke: {colours['edge']}; }}",
        f".frame {{ stroke: {colours['soft']}; }}",
        f"text {{ fill: {colours['ink']}; }}",
        f".soft {{ fill: {colours['soft']}; }}",
        f".arrow, .cut, .half {{ stroke: {colours['ink']}; }}",
        *(f".lane{number} {{ fill: {lane[fill]}; }}" for number, lane in enumerate(LANE_COLOURS)),
        *(f"text.on{number} {{ fill: {lane[2]}; }}" for number, lane in enumerate(LANE_COLOURS)),
    ]
