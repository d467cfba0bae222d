"""Recipes of embedding models and rerankers, for search."""

import dataclasses

from ...data.embedding.embedding_data import EmbeddingData
from ...data.embedding.rerank_data import RerankData
from ...data.tokenizers.training import TokenizerConfig
from ...models.config import Execution, TransformerConfig
from ...models.encoders.bert import BertConfig
from ..config import Recipe, TrainConfig
from ..objectives.embedding.rerank import RerankConfig
from ..objectives.embedding.sparse import SpladeConfig
from ..optimizer_config import OptimizerConfig

EMBED = TrainConfig(
    model=BertConfig(
        # Training enlarges the vocabulary to the size of the tokenizer.
        vocab_size=1,
        max_length=128,
        num_layers=2,
        d_model=128,
        num_heads=4,
        dropout_rate=0.0,
        head="none",
        # The initial standard deviation is about 1 / √D, where D is `d_model`.
        init_std=0.08,
    ),
    data=EmbeddingData(
        source="builtin:python-docs",
        length=64,
        query_length=32,
        tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=2048),
    ),
    optimizer=OptimizerConfig(
        peak_learning_rate=1e-3,
        schedule="linear",
        final_fraction=0.0,
        warmup_fraction=0.1,
        beta2=0.999,
        weight_decay=0.01,
    ),
    execution=Execution(remat="dots"),
    epochs=10.0,
    batch_size=32,
)


def _rate(rate: float, model: TransformerConfig) -> float:
    """Returns a learning rate: `rate` for a width of 768, and more for narrower models."""
    return round(rate * 768 / model.d_model, 6)


def of_model(model: TransformerConfig) -> TrainConfig:
    """Returns the settings for fine-tuning a published model as an embedding model."""
    return dataclasses.replace(
        EMBED,
        model=dataclasses.replace(model, dropout_rate=0.0),
        data=dataclasses.replace(EMBED.data, length=min(model.max_length, 128), query_length=None),
        # MiniLM, whose width is 384, learned more from 500 pairs of SQuAD at 1e-4 than at 2e-5.
        optimizer=dataclasses.replace(EMBED.optimizer, peak_learning_rate=_rate(5e-5, model)),
        epochs=1.0,
        batch_size=64,
    )


RERANK = dataclasses.replace(
    EMBED,
    data=RerankData(
        source="builtin:numbers-en-fr",
        length=48,
        tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=128),
    ),
    objective=RerankConfig(loss="contrast"),
    epochs=2.0,
    batch_size=32,
)


SPLADE = dataclasses.replace(
    EMBED,
    model=dataclasses.replace(EMBED.model, head="masked_lm"),
    objective=SpladeConfig(),
)


def splade_of_model(model: TransformerConfig) -> TrainConfig:
    """Returns the settings for fine-tuning a masked language model as a sparse encoder."""
    return dataclasses.replace(of_model(model), objective=SpladeConfig(), batch_size=32)


def rerank_of_model(model: TransformerConfig) -> TrainConfig:
    """Returns the settings for fine-tuning a published model as a reranker."""
    return dataclasses.replace(
        RERANK,
        model=dataclasses.replace(model, dropout_rate=0.1),
        # A reranker is applied to the best documents of a search, so BM25 finds the negatives.
        data=dataclasses.replace(
            RERANK.data, length=min(model.max_length, 256), sampled_from="bm25"
        ),
        # A new head needs a larger learning rate. In an experiment, MiniLM (width 384) was trained
        # for 150 steps of 8 SQuAD questions, each with a negative found by BM25. It learned nothing
        # at 4e-5, a little at 1e-4, and most at 2e-4. For a width of 768, the rate is the usual
        # 5e-5. For narrower models, the rate is therefore inversely proportional to the square of
        # the width.
        optimizer=dataclasses.replace(
            RERANK.optimizer, peak_learning_rate=_rate(5e-5 * max(768 / model.d_model, 1), model)
        ),
        epochs=1.0,
        # A small collection has few questions, so use small batches to get enough steps.
        batch_size=16,
    )


RECIPES: dict[str, Recipe] = {
    "rerank": Recipe(
        summary="A reranker, which scores a query and a document at once: minutes on two cores.",
        details=(
            "Run: flaxzoo train rerank --init-from sentence-transformers/all-MiniLM-L6-v2 "
            "--data.source jsonl:pairs.jsonl\n"
            "Each line has a query, and either a positive and optionally negatives, or documents "
            "with scores.\n"
            "Four documents of other queries, which BM25 finds, are negatives as well. Without "
            "options, a small model learns to match numbers in English and French. flaxzoo predict "
            "and models.PairScorer use the run, and flaxzoo export writes it for CrossEncoder."
        ),
        config=RERANK,
        of_model=rerank_of_model,
    ),
    "splade": Recipe(
        summary="Sparse vectors (SPLADE): a weight for each token of the vocabulary.",
        details=(
            "Run: flaxzoo train splade --init-from google-bert/bert-base-uncased --data.source "
            "jsonl:pairs.jsonl\n"
            "The data have the same format as in the recipe embed. The last lines compare "
            "nDCG@10 and the numbers of weights above 0 before and after training. Without "
            "options, the recipe trains a small model from scratch on Python's documentation, in "
            "a few minutes on two cores. flaxzoo embed and flaxzoo evaluate use the run, and "
            "flaxzoo export writes it for SparseEncoder."
        ),
        config=SPLADE,
        of_model=splade_of_model,
    ),
    "embed": Recipe(
        summary="Vectors of texts for search and comparison, from pairs that belong together.",
        details=(
            "Run: flaxzoo train embed --init-from sentence-transformers/all-MiniLM-L6-v2 "
            "--data.source jsonl:pairs.jsonl\n"
            "Without options, the recipe trains a small model from scratch on Python's "
            "documentation, in a few minutes on two cores.\n"
            "Each line has an anchor and a positive, such as a question and its answer, and "
            "optionally negatives; the other positives of a batch are negatives as well. flaxzoo "
            "embed uses the run, and flaxzoo export writes it for sentence-transformers."
        ),
        config=EMBED,
        of_model=of_model,
    ),
}
