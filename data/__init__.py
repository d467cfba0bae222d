"""From text to batches of numpy arrays.

The way through: a ``DataConfig`` (``CausalData``, ``PretrainingData``, ``ClassificationData``,
``TaggingData``, ``SpanData``, ``ChoiceData``, ``TranslationData``) reads its source,
``train_tokenizer`` or ``load_tokenizer`` gives the vocabulary, the config's splits are
``Rows``, and ``train_iterator`` makes batches of them. Everything is imported when first
asked for, so ``import flaxzoo.data`` costs nothing.
"""

from .lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
