"""Models of folders read texts in the frame of their tokenizer, as transformers does."""

import json

import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models, train
from flaxzoo.data import UserError
from transformers import PreTrainedTokenizerFast

from ...data.tokenizers.test_round_trips import FAMILIES

pytestmark = pytest.mark.usefixtures("on_one_device")

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 48, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_position_embeddings": 48,
}  # fmt: skip
LABELS = {"id2label": {0: "a", 1: "b", 2: "c"}}
TEXTS = ["the old man went down", "sea", "to the sea " * 30]
PAIRS = [("the old man", "went down"), ("to the sea " * 20, "was calm"), ("sea", "the old " * 30)]
QUESTIONS = [("the old?", "the old man went down to the sea and was calm"), ("sea", "to " * 60)]


def folder_of(family, name, work_folder, **fields):
    """A model and a tokenizer of transformers, saved."""
    make, processor, _, stated = FAMILIES[family]
    backend = make()
    backend.post_processor = processor
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles, **stated)
    kind = getattr(transformers, name)
    sizes = BART if name.startswith("Bart") else SIZES
    if name.startswith("GPT2"):
        sizes = {field: size for field, size in sizes.items() if field != "intermediate_size"}
    if name.startswith(("Llama", "Mistral", "Qwen3")):
        sizes = {**sizes, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=300, **{**sizes, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(work_folder)
    tokenizer.save_pretrained(work_folder)
    return model, tokenizer


def outputs_of(model, tokenizer, *texts, length=None):
    options = {} if length is None else {"truncation": True, "max_length": length}
    batch = tokenizer(*([text] for text in texts), return_tensors="pt", **options)
    with torch.no_grad():
        return batch["input_ids"][0].tolist(), model(**batch)


def length_of(work_folder):
    return train.open_run(work_folder)[0].data.length


CLASSIFIERS = [
    ("bert", "BertForSequenceClassification"),
    ("bert without types", "BertForSequenceClassification"),
    ("roberta", "RobertaForSequenceClassification"),
    ("roberta with types", "BertForSequenceClassification"),
    ("bart", "BartForSequenceClassification"),
    ("gpt2", "GPT2ForSequenceClassification"),
    ("llama", "LlamaForSequenceClassification"),
    ("mistral", "MistralForSequenceClassification"),
    ("qwen2", "Qwen3ForSequenceClassification"),
    ("qwen3 embedding", "Qwen3ForSequenceClassification"),
    ("gpt-neox", "GPTNeoXForSequenceClassification"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), CLASSIFIERS)
def test_classifiers(family, name, tmp_path):
    model, tokenizer = folder_of(family, name, tmp_path / "theirs", **LABELS)
    train.import_model(tmp_path / "theirs", tmp_path / "run")
    train.export_model(tmp_path / "run", tmp_path / "out")
    texts = [*((text,) for text in TEXTS), *PAIRS]
    length = length_of(tmp_path / "run")
    right = []
    for one in texts:
        _, found = outputs_of(model, tokenizer, *one, length=length)
        right.append(torch.softmax(found.logits[0], -1).numpy())
    given = [dict(zip(("text", "text_b"), one, strict=False)) for one in texts]
    for work_folder in ("theirs", "run", "out"):
        found = []
        for part in (given[: len(TEXTS)], given[len(TEXTS) :]):
            found += train.predict(tmp_path / work_folder, part, log=lambda *_: None)
        found = [list(one["probabilities"].values()) for one in found]
        np.testing.assert_allclose(found, right, atol=1e-5)
    if family in ("gpt2", "qwen2"):
        with pytest.raises(UserError, match=r"\[1\]"):
            train.predict(tmp_path / "run", [{"text": "sea"}, {"text": ""}], log=lambda *_: None)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "BertForQuestionAnswering"),
        ("roberta", "RobertaForQuestionAnswering"),
        ("bart", "BartForQuestionAnswering"),
    ],
)
def test_questions(family, name, tmp_path):
    model, tokenizer = folder_of(family, name, tmp_path)
    config, ours = train.open_run(tmp_path)
    given = [{"question": question, "context": context} for question, context in QUESTIONS]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in given))
    examples = config.data.input_split(str(file), ours, ()).examples
    answers = train.predict(tmp_path, str(file), log=lambda *_: None)
    row = 0
    for (question, context), answer in zip(QUESTIONS, answers, strict=True):
        alone = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, "a")]
        added = len(tokenizer(question, "a")["input_ids"]) - sum(map(len, alone))
        room = config.data.length - added - len(alone[0])
        windows = tokenizer(
            [question], [context], truncation="only_second", max_length=config.data.length,
            stride=room - min(config.data.stride, room // 2), return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )  # fmt: skip
        best = []
        for number, ids in enumerate(windows["input_ids"]):
            found = examples.tokens.example(row)
            assert found["input_ids"][: len(ids)].tolist() == ids
            assert found["attention_mask"].sum() == len(ids)
            own = [i for i, owner in enumerate(windows.sequence_ids(number)) if owner == 1]
            assert examples.tokens.second[row] == own[0]
            batch = {"input_ids": torch.tensor([ids])}
            if "token_type_ids" in windows:
                batch["token_type_ids"] = torch.tensor([windows["token_type_ids"][number]])
                assert (
                    found["token_type_ids"][: len(ids)].tolist()
                    == batch["token_type_ids"][0].tolist()
                )
            with torch.no_grad():
                logits = model(**batch)
            starts, ends = logits.start_logits[0], logits.end_logits[0]
            offsets = windows["offset_mapping"][number]
            best += [
                (float(starts[i] + ends[j]), text)
                for i in own
                for j in own[: own.index(i) + config.data.max_answer_length]
                if i <= j and (text := context[offsets[i][0] : offsets[j][1]].strip())
            ]
            row += 1
        if len(windows["input_ids"]) == 1:
            score, text = max(best)
            assert answer["answer"] == text
            assert answer["score"] == pytest.approx(score, abs=1e-4)
        else:
            assert len(windows["input_ids"]) > 1
    assert row == examples.num_examples


def test_choices_and_tags(tmp_path):
    model, tokenizer = folder_of("roberta", "RobertaForMultipleChoice", tmp_path / "choices")
    context, choices = "the old man", ["went down", "was calm , to the sea", "sea"]
    batch = tokenizer([context] * 3, choices, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = model(**{name: x[None] for name, x in batch.items()}).logits[0]
    [found] = train.predict(
        tmp_path / "choices", [{"context": context, "choices": choices}], log=lambda *_: None
    )
    right = torch.softmax(logits, -1).numpy()
    np.testing.assert_allclose(found["probabilities"], right, atol=1e-5)
    model, tokenizer = folder_of(
        "roberta", "RobertaForTokenClassification", tmp_path / "tags", **LABELS
    )
    words = "the old man went to the sea".split()
    batch = tokenizer([" ".join(words)], return_tensors="pt", return_offsets_mapping=True)
    offsets = batch.pop("offset_mapping")[0].tolist()
    with torch.no_grad():
        chances = torch.softmax(model(**batch).logits[0], -1).max(-1).values.numpy()
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    firsts = [
        next(i for i, (_, end) in enumerate(offsets) if end > stop - len(word))
        for word, stop in zip(words, ends.tolist(), strict=True)
    ]
    (tmp_path / "words.txt").write_text(" ".join(words) + "\n")
    [found] = train.predict(tmp_path / "tags", str(tmp_path / "words.txt"), log=lambda *_: None)
    np.testing.assert_allclose(found["probabilities"], chances[firsts], atol=1e-5)
    assert [found] == train.predict(tmp_path / "tags", [" ".join(words)], log=lambda *_: None)


@pytest.mark.parametrize(
    ("family", "forced"), [("bart", 0), ("bart", None), ("mbart-50", 5), ("pegasus", None)]
)
def test_targets(family, forced, tmp_path):
    """The labels of transformers are a framed target; the decoder reads them after its start."""
    given = {"decoder_start_token_id": 2, "forced_bos_token_id": forced}
    model, tokenizer = folder_of(family, "BartForConditionalGeneration", tmp_path, **given)
    model.generation_config.forced_bos_token_id = forced
    model.generation_config.save_pretrained(tmp_path)
    source, target = "the old man went", "to the sea"
    ids = tokenizer(target, add_special_tokens=False)["input_ids"]
    labels = tokenizer(text_target=target)["input_ids"]
    assert labels[-1] == 2
    with torch.no_grad():
        logits = model(
            **tokenizer(source, return_tensors="pt"),
            decoder_input_ids=torch.tensor([[2, *labels[:-1]]]),
        ).logits[0]
    right = torch.log_softmax(logits, -1)[torch.arange(len(labels)), labels]
    [found] = models.TextScorer.of_run(tmp_path)([target], sources=[source])
    assert [token.id for token in found.tokens] == [*ids, 2]
    found = [token.log_probability for token in found.tokens]
    np.testing.assert_allclose(found, right[-len(ids) - 1 :], atol=1e-5)
    scorer = models.ContinuationScorer.of_run(tmp_path)
    [continued] = scorer([(source, target)], log=lambda *_: None)
    assert continued.log_probability == pytest.approx(
        float(right[-len(ids) - 1 : -1].sum()), abs=1e-4
    )


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("roberta", "RobertaModel"),
        ("roberta", "MPNetModel"),
        ("qwen3 embedding", "Qwen3Model"),
        ("gpt2", "GPT2Model"),
    ],
)
def test_vectors(family, name, tmp_path):
    model, tokenizer = folder_of(family, name, tmp_path)
    embedder = models.TextEmbedder.of_run(tmp_path)
    found = embedder(TEXTS, lambda *_: None)
    for text, vector in zip(TEXTS, found, strict=True):
        _, outputs = outputs_of(model, tokenizer, text, length=embedder._max_length)
        right = outputs.last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, right, atol=1e-5)
