"""Sentences to vectors: settings of a model folder, tokenizer, encoder."""
