"""The command line, `python -m fastbert`: one file per command. May import from every other room."""
