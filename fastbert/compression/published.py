"""Published scores of compressed models, in percent, to set beside a user's own. Other data, other models.

Source: Michel, Levy and Neubig 2019, "Are Sixteen Heads Really Better than One?"; Sanh, Wolf and Rush 2020,
"Movement Pruning", table 2, with distillation; Lagunas et al. 2021, "Block Pruning For Faster Transformers"
and its repository nn_pruning; Zafrir et al. 2019, "Q8BERT", table 1; Bondarenko, Nagel and Blankevoort 2021,
"Understanding and Overcoming the Challenges of Efficient Transformer Quantization"; Goyal et al. 2020,
"PoWER-BERT".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Published(NamedTuple):
    """One compressed model of a paper, beside the model that it was made from.

    Attributes:
        way: what was done: "heads", "structured" (heads and neurons), "weights", ….
        source: the authors and the year.
        name: what was done, in a few words.
        task: the task and its metric.
        before, after: the scores in percent; None if the paper has no exact one.
        faster: speed-up over the uncompressed model; None if the paper has none.
    """

    way: str
    source: str
    name: str
    task: str
    before: float | None = None
    after: float | None = None
    faster: float | None = None

    def line(self) -> str:
        """The row as one line of text."""
        parts = [] if self.after is None else [f"{self.task} {self.before} -> {self.after}"]
        parts += [] if self.faster is None else [f"{self.faster} x as fast"]
        return f"published, for comparison: {self.source}, {self.name}: {', '.join(parts)}"


_MICHEL, _SANH, _LAGUNAS = "Michel 2019", "Sanh 2020", "nn_pruning 2021"
_GOYAL, _ZAFRIR, _BONDARENKO = "Goyal 2020", "Zafrir 2019", "Bondarenko 2021"

PUBLISHED = (
    Published("heads", _MICHEL, "half of BERT base's heads removed", "MNLI", faster=1.175),
    Published("structured", _LAGUNAS, "BERT base", "SQuAD F1", 88.5, 88.7, 1.84),
    Published("structured", _LAGUNAS, "BERT base", "SQuAD F1", 88.5, 85.5, 3.64),
    Published("structured", _LAGUNAS, "BERT base", "MNLI", 84.6, 83.1, 2.4),
    *(
        Published("weights", _SANH, f"{name}, {kept}% of weights", task, before, after)
        for task, before, scores in (
            ("SQuAD F1", 88.1, {10: (80.1, 84.3, 84.9), 3: (59.6, 78.0, 82.3)}),
            ("MNLI", 84.5, {10: (78.3, 80.1, 81.2), 3: (69.4, 76.5, 79.5)}),
            ("QQP", 91.4, {10: (79.8, 89.7, 90.2), 3: (72.4, 86.1, 89.1)}),
        )
        for kept, row in scores.items()
        for name, after in zip(("magnitude", "movement", "soft movement"), row, strict=True)
    ),
    Published("tokens", _GOYAL, "PoWER-BERT, trained with fewer tokens", "CoLA", 52.5, 52.3, 4.5),
    Published("tokens", _GOYAL, "PoWER-BERT, trained with fewer tokens", "MNLI", 84.6, 83.8, 2.6),
    Published("int8", _ZAFRIR, "Q8BERT, trained with rounded weights", "SQuAD F1", 88.5, 87.7),
    Published("int8", _ZAFRIR, "Q8BERT, trained with rounded weights", "SST-2", 92.4, 92.2),
    Published("int8", _BONDARENKO, "8 bits, the sums of feed-forward blocks in 16", "GLUE", 83.06, 82.43),
    Published("int4", _BONDARENKO, "weights in 4 bits, words in 2, 8.85 x smaller", "GLUE", 83.06, 82.29),
    Published("int8", _BONDARENKO, "8 bits, trained with rounded weights", "GLUE", 83.06, 83.26),
)


def lines(ways: Iterable[str], most: int = 4) -> list[str]:
    """The first rows of some ways, as lines of text."""
    return [row.line() for row in PUBLISHED if row.way in ways][:most]
