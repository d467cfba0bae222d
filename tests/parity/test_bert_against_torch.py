"""Encoders against tiny random models of transformers, head by head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.losses.cross_entropy import cross_entropy, softmax_cross_entropy

from ..support.hf_weights import gradients_of
from ..support.parity import note_answers, note_gradients

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, P, L, D, N, F = 37, 16, 3, 24, 4, 40
LABELS = ("red", "green", "blue")
SIZES = {
    "vocab_size": V,
    "max_length": P,
    "num_layers": L,
    "d_model": D,
    "num_heads": N,
    "d_ff": F,
}
# Nothing at its default where it can be helped.
USUAL = {
    "hidden_size": D,
    "num_hidden_layers": L,
    "num_attention_heads": N,
    "intermediate_size": F,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LIKE_ROBERTA = {**USUAL, "max_position_embeddings": P + 2, "layer_norm_eps": 1e-5}
FAMILIES = {
    "Bert": {
        **USUAL,
        "max_position_embeddings": P,
        "hidden_act": "silu",
        "type_vocab_size": 3,
        "layer_norm_eps": 1e-3,
    },
    "Roberta": {**LIKE_ROBERTA, "hidden_act": "gelu_new", "type_vocab_size": 1},
    "XLMRoberta": {**LIKE_ROBERTA, "hidden_act": "relu", "type_vocab_size": 1},
    "RobertaPreLayerNorm": {**LIKE_ROBERTA, "hidden_act": "silu", "type_vocab_size": 2},
    "MPNet": {**LIKE_ROBERTA, "hidden_act": "relu"},
    "Camembert": {**LIKE_ROBERTA, "hidden_act": "silu", "type_vocab_size": 2},
    "Electra": {
        **USUAL,
        "embedding_size": 12,
        "max_position_embeddings": P,
        "hidden_act": "silu",
        "type_vocab_size": 2,
        "summary_last_dropout": 0.0,
    },
    "Albert": {
        **USUAL,
        "embedding_size": 12,
        "max_position_embeddings": P,
        "hidden_act": "silu",
        "num_hidden_groups": 2,
        "inner_group_num": 2,
        "classifier_dropout_prob": 0.0,
    },
    "ModernBert": {
        "hidden_size": D,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "intermediate_size": F,
        "max_position_embeddings": P,
        "hidden_activation": "silu",
        "classifier_activation": "relu",
        "local_attention": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        "classifier_pooling": "mean",
        "attention_bias": True,
        "mlp_bias": True,
        "classifier_bias": True,
    },
    "NomicBert": {
        **USUAL,
        "max_position_embeddings": P,
        "hidden_act": "relu",
        "type_vocab_size": 3,
        "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    },
    "Gte": {
        **USUAL,
        "max_position_embeddings": P,
        "hidden_act": "silu",
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 1.5},
    },
    "DistilBert": {
        "dim": D,
        "n_layers": L,
        "n_heads": N,
        "hidden_dim": F,
        "max_position_embeddings": P,
        "activation": "relu",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        "qa_dropout": 0.0,
    },
}
DEBERTA = {
    **USUAL,
    "max_position_embeddings": P,
    "layer_norm_eps": 1e-5,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
}
FAMILIES |= {
    "Deberta": {**DEBERTA, "hidden_act": "silu", "type_vocab_size": 2, "embedding_size": 12},
    "DebertaV2": {
        **DEBERTA,
        "position_biased_input": False,
        "share_att_key": True,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
    "DebertaV2 separate": {
        **DEBERTA,
        "type_vocab_size": 2,
        "embedding_size": 12,
        "max_relative_positions": 7,
        "conv_kernel_size": 5,
        "conv_groups": 3,
        "pooler_dropout": 0.1,
    },
    "ModernBert biased": {
        **{"hidden_size": D, "num_hidden_layers": L, "num_attention_heads": N},
        **{"intermediate_size": F, "max_position_embeddings": P, "local_attention": 8},
        **{"norm_bias": True, "decoder_bias": False},
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
                "original_max_position_embeddings": 8,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
}
HEADS = {  # our head: the end of their class's name
    "none": "Model",
    "pretraining": "ForPreTraining",
    "masked_lm": "ForMaskedLM",
    "next_sentence": "ForNextSentencePrediction",
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
    "multiple_choice": "ForMultipleChoice",
    "causal_lm": "ForCausalLM",
}
OF_ELECTRA = {"replaced_token_detection": "ForPreTraining"}
ONLY_BERT = ("pretraining", "next_sentence")
COPIES = ("XLMRoberta", "Camembert")
"""Families with the network of RoBERTa."""
CASES = [
    *(("Bert", head) for head in HEADS),
    *(
        (family, head)
        for family in ("Roberta", *COPIES, "RobertaPreLayerNorm")
        for head in HEADS
        if head not in ONLY_BERT
    ),
    *(
        (family, head)
        for family in ("DistilBert", "Electra", "MPNet", "ModernBert")
        for head in HEADS
        if head not in (*ONLY_BERT, "causal_lm")
    ),
    *(("Electra", head) for head in ("causal_lm", *OF_ELECTRA)),
    *(
        (family, head)
        for family in ("Deberta", "DebertaV2")
        for head in HEADS
        if head not in (*ONLY_BERT, "causal_lm")
        and (family, head) != ("Deberta", "multiple_choice")
    ),
    *(
        (family, head)
        for family in ("DebertaV2 separate", "ModernBert biased")
        for head in ("masked_lm", "sequence_classification")
    ),
    *(("Albert", head) for head in HEADS if head not in ("next_sentence", "causal_lm")),
    *(
        (family, head)
        for family in ("NomicBert", "Gte")
        for head in ("none", "masked_lm", "sequence_classification", "token_classification")
    ),
]
UNTIED = [
    *(("Bert", head) for head in ("masked_lm", "pretraining", "causal_lm")),
    *(
        (family, "masked_lm")
        for family in ("Roberta", "DistilBert", "Electra", "MPNet", "ModernBert", "Albert")
    ),
    ("ModernBert biased", "masked_lm"),
    *((family, "masked_lm") for family in ("Deberta", "DebertaV2", "NomicBert", "Gte")),
]
"""Cases with a vocabulary matrix of their own."""
ALL = [*((*case, True) for case in CASES), *((*case, False) for case in UNTIED)]
UNUSED = {"cls.predictions.bias", "lm_head.bias", "predictions.bias"}
"""Biases of untied models, which transformers does not read: it adds the decoder's."""


