"""Model folders on disk: names of weights, loading, saving."""
