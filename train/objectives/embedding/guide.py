"""A frozen model that computes vectors of the texts of a batch: a guide or a teacher."""

import functools

from ....models.nn.pooling import pool
from ....models.nn.typing import Array, Params
from ...losses.objective import FurtherModel


@functools.lru_cache(maxsize=2)  # a run builds its objective several times
def frozen_embedder(folder: str) -> FurtherModel:
    """Returns a model whose `apply(params, input_ids=, attention_mask=)` returns vectors `[R, D]`.

    Args:
        folder: a run folder, or a folder in the Hugging Face format, with a model of vectors. The
          returned model uses this folder's pooling, layers and number of dimensions, but not its
          prompts.
    """
    from ....models.finite import load_finite
    from ....models.hf.sentence_embedding import EmbeddingSettings, read_embedding_settings
    from ....models.hub import local_folder

    path = local_folder(folder)
    model, params = load_finite(path)
    settings = read_embedding_settings(path) or EmbeddingSettings()

    def apply(params: Params, *, input_ids: Array, attention_mask: Array) -> Array:
        hidden = model.apply(params, input_ids=input_ids, attention_mask=attention_mask)
        x = pool(hidden.last_hidden_state, attention_mask, settings.pooling)
        for layer in settings.layers:
            x = layer(x)
        return x[:, : settings.num_dimensions]

    return FurtherModel(apply, lambda rng: params)