WITHOUT_POOLER = ("DistilBert", "Electra", "ModernBert", "Deberta", "DebertaV2", "NomicBert", "Gte")
WITH_TYPES = ("Bert", "Electra", "Albert", "Deberta", "DebertaV2 separate", "NomicBert", "Gte")


def class_name(family, head):
    name = family.split()[0] + (HEADS | OF_ELECTRA)[head]
    return "BertLMHeadModel" if name == "BertForCausalLM" else name


def make(family, head, tied=True, vocab_size=V):
    """A torch model with no parameter at its initial value."""
    torch.manual_seed(0)
    cls = getattr(transformers, class_name(family, head))
    fields = {"is_decoder": True} if head == "causal_lm" else {}
    config = getattr(transformers, f"{family.split()[0]}Config")(
        vocab_size=vocab_size,
        num_labels=2 if head in ("question_answering", "pretraining") else len(LABELS),
        pad_token_id=1,
        attn_implementation="eager",
        tie_word_embeddings=tied,
        **FAMILIES[family],
        **fields,
    )
    theirs = cls(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return theirs.eval()


def inputs(family, head):
    """Three rows, one of them full, padded on the right; in some heads of two choices."""
    rng = np.random.default_rng(0)
    shape = (3, 2, P) if head == "multiple_choice" else (3, P)
    lengths = np.array([P, 9, 4]).reshape(3, *[1] * (len(shape) - 1))
    ids = rng.integers(2, V, shape)
    mask = (np.arange(P) < np.broadcast_to(lengths, shape)).astype(np.int64)
    # RoBERTa's positions are counted by the padding id.
    given = {"input_ids": np.where(mask, ids, 1), "attention_mask": mask}
    if family in WITH_TYPES:
        given["token_type_ids"] = rng.integers(0, 2, shape)
    return given


def as_torch(given):
    return {name: torch.from_numpy(x) for name, x in given.items()}


def ours_of(theirs, folder):
    """A torch model, saved and read as ours."""
    theirs.save_pretrained(folder)
    return models.load(folder)


NAMES = {
    "none": ("last_hidden_state", "pooler_output"),
    "pretraining": ("prediction_logits", "seq_relationship_logits"),
    "question_answering": ("start_logits", "end_logits"),
}
ORDER_LOGITS = "Albert", "seq_relationship_logits"


def assert_answers(output, theirs, given, case):
    """Compares every output of a torch model with ours; the case is its family and head."""
    family, head = case
    with torch.no_grad():
        expected = theirs(**as_torch(given), output_hidden_states=True)
    real = given["attention_mask"] == 1
    rows = real.reshape(-1, P)  # of choices too
    hidden = expected.hidden_states[-1].numpy()[rows]
    np.testing.assert_allclose(output.last_hidden_state[rows], hidden, rtol=0, atol=1e-5)
    for name in NAMES.get(head, ("logits",)):
        if name == "pooler_output" and family in WITHOUT_POOLER:
            assert output.pooler_output is None
            continue
        theirs_name = "sop_logits" if (family, name) == ORDER_LOGITS else name
        wanted, ours = getattr(expected, theirs_name).numpy(), np.asarray(getattr(output, name))
        assert wanted.shape == ours.shape
        assert np.abs(wanted).max() > 0.1
        if wanted.shape[:2] == real.shape:  # what padding answers is nobody's business
            wanted, ours = wanted[real], ours[real]
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5, err_msg=name)
        note_answers(theirs, "import", ours, wanted)


