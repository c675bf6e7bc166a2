"""What heads and layers of an encoder do, measured by the encoder's own ops; `examples` is where to start."""
