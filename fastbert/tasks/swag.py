"""SWAG: the official CSV in, four choices per example out.

The first text of all choices is sent1; the second of choice k is sent2, a space, and ending k.

Source: Zellers et al. 2018, "SWAG"; Devlin et al. 2018, "BERT", sec. 4.4.
"""

from __future__ import annotations

from pathlib import Path

from fastbert.tasks.files import Choices, check_width, column, rows

CHOICES = 4


def read(path: str | Path, *, labelled: bool = True) -> Choices:
    """The examples of a file.

    Args:
        path: of a CSV with columns video-id, sent1, sent2, ending0 to ending3 and label.
        labelled: False for the test file, which has no column label.

    Returns:
        Choices with the number in the file as id: one video-id has several examples.

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    table = rows(path, quoted=True)
    where, header = next(table, (str(path), []))
    sent1, sent2 = (column(where, header, name) for name in ("sent1", "sent2"))
    endings = [column(where, header, f"ending{k}") for k in range(CHOICES)]
    label = column(where, header, "label") if labelled else -1
    known = [str(k) for k in range(CHOICES)]
    found = Choices([], [], [], [] if labelled else None)
    for where, fields in table:
        check_width(where, fields, header)
        found.ids.append(str(len(found.ids)))
        found.firsts.append(fields[sent1])
        found.seconds.append(tuple(f"{fields[sent2]} {fields[ending]}" for ending in endings))
        if found.labels is not None:
            if (right := fields[label]) not in known:
                raise ValueError(f"{where}: expected a label of {', '.join(known)}, found {right!r:.40}")
            found.labels.append(int(right))
    if not found.ids:
        raise ValueError(f"{path}: expected one example at least, found none")
    return found