@pytest.mark.parametrize(("family", "head", "tied"), ALL)
def test_answers_and_what_we_write(tmp_path, family, head, tied):
    theirs, given = make(family, head, tied), inputs(family, head)
    model, params = ours_of(theirs, tmp_path / "theirs")
    assert tied or not model.config.tie_output
    output = jax.jit(model.apply)({"params": params}, **given)
    assert_answers(output, theirs, given, (family, head))

    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", model.config, params)
    again, info = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    expected = theirs.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, x in again.state_dict().items():
        assert torch.equal(x, expected[name]) or (not tied and name in UNUSED), name
    with torch.no_grad():
        answers = [m.eval()(**as_torch(given))[0] for m in (again, theirs)]
    # The same numbers, but where they lie in memory decides how some processors add them up.
    torch.testing.assert_close(*answers, rtol=0, atol=1e-6)
    ours = np.asarray(getattr(output, NAMES.get(head, ("logits",))[0]))
    wanted, real = answers[0].numpy(), given["attention_mask"] == 1
    if wanted.shape[:2] == real.shape:
        ours, wanted = ours[real], wanted[real]
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)
    note_answers(again, "export", ours, wanted)
    assert models.load(tmp_path / "ours")[0].config == model.config


@pytest.mark.parametrize("family", ["Roberta", "MPNet"])
def test_padding_on_the_left_moves_positions(tmp_path, family):
    """Positions of these families count real tokens."""
    theirs, given = make(family, "none"), inputs(family, "none")
    given = {name: np.ascontiguousarray(x[:, ::-1]) for name, x in given.items()}
    with torch.no_grad():
        wanted = theirs(**as_torch(given)).last_hidden_state.numpy()
    model, params = ours_of(theirs, tmp_path)
    hidden = jax.jit(model.apply)({"params": params}, **given).last_hidden_state
    real = given["attention_mask"] == 1
    np.testing.assert_allclose(hidden[real], wanted[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "head", "tied"),
    [
        ("Bert", "pretraining", True),
        ("Albert", "pretraining", True),
        *((family, "masked_lm", True) for family in FAMILIES),
        # The head is shared code: BERT's, and one behind a narrower embedding.
        *((family, "masked_lm", False) for family in ("Bert", "Electra")),
    ],
)
def test_every_gradient(tmp_path, family, head, tied):
    """Of masked words, gathered, and next sentences: against torch's labels of -100."""
    theirs = make(family, head, tied)
    given = inputs(family, head)
    rng = np.random.default_rng(1)
    positions = np.stack([rng.permutation(4)[:3] for _ in range(3)])
    weights = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    positions, words = positions * weights, rng.integers(0, V, (3, 3))
    labels = np.full((3, P), -100)
    for row, work_folder, word in zip(*np.nonzero(weights), words[weights == 1], strict=True):
        labels[row, positions[row, work_folder]] = word
    continues = np.array([0, 1, 1])

    targets = {"labels": torch.from_numpy(labels)}
    if head == "pretraining":
        label = "sentence_order_label" if family == "Albert" else "next_sentence_label"
        targets[label] = torch.from_numpy(continues)
    expected_loss = theirs(**as_torch(given), **targets).loss
    expected_loss.backward()
    model, params = ours_of(theirs, tmp_path)
    expected = gradients_of(theirs, model.config)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(params):
        output = model.apply({"params": params}, **given, masked_positions=positions)
        assert output.projection.hidden.shape[:2] == (3, 3)
        masked = cross_entropy(
            output.projection, jnp.asarray(words), jnp.asarray(weights, jnp.float32)
        )
        loss = masked.loss / weights.sum()
        if head == "pretraining":
            logits = output.seq_relationship_logits
            loss += softmax_cross_entropy(logits, jnp.asarray(continues), jnp.ones(3)).loss / 3
        return loss

    loss, gradient = loss_and_gradient(params)
    note_gradients(theirs, "gradients", gradient, expected)
    np.testing.assert_allclose(loss, expected_loss.item(), rtol=1e-6)
    for (path, ours), (_, torchs) in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves_with_path(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        # A relative part beside it: some gradients are in the tens.
        np.testing.assert_allclose(ours, torchs, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("width", [4, 5])
def test_a_window_of_modernbert_reaches_as_far_as_theirs(tmp_path, width):
    """Found by the gradients of the only layer's output at one token."""
    windowed = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    fields = FAMILIES["ModernBert"] | windowed | {"local_attention": width}
    torch.manual_seed(0)
    theirs = transformers.ModernBertModel(
        transformers.ModernBertConfig(vocab_size=V, pad_token_id=1, **fields)
    )
    ids, factors = np.arange(2, P + 2)[None], np.random.default_rng(0).normal(size=D)
    hidden = theirs(torch.from_numpy(ids)).last_hidden_state
    (hidden[0, 8] * torch.from_numpy(factors)).sum().backward()
    model, params = ours_of(theirs, tmp_path)
    gradient = jax.grad(
        lambda params: model.apply({"params": params}, ids).last_hidden_state[0, 8] @ factors
    )(params)["token_embedding"]["embedding"]
    seen = np.flatnonzero(np.abs(gradient).sum(axis=1)) - 10
    given = theirs.embeddings.tok_embeddings.weight.grad.abs().sum(dim=1)
    np.testing.assert_array_equal(seen, np.flatnonzero(given.numpy()) - 10)
    np.testing.assert_array_equal(seen, range(-2, 3))


@pytest.mark.parametrize(
    "fields",
    [
        {"legacy": False},
        {"pos_att_type": "c2p", "position_buckets": 6, "max_relative_positions": 12},
        {"pos_att_type": ["p2c"], "share_att_key": True, "pooler_hidden_act": "tanh"},
        {"relative_attention": False, "pos_att_type": None},
        {"pos_att_type": None, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        {"relative_attention": False, "pos_att_type": "None", "position_buckets": 4},
    ],
)
def test_other_debertas(tmp_path, fields):
    """Texts longer than all distances have; the head whose names differ is written as the usual."""
    torch.manual_seed(0)
    sizes = {**DEBERTA, "position_biased_input": False, **fields}
    config = transformers.DebertaV2Config(vocab_size=V, **sizes)
    theirs = transformers.DebertaV2ForMaskedLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model, params = ours_of(theirs, tmp_path)
    ids = np.random.default_rng(0).integers(0, V, (2, 2 * P + 3))
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", model.config, params)
    for torchs in (theirs, type(theirs).from_pretrained(tmp_path / "ours").eval()):
        with torch.no_grad():
            expected = torchs(torch.from_numpy(ids)).logits.numpy()
        ours = model.apply({"params": params}, ids).logits
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_dropout_stands_where_the_original_has_it():
    def places(head):
        config = models.BertConfig(**SIZES, head=head, labels=LABELS)
        model = models.create(config)
        params = models.init_params(model, jax.random.key(0))
        shape = (2, 1, 5) if head == "multiple_choice" else (2, 5)
        rng = models.row_keys(jax.random.key(1), 2)

        def forward(params, rng):
            output = model.apply({"params": params}, np.zeros(shape, int), rng=rng)
            return jax.tree.leaves(output)

        return str(jax.make_jaxpr(forward)(params, rng)).count("name=dropout_mask")

    # Embeddings; in the one traced layer attention weights and two outputs; classifiers.
    counts = {head: places(head) for head in HEADS}
    with_dropout = {"sequence_classification", "multiple_choice", "token_classification"}
    assert counts == {head: 5 if head in with_dropout else 4 for head in HEADS}
