"""Line charts as SVG, written by hand: three short curves need no plotting library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 420, 280, 56
_COLOURS = ("#1f6fb2", "#c8502d", "#3d8a41", "#7a4fa3")


@dataclasses.dataclass(frozen=True)
class Panel:
    """One chart: curves over a common x axis, which is logarithmic (base 2)."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]


def svg(panels: Sequence[Panel], caption: str) -> str:
    """Panels side by side, and a line of text below."""
    width = _WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT + 30}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{_HEIGHT + 30}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate({index * _WIDTH} 0)">', *_panel(panel), "</g>"]
    parts += [f'<text x="10" y="{_HEIGHT + 20}" fill="#555">{escape(caption)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(panel: Panel) -> list[str]:
    points = [point for curve in panel.curves.values() for point in curve]
    left, right, top, bottom = _MARGIN, _WIDTH - 16, 34, _HEIGHT - 42
    xs = sorted({x for x, _ in points}) or [1.0]
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    ceiling = _nice(max((y for _, y in points), default=1.0))

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return left + along * (right - left), bottom - y / ceiling * (bottom - top)

    parts = [f'<text x="{left}" y="18" font-size="13" font-weight="bold">{escape(panel.title)}</text>']
    for step in range(5):
        y = bottom - step / 4 * (bottom - top)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{ceiling * step / 4:g}</text>')
    for x in xs:
        parts.append(f'<text x="{place(x, 0)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(
        f'<text x="{(left + right) / 2}" y="{bottom + 34}" text-anchor="middle">{escape(panel.x_label)}</text>'
    )
    middle = (top + bottom) / 2
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(panel.y_label)}</text>'
    )
    for number, (name, curve) in enumerate(panel.curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(x, y) for x, y in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{left + 8 + 80 * number}" y="{top - 4}" fill="{colour}">{escape(name)}</text>')
    return parts


def _nice(value: float) -> float:
    """The least of 1, 2, 4, 8 times a power of ten that is not below."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((factor * power for factor in (1, 2, 4, 8) if factor * power >= value), 10 * power)
