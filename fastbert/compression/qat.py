"""Quantisation-aware training: `prepare(model)`, train it by any loop, `convert(model)`.

Layers and mathematics are in `fastbert/layers/fake_quantized.py`, because fine-tuning trains with them too
(`fastbert finetune --qat int8`).
"""

from fastbert.layers.fake_quantized import convert, prepare

__all__ = ["convert", "prepare"]
