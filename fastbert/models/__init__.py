"""The models under HuggingFace's names and contract. Start in bert.py."""
