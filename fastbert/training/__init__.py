"""Training: optimizers and learning rates. For every trainer, whatever it trains on."""
