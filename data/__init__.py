"""From text to batches of numpy arrays.

A ``DataConfig`` (``CausalLMData``, ``PretrainingData``, ``SequenceClassificationData``,
``TokenClassificationData``, ``QuestionAnsweringData``, ``MultipleChoiceData``,
``TranslationData``) reads its source; ``train_tokenizer`` or ``load_tokenizer`` gives the
vocabulary; each split of the config is an ``ExampleSource``, of which ``train_iterator`` makes
batches. Every name is imported on first use, so ``import flaxzoo.data`` costs nothing.
"""

from .common.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
