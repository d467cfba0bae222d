"""A guide or teacher: a frozen model that computes vectors of the texts in a batch."""

import functools

from ....models.nn.typing import Array, Params
from ...losses.embedding.text_rows import TextRows
from ...losses.objective import AuxiliaryModel


@functools.lru_cache(maxsize=2)  # a run builds its objective several times
def frozen_embedder(folder: str) -> AuxiliaryModel:
    """Returns a model whose `apply(params, rows=TextRows)` returns the vectors of texts `[N, D]`.

    Args:
        folder: a run folder, or a folder in the Hugging Face format, that contains an embedding
          model. The returned model uses the pooling, the layers and the number of dimensions from
          this folder, but not the prompts.
    """
    from ....models.finite import load_finite
    from ....models.hf.sentence_embedding import EmbeddingSettings, read_embedding_settings
    from ....models.hub import local_folder

    path = local_folder(folder)
    model, params = load_finite(path)
    settings = read_embedding_settings(path) or EmbeddingSettings()

    def apply(params: Params, *, rows: TextRows) -> Array:
        x = rows.pool(model.apply(params, **rows.inputs).last_hidden_state, settings.pooling)
        for layer in settings.layers:
            x = layer(x)
        return x[:, : settings.num_dimensions]

    return AuxiliaryModel(apply, lambda rng: params)
