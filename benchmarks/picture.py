"""Pictures of watched steps: memory over time, lanes over time.

Covers: one figure, a pair of panels for each variant on a shared time axis.
Does not cover: taking the timelines (timeline.py).
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.timeline import Timeline

COLOURS = {"forward": "#9ecae1", "backward": "#fdae6b", "d2h": "#31a354", "h2d": "#756bb1", "wait": "#de2d26"}
LANES = ("h2d", "d2h", "compute")  # from the bottom


def draw(timelines: Sequence[Timeline], path: Path, *, title: str) -> None:
    """Write the figure.

    The upper panel of a variant has the peak within each slot (grey) and what was allocated when it began (line); the lower one has what
    compute and the two lanes did, and where compute waited.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(14, 3.2 * len(timelines) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 * len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [3, 2] * len(timelines)})[:, 0]
    highest = max(span.peak_bytes for timeline in timelines for span in timeline.slots) / 1e9
    for timeline, memory, lanes in zip(timelines, axes[::2], axes[1::2], strict=True):
        edges = [span.start_ms for span in timeline.slots] + [timeline.slots[-1].end_ms]
        memory.stairs([span.peak_bytes / 1e9 for span in timeline.slots], edges, fill=True, color="#cccccc")
        memory.step(edges[:-1], [span.allocated_bytes / 1e9 for span in timeline.slots], where="post", color="#333333", linewidth=1)
        memory.set_ylim(0, max(highest * 1.05, 1e-3))
        memory.set_ylabel("GB")
        memory.set_title(timeline.variant, loc="left", fontsize=10)
        for kind in ("forward", "backward"):
            bars = [(span.start_ms, span.end_ms - span.start_ms) for span in timeline.slots if span.kind == kind]
            lanes.broken_barh(bars, (2.1, 0.8), facecolors=COLOURS[kind], edgecolor="white", linewidth=0.3)
        lanes.broken_barh([(wait.start_ms, wait.end_ms - wait.start_ms) for wait in timeline.waits], (2.1, 0.8), facecolors=COLOURS["wait"])
        for lane, direction in enumerate(LANES[:2]):
            bars = [(copy.start_ms, copy.end_ms - copy.start_ms) for copy in timeline.copies if copy.direction == direction]
            lanes.broken_barh(bars, (lane + 0.1, 0.8), facecolors=COLOURS[direction])
        lanes.set_yticks([0.5, 1.5, 2.5], LANES)
        lanes.set_ylim(0, 3)
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, fontsize=11)
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()], loc="outside lower center", ncols=5, fontsize=8
    )
    figure.savefig(path, dpi=110)
