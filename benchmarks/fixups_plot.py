"""The picture of docs/studies/fixups.md, from the study's results: what each policy wins back, by rows computed.

python -m benchmarks.fixups_plot benchmarks/results/fixups-embedded.json docs/images/fixups.svg
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LABEL = re.compile(r"(fixup|legolink|speccache|cacheblend)-\d+")  # a policy and its main number; no other field
STYLES = {
    "fixup": ("P", "#54278f"), "legolink": ("*", "#2171b5"), "speccache": ("^", "#238b45"),
    "cacheblend": ("s", "#d94801"),
}  # fmt: skip


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Won back of what naive loses, %, over the share of context rows, %; one panel per chunk size. SVG and PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "pictool", "font.size": 9.0, "svg.fonttype": "path"}):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(results["sizes"]), sharey=True)
        for axes, size in zip(panels, results["sizes"].values(), strict=True):
            for name, (marker, colour) in STYLES.items():
                points = sorted(
                    (policy["rows"] * 100, policy["won_back"] * 100)
                    for label, policy in size["all"]["policies"].items()
                    if (match := LABEL.fullmatch(label)) and match[1] == name and label != "legolink-0"
                )
                axes.plot(*zip(*points, strict=True), marker=marker, color=colour, linewidth=1, label=name)
            axes.set(xscale="log", xlim=(0.4, 100), xlabel="context rows computed per layer, %")
            axes.set_title(f"{size['all']['tokens_per_chunk']:.0f} tokens per chunk", fontsize=9)
            axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
            axes.minorticks_off()
            axes.grid(color="#dddddd", linewidth=0.5)
        panels[0].set(ylabel="won back of what naive loses, %")
        figure.legend(handles=panels[0].lines, loc="outside upper center", ncols=len(STYLES), frameon=False)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        figure.savefig(path.with_suffix(".png"), dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.results.read_text()), options.picture)


if __name__ == "__main__":
    main()
