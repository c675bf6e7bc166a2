"""The command line, `python -m fastbert`."""
