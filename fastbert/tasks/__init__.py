"""Official task files in, official metrics and prediction files out, all without a model.

One file per format: `glue`, `squad`, `swag`, `race`, `ner`, `csv_file`. Several formats share `metrics` and
`files`. `inputs` reads a user's own examples, `examples` tokenizes texts, and `published` has the scores of
papers.
"""
