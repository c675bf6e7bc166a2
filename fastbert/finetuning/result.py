"""What fine-tuning has found: its runs and scores, as a table, as a picture and as results.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.finetuning.settings import Settings
from fastbert.tasks.published import FROZEN, PRETRAINED, PUBLISHED, RANDOM, Published


@dataclass(frozen=True)
class Run:
    """One run of the grid.

    Attributes:
        settings: how it learned.
        evaluations: {"step", "epoch", split -> scores} after each epoch.
        score: the best main score, in fractions of 1.
        failed: whether the model has learned nothing: it predicts one class at best.
    """

    settings: Settings
    evaluations: list[dict[str, Any]]
    score: float
    failed: bool


@dataclass(frozen=True)
class Result:
    """What fine-tuning has found.

    Attributes:
        task: its name.
        metric: the main metric.
        runs: all of the grid.
        output: the directory of the best model.
        scores: split -> metric -> score of the best model, in fractions of 1, of the splits with labels.
        counts: split -> what its readers counted, such as "examples" and "sequences_cut".
    """

    task: str
    metric: str
    runs: list[Run]
    output: Path
    scores: dict[str, dict[str, float]]
    counts: dict[str, dict[str, int]]

    @property
    def best(self) -> Run:
        """The run of the best main score; of equal ones the first."""
        return max(self.runs, key=lambda run: run.score)

    @property
    def published(self) -> list[Published]:
        """Rows of papers for this task and this start."""
        best = self.best.settings
        start = FROZEN if best.freeze else RANDOM if best.random_init else PRETRAINED
        return [row for row in PUBLISHED if (row.task, row.start) == (self.task, start)]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], output: Path) -> Result:
        """The result that `to_dict` has described."""
        runs = [Run(**{**run, "settings": Settings(**run["settings"])}) for run in content["runs"]]
        return cls(content["task"], content["metric"], runs, output, content["scores"], content["counts"])

    def to_dict(self) -> dict[str, Any]:
        """For results.json."""
        return {
            "task": self.task,
            "metric": self.metric,
            "scores": self.scores,
            "counts": self.counts,
            "best": self.best.settings.to_dict(),
            "runs": [
                {
                    "settings": run.settings.to_dict(),
                    "evaluations": run.evaluations,
                    "score": run.score,
                    "failed": run.failed,
                }
                for run in self.runs
            ],
            "published": [row._asdict() for row in self.published],
        }

    def table(self) -> str:
        """The runs, the best, mean and deviation over seeds, and the published rows, in percent."""
        lines = [f"{self.task}: {self.metric} on dev, in percent"]
        lines += [
            f"  lr {run.settings.lr:g}, seed {run.settings.seed}: {100 * run.score:.1f}"
            + (" (failed: at the score of one answer for all)" if run.failed else "")
            for run in self.runs
        ]
        for lr in dict.fromkeys(run.settings.lr for run in self.runs):
            scores = [100 * run.score for run in self.runs if run.settings.lr == lr]
            if len(scores) > 1:
                lines.append(f"  lr {lr:g}: mean {np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}")
        for split, scores in self.scores.items():
            shown = {name: value for name, value in scores.items() if not name.endswith("threshold")}
            words = ", ".join(f"{name} {100 * value:.1f}" for name, value in shown.items())
            lines.append(f"  best, {split}: {words}")
        lines += [
            f"  {row.model} ({row.split}, published): {row.scores[self.metric]:.1f}"
            for row in self.published
            if self.metric in row.scores
        ]
        return "\n".join(lines)

    def draw(self) -> Path | None:
        """Draw the dev score of each run over its epochs, as curves.png; None without matplotlib."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return None
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        rates = list(dict.fromkeys(run.settings.lr for run in self.runs))
        for run in self.runs:
            best = run is self.best
            scores = [
                100 * next(s[self.metric] for s in e.values() if isinstance(s, dict)) for e in run.evaluations
            ]
            axes.plot(
                [entry["epoch"] for entry in run.evaluations],
                scores,
                color=f"C{rates.index(run.settings.lr)}",
                marker="o",
                alpha=1.0 if best else 0.45,
                linewidth=2.0 if best else 1.0,
                label=f"lr {run.settings.lr:g}" if run.settings.seed == self.runs[0].settings.seed else None,
            )
        axes.set(xlabel="epoch", ylabel=f"{self.metric} on dev, percent", title=self.task)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        path = self.output / "curves.png"
        figure.savefig(path, dpi=150)
        return path
