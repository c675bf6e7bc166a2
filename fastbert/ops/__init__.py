"""The contracts, one file per op."""
