"""Models with a head, one per task."""
