"""Training, evaluation and use of models.

Example::

    config = train.recipe("quickstart")
    result = train.train(config, "runs/quickstart")
"""

from ..data.common.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
