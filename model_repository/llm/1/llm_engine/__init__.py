"""The engine: continuous batching of language-model requests on one device.

It knows tensors and tokens. It knows nothing of Triton; `model.py` beside this package is the only adapter.
"""
