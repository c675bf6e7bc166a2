"""Public records of BERT, for a benchmark to print beside its own figure; what of the two can be compared."""

from __future__ import annotations

from dataclasses import dataclass

INFERENCE = "https://github.com/mlcommons/inference_results_v4.1"
TRAINING = "https://github.com/mlcommons/training_results_v4.1"
NVIDIA = f"{INFERENCE}/tree/main/closed/NVIDIA/results/H200-SXM-141GBx8_TRT"
DELL = f"{INFERENCE}/tree/main/closed/Dell/results"


@dataclass(frozen=True)
class Record:
    """One published figure.

    Attributes:
        value: rate in `unit` per device.
        unit: "samples/s" or "packs/s".
        device: what it was measured on.
        precision: precision of its products.
        accuracy: what the rules asked for.
        who: the submitter.
        source: where it was published.
    """

    value: float
    unit: str
    device: str
    precision: str
    accuracy: str
    who: str
    source: str

    def __str__(self) -> str:
        what = f"{self.value:,.0f} {self.unit} per {self.device}, {self.precision}, {self.accuracy}"
        return f"record: {what} ({self.who}; {self.source})"


@dataclass(frozen=True)
class Workload:
    """A named workload and the records of it.

    Attributes:
        key: of the rate in a row, such as "samples_per_s".
        records: the best last.
        same: what our measurement shares with the records.
        different: what it does not.
    """

    key: str
    records: tuple[Record, ...]
    same: str
    different: str

    def remarks(self) -> list[str]:
        """What to print above the figures."""
        lines = [str(record) for record in self.records]
        return [*lines, f"the same as the records': {self.same}", f"not the same: {self.different}"]


FP8 = ("H200", "FP8", "99.9% of fp32's F1")
INT8 = ("H200", "INT8", "99% of fp32's F1")
TRAINED = ("H200", "FP8", "trained until 72% of the masked words are right")

WORKLOADS = {
    # an eighth of what a machine with 8 GPUs reached
    "squad": Workload(
        "samples_per_s",
        (
            Record(7994, "samples/s", *FP8, "MLPerf Inference v4.1, NVIDIA", f"{NVIDIA}/bert-99.9/Offline"),
            Record(8165, "samples/s", *FP8, "MLPerf Inference v4.1, Dell", DELL),
            Record(9164, "samples/s", *INT8, "MLPerf Inference v4.1, NVIDIA", f"{NVIDIA}/bert-99/Offline"),
            Record(9224, "samples/s", *INT8, "MLPerf Inference v4.1, Dell", DELL),
        ),
        "BERT-large's encoder on windows of SQuAD's lengths, offline: all samples are there at the start",
        "this device; the precision that each line names; a small batch drawn from the lengths, not all "
        "windows for ten minutes; random tokens and weights, so no F1 is checked (`cosine` is to fp32's "
        "vectors); without the question answering head, tokenizing and choosing the answer",
    ),
    # 1,032 sequences/s, two per pack
    "train": Workload(
        "packs_per_s",
        (Record(516, "packs/s", *TRAINED, "MLPerf Training v4.1, NVIDIA", TRAINING),),
        "BERT-large, packs of 512 real tokens, dropout 0.1, masked words, next sentence; forward, backward "
        "and the optimizer's step",
        "this device; fp32 parameters in fp32 or bf16 autocast; a few packs per step; AdamW on one device, "
        "not LAMB on several; random tokens, one sequence per pack, so attention is not cut at the "
        "sequences' ends and costs more; no input pipeline, and no accuracy is reached",
    ),
}
