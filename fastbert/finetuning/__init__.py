"""A checkpoint and a task's own files in; the official metric, prediction files and a trained model out."""
