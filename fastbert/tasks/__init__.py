"""Official task files in, official metrics and prediction files out, all without a model.

One file per format: `glue`, `squad`, `swag`, `race`, `ner`, `csv_file`. Several formats share `metrics` and
`files`; `published` has the scores of papers.
"""
