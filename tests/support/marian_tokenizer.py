"""Sentencepiece models, and folders with a tokenizer of Marian, made of a few words."""

import io
import json

import sentencepiece

WORDS = "a red house and the small dog sleep below it while we wait".split()
WORTE = "ein rotes Haus und der kleine Hund schlafen darunter während wir warten".split()
SIDES = ("source", "target")


def train_sentencepiece(texts, **options):
    """The bytes of a sentencepiece model of these texts."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        minloglevel=2,
        **{"hard_vocab_limit": False, **options},
    )
    return model.getvalue()


def train_model(texts, size):
    """With opus-mt's settings: unigrams, NFKC, a space in front of each text."""
    return train_sentencepiece(texts, vocab_size=size, character_coverage=1.0, num_threads=1)


def gather_tokens(model):
    processor = sentencepiece.SentencePieceProcessor()
    processor.load_from_serialized_proto(model)
    return [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]


def write_folder(folder, models, separate, **config):
    """One vocabulary, or two of different size whose special tokens have other ids."""
    source, target = map(gather_tokens, models)
    folder.mkdir()
    if separate:
        vocabularies = {
            "vocab.json": ["</s>", "<unk>", "<pad>", *source],
            "target_vocab.json": ["</s>", "<unk>", "<pad>", *target],
        }
        config["separate_vocabs"] = True
    else:
        both = dict.fromkeys([">>de<<", ">>fr<<", *source, *target])
        vocabularies = {"vocab.json": ["</s>", "<unk>", *both, "<pad>"]}
    for name, pieces in vocabularies.items():
        (folder / name).write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    for side, model in zip(SIDES, models, strict=True):
        (folder / f"{side}.spm").write_bytes(model)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
