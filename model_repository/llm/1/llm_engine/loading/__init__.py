"""From what the deployer named to a model that is proven: fetched, read, checked, sized, identified.

    folder -> checkpoint (tensors, tokenizer) -> shape (may it be batched?) -> resources -> kernels -> LoadedModel
        -> golden (are its logits those of eager attention?)

A model that could give wrong tokens is refused here by ConfigError, one line with the reason and the cure. This package
does not know requests.
"""

from .attaching import attach
from .checkpoint import load
from .loaded import LoadedModel
from .probe import probe_exactness
from .shape import refuse_unsafe

__all__ = ["LoadedModel", "attach", "load", "probe_exactness", "refuse_unsafe"]
