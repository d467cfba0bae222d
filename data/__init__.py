"""Turns text into batches of numpy arrays.

A ``DataConfig`` (``CausalLMData``, ``PretrainingData``, ``SequenceClassificationData``,
``TokenClassificationData``, ``QuestionAnsweringData``, ``MultipleChoiceData``,
``TranslationData``) describes a data set: its source and how its documents or examples become
arrays. ``train_tokenizer`` or ``load_tokenizer`` provides the vocabulary. Each split of the data is
an ``ExampleSource``, and ``train_iterator`` batches its examples. Names are imported on first use,
so ``import flaxzoo.data`` is cheap.
"""

from .common.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
