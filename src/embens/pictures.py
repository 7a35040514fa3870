"""Pictures of predictions, drawn with matplotlib."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from embens import metrics
from embens.files import check_output, write_atomically

File = str | os.PathLike[str]


@contextmanager
def picture(path: File, **labels: Any) -> Iterator[Any]:
    """Create axes to draw on, and save the figure at the end.

    Args:
        path: File to write.
        **labels: Properties of the axes, such as ``xlabel`` and ``title``.

    Yields:
        The axes of matplotlib.

    Raises:
        OSError: If no file can be written there, for example because it is a folder.
    """
    from matplotlib.figure import Figure

    path = Path(path)
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
    check_output(path)
    figure = Figure(figsize=(4.5, 3.4), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.set(**labels)
    handles, _ = axes.get_legend_handles_labels()
    if handles and axes.get_legend() is None:
        axes.legend()
    content = io.BytesIO()
    figure.savefig(content, dpi=100, format=path.suffix[1:])
    write_atomically(path, content.getvalue())


def plot_reliability(diagrams: dict[str, metrics.Reliability], path: File) -> None:
    """Plot accuracy against confidence, with the number of samples at each confidence as bars.

    Args:
        diagrams: Reliability diagrams by their labels; all have bins of the same width.
        path: File to write.
    """
    labels = {"xlabel": "confidence", "ylabel": "accuracy", "xlim": (0, 1), "ylim": (0, 1)}
    with picture(path, **labels) as axes:
        count_axes = axes.twinx()
        count_axes.set_ylabel("samples in a bin (bars)")
        # Curves are drawn above the bars.
        axes.set_zorder(count_axes.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.plot([0, 1], [0, 1], "k:")
        largest_bin = 1.0
        for position, (label, diagram) in enumerate(diagrams.items()):
            confidence, accuracy = diagram.confidence.tolist(), diagram.accuracy.tolist()
            axes.errorbar(
                confidence,
                accuracy,
                _standard_error(diagram).tolist(),
                label=label,
                fmt="o-",
                color=f"C{position}",
                capsize=2,
                elinewidth=0.8,
            )
            bins = len(confidence)
            width = 0.9 / bins / len(diagrams)  # a tenth of each bin separates it from the next
            left_edges = [k / bins + 0.05 / bins + width * position for k in range(bins)]
            bars = {"align": "edge", "color": f"C{position}", "alpha": 0.25}
            count_axes.bar(left_edges, diagram.samples.tolist(), width, **bars)
            largest_bin = max(largest_bin, float(diagram.samples.max()))
        # Bars stay in the lower half, below most of the curves.
        count_axes.set_ylim(0, 2 * largest_bin)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _standard_error(diagram: metrics.Reliability) -> Tensor:
    """Return the standard error of the accuracy in each bin.

    One more hit and one more miss are counted, so that bins with few samples have an error.
    """
    rate = (diagram.accuracy * diagram.samples + 1) / (diagram.samples + 2)
    return (rate * (1 - rate) / (diagram.samples + 2)).sqrt()
