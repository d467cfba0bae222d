"""Model families, text generation and weight conversion, as functions of parameters and arrays.

Example::

    config = models.preset("gpt2")
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    logits = model.apply({"params": params}, input_ids=ids).logits
"""

from ..data.common.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
