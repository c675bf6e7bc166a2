"""What runs below the ops: the compiled extension, the choice of a backend, derived weights."""
