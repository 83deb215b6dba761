"""Results as pictures: small SVG files with text as text, the same for the same numbers. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {"torch": "#d1495b", "headrace": "#2e6f95", "economic": "#3a9d5d"}
SHADES = ("#9fb8c8", "#2e6f95")
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "headrace", "font.size": 9, "font.family": "sans-serif"}


def lines(file: Path, panels: Mapping[str, Mapping[str, Mapping[int, float]]], across: str, up: str) -> None:
    """Panels side by side, in each a line for each loader: {title: {loader: {x: y}}}. x goes by powers of 2."""
    plt = _pyplot()
    with plt.rc_context(SETTINGS):
        figure, _ = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2), layout="constrained")
        for place, (title, loaders) in zip(figure.axes, panels.items(), strict=True):
            for loader, points in loaders.items():
                x, y = zip(*sorted(points.items()), strict=True)
                place.plot(x, y, marker="o", markersize=4, label=loader, color=COLOURS.get(loader))
            place.set_xscale("log", base=2)
            ticks = sorted({x for points in loaders.values() for x in points})
            place.set_xticks(ticks, [str(x) for x in ticks])
            place.set(title=title, xlabel=across, ylabel=up)
        _save(plt, figure, file)


def bars(file: Path, groups: Mapping[str, Mapping[str, float]], up: str) -> None:
    """A group of bars for each loader, a bar for each of two moments: {loader: {moment: height}}."""
    plt = _pyplot()
    moments = list(dict.fromkeys(moment for heights in groups.values() for moment in heights))
    width = 0.8 / len(moments)
    with plt.rc_context(SETTINGS):
        figure, place = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
        for k, moment in enumerate(moments):
            x = [number + (k - (len(moments) - 1) / 2) * width for number in range(len(groups))]
            drawn = place.bar(
                x, [heights.get(moment, 0.0) for heights in groups.values()], width, label=moment, color=SHADES[k]
            )
            place.bar_label(drawn, fmt="%.2f", padding=2)
        place.set_xticks(range(len(groups)), list(groups))
        place.set(ylabel=up)
        _save(plt, figure, file, {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": len(moments)})


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit(f"--plot needs what benchmarks/requirements.txt names: {error}") from error
    mpl.use("svg")
    from matplotlib import pyplot as plt

    return plt


def _save(plt: Any, figure: Any, file: Path, legend: dict[str, Any] | None = None) -> None:
    for place in figure.axes:
        place.set_ylim(bottom=0)
        place.grid(axis="y", alpha=0.3)
        place.spines[["top", "right"]].set_visible(False)
        if place.get_legend_handles_labels()[0]:
            place.legend(frameon=False, **(legend or {}))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)
