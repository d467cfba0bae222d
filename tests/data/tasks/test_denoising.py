"""Data of denoising: whole texts as targets, other masks in every epoch, resumed exactly."""

import pickle
from contextlib import closing

import pytest
from flaxzoo.data import (
    DataError,
    DenoisingData,
    TokenizerConfig,
    load_tokenizer,
    train_iterator,
    train_tokenizer,
)
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.tasks.denoising import mask_of, sentence_ends

TEXT = "The quick brown fox jumps. It reads the lazy dog! Does it? Some other words"
DOCUMENTS = [" ".join([TEXT] * (1 + i % 5)) for i in range(30)]
VOCABULARY = TokenizerConfig("sentencepiece-bpe", 300)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "documents.txt"
    file.write_text("\n".join(DOCUMENTS))
    return DenoisingData(
        source=f"text:{file}#line", length=48, tokenizer=VOCABULARY, validation_fraction=0.2
    )


@pytest.fixture(scope="module")
def tokenizer(data):
    return data.make_tokenizer()


def pairs_of(example):
    """The source and the target of each text of an example."""
    for number in range(1, example["segment_ids"].max() + 1):
        source = example["input_ids"][example["segment_ids"] == number]
        target = example["labels"][example["decoder_segment_ids"] == number]
        yield source.tolist(), target.tolist()


def test_targets_are_the_whole_texts_and_masks_change(data, tokenizer):
    examples = data.train_split(tokenizer, (), seed=3).examples
    number, mask, end = examples.num_examples, mask_of(tokenizer), tokenizer.special_ids.eos
    epochs = [[examples.example(epoch, i) for i in range(number)] for epoch in (0, 1)]
    targets = [[pair[1] for example in epoch for pair in pairs_of(example)] for epoch in epochs]
    assert targets[0] == targets[1]
    assert any((a["input_ids"] != b["input_ids"]).any() for a, b in zip(*epochs, strict=True))
    texts = [tokenizer.decode(target[:-1]).strip() for target in targets[0]]
    assert all(text in max(DOCUMENTS, key=len) for text in texts)
    characters = [sum(len(text.replace(" ", "")) for text in t) for t in (texts, data.texts())]
    assert characters[0] == characters[1]  # each text once, nothing left out
    num_masked = num_tokens = 0
    spec = data.batch_spec(0, 0)
    for example in epochs[0]:
        assert {k: x.shape for k, x in example.items()} == {k: x.shape for k, x in spec.items()}
        for source, target in pairs_of(example):
            assert source[-1] == target[-1] == end
            assert mask not in target
            kept = [token for token in source if token != mask]
            assert len(target) - len(kept) == examples.corruption.num_masked(len(target) - 1)
            num_masked += len(target) - len(kept)
            num_tokens += len(target) - 1
    assert 0.3 <= num_masked / num_tokens < 0.33


def test_a_position_decides_the_batch(data, tokenizer):
    """A run that resumes sees the batches that it would have seen."""
    split = data.train_split(tokenizer, (), seed=3)
    copy = pickle.loads(pickle.dumps(split.examples))
    with closing(train_iterator(split.examples, batch_size=4, seed=3, num_steps=20)) as whole:
        first = [next(whole) for _ in range(9)][-1]
        state = whole.get_state()
        rest = [next(whole)["input_ids"] for _ in range(9)]
    with closing(train_iterator(copy, batch_size=4, seed=3, num_steps=20)) as resumed:
        resumed.set_state(state)
        assert all((next(resumed)["input_ids"] == batch).all() for batch in rest)
    assert first["input_ids"].shape == (4, 48)


def test_the_mask_of_a_vocabulary(data, tokenizer, tmp_path):
    assert tokenizer.vocab_size == 300
    assert tokenizer.token(mask_of(tokenizer)) == "<extra_id_0>"
    assert len(tokenizer.sentinels) == 1
    ends = {tokenizer.token(id) for id in sentence_ends(tokenizer)}
    assert {".", "!", "?"} <= {end[-1] for end in ends}
    tokenizer.save(tmp_path)
    assert mask_of(load_tokenizer(tmp_path)) == mask_of(tokenizer)


def test_invalid_input_is_refused(data):
    fields = {"source": data.source, "tokenizer": VOCABULARY}
    with pytest.raises(UserError, match=r"length must .*2"):
        DenoisingData(length=2, **fields)
    with pytest.raises(UserError, match=r"mask_fraction must .*2"):
        DenoisingData(length=48, mask_fraction=2, **fields)
    words = train_tokenizer(DOCUMENTS, TokenizerConfig("words"))
    with pytest.raises(DataError, match="start and end a text"):
        data.train_split(words, (), 0)
    letters = train_tokenizer(DOCUMENTS, TokenizerConfig("sentencepiece-bpe", 299))
    with pytest.raises(DataError, match=r"mask .*sentinel"):
        data.train_split(letters, (), 0)
