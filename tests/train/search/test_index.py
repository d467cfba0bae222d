"""`flaxzoo index` and `flaxzoo search`: exact results, files that are checked, and reranking."""

import gzip
import json
import shutil

import jax
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.cli.main import main
from flaxzoo.train.evaluation.vectors import retrieval

WORDS = "the cat dog bird sat ran flew on under a mat tree".split()
DRAW = np.random.default_rng(0)
TEXTS = {f"t{i}": " ".join(DRAW.choice(WORDS, 2 + i % 7)) for i in range(30)}
TEXTS["t21"] = TEXTS["t4"]
QUERIES = ["the cat sat", "a bird under the tree", TEXTS["t4"]]


def written(folder, head, seed, **fields):
    """A random BERT in Hugging Face's form."""
    folder.mkdir()
    pieces = [*WORDPIECE_SPECIALS, *WORDS]
    sizes = {"max_length": 32, "num_layers": 1, "d_model": 16, "num_heads": 2}
    config = models.BertConfig(vocab_size=len(pieces), head=head, **sizes, **fields)
    params = models.init_params(models.create(config), jax.random.key(seed))
    write_weights(folder, config, jax.tree.map(lambda x: 8 * x, params))
    wordpiece(pieces, lowercase=True).save(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("a") / "model", "none", 0)


@pytest.fixture(scope="module")
def index(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("b") / "index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "AT_ONCE", 11)
        train.SearchIndex.build(TEXTS, path, folder, log=lambda _: None)
    return path


def brute_force(folder, top_k):
    embedder = models.TextEmbedder.of_run(folder)
    x, y = (embedder([*texts], lambda _: None) for texts in (QUERIES, TEXTS.values()))
    x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, y))
    scores = (x @ y.T).round(5)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return [[(f"t{j}", scores[i, j]) for j in row] for i, row in enumerate(order)]


@pytest.mark.parametrize("top_k", [1, 10, 100])
def test_results_are_those_of_brute_force(folder, index, top_k):
    found = train.SearchIndex.open(index).search(QUERIES, top_k)
    for hits, right in zip(found, brute_force(folder, top_k), strict=True):
        assert [(hit.id, hit.text) for hit in hits] == [(id, TEXTS[id]) for id, _ in right]
        assert [hit.score for hit in hits] == pytest.approx([x for _, x in right], abs=2e-5)


def test_a_cross_encoder_ranks_the_candidates_again(tmp_path, index, capsys):
    reranker = written(tmp_path / "cross", "sequence_classification", 1, labels=("score",))
    opened = train.SearchIndex.open(index)
    assert len(opened) == 30
    assert opened.ids == [*TEXTS]
    (candidates,) = opened.search(QUERIES[1:2], 8)
    scorer = models.PairScorer.of_run(reranker)
    scores = scorer.score([(QUERIES[1], hit.text) for hit in candidates])
    right = [candidates[i].id for i in np.argsort(-scores, kind="stable")][:3]
    assert right != [hit.id for hit in candidates[:3]]
    (found,) = opened.search(QUERIES[1:2], 3, reranker=scorer, candidates=8)
    assert [hit.id for hit in found] == right
    options = ["--top-k", "3", "--rerank", str(reranker), "--candidates", "8", "--json"]
    assert main(["search", str(index), QUERIES[1], *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["rank"], row["id"], row["text"]) for row in rows] == [
        (i, id, TEXTS[id]) for i, id in enumerate(right, start=1)
    ]
    assert [row["score"] for row in rows] == pytest.approx(sorted(scores, reverse=True)[:3])


def test_another_model_and_damage_are_refused(tmp_path, folder, index, capsys):
    moved = shutil.copytree(index, tmp_path / "index")
    other = written(tmp_path / "other", "none", 5)
    assert main(["search", str(moved), "cat", "--run", str(other)]) == 2
    assert str(folder) in capsys.readouterr().err
    same = shutil.copytree(folder, tmp_path / "moved")
    assert main(["search", str(moved), "cat", "--run", str(same), "--top-k", "2"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2"]
    assert main(["search", str(moved), "cat", "--run", str(tmp_path / "gone")]) == 2
    assert "--run" in capsys.readouterr().err
    (moved / "texts.jsonl").write_text("{}\n")
    with pytest.raises(data.UserError, match=r"damaged .texts.jsonl .*30 texts"):
        train.SearchIndex.open(moved)
    (moved / "vectors.npy").write_bytes(b"x")
    with pytest.raises(data.UserError, match=r"damaged .*index"):
        train.SearchIndex.open(moved)
    with pytest.raises(FileNotFoundError, match=r"other/x .*index"):
        train.SearchIndex.open(other / "x")
    with pytest.raises(data.UserError, match="not an index"):
        train.SearchIndex.open(other)


def test_candidates_without_a_reranker_are_refused(index, capsys):
    assert main(["search", str(index), "cat", "--candidates", "20"]) == 2
    assert "--candidates 20 " in capsys.readouterr().err


def test_a_folder_appears_complete_or_not_at_all(tmp_path, folder, monkeypatch):
    with pytest.raises(data.UserError, match=r"exists .*empty"):
        train.SearchIndex.build(TEXTS, folder, folder, log=lambda _: None)
    with pytest.raises(data.UserError, match=r"documents .*empty"):
        train.SearchIndex.build([], tmp_path / "index", folder)
    monkeypatch.setattr(np.lib.format, "open_memmap", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.SearchIndex.build(TEXTS, tmp_path / "index", folder)
    assert not [*tmp_path.iterdir()]


FORMS = {
    "lines.txt": ("one\n\ntwo\n", {"1": "one", "3": "two"}),
    "rows.jsonl": ('{"text": "one"}\n{"_id": "x", "title": "A", "text": "b"}\n',
                   {"1": "one", "x": "A b"}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_files_of_texts(tmp_path, form):
    content, right = FORMS[form]
    (tmp_path / form).write_text(content)
    assert data.read_named_texts(str(tmp_path / form)) == right


def test_folders_of_texts(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "b" / "c.md").write_text("four")
    right = {"a.txt:1": "one\ntwo", "a.txt:2": "three", "b/c.md:1": "four"}
    assert data.read_named_texts(str(tmp_path)) == right
    found = data.read_named_texts(f"text:{tmp_path}/a.txt#line")
    assert [*found.values()] == ["one", "two", "three"]
    (tmp_path / "corpus.jsonl").write_text('{"_id": 7, "title": "", "text": "x"}\n')
    assert data.read_named_texts(str(tmp_path)) == {"7": "x"}
    # The corpus may be compressed, as in an evaluation.
    plain = tmp_path / "corpus.jsonl"
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert data.read_named_texts(str(tmp_path)) == {"7": "x"}
    (tmp_path / "empty.txt").write_text("\n")
    for name in (f"{tmp_path}/empty.txt", f"{tmp_path}/gone.txt"):
        with pytest.raises(data.DataError):
            data.read_named_texts(name)


def test_the_command_indexes_a_file(tmp_path, folder, capsys):
    (tmp_path / "texts.txt").write_text("the cat sat\nthe dog ran\n")
    names = [str(tmp_path / "texts.txt"), str(tmp_path / "index")]
    assert main(["index", *names, "--run", str(folder)]) == 0
    assert "index: 2 vectors of 16 numbers\n" in capsys.readouterr().err
    assert main(["search", names[1], "the cat sat"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "  1  1.0000  1  the cat sat"
    assert main(["index", *names, "--model", str(folder)]) == 2
    assert "--run" in capsys.readouterr().err


def test_a_tool_retrieves_texts_from_an_index(index):
    tool = train.search_index(index, number=2)
    (hits,) = train.SearchIndex.open(index).search(QUERIES[:1], 2)
    expected = "\n\n".join(f"{hit.id}: {hit.text}" for hit in hits)
    assert tool({"query": QUERIES[0]}) == expected


def test_an_index_stores_its_checkpoint(tmp_path, folder):
    """A search must not read a newer checkpoint of the same run."""
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    index = tmp_path / "index"
    train.SearchIndex.build(TEXTS, index, tmp_path / "run", log=lambda _: None)
    assert json.loads((index / "config.json").read_text())["step"] == 0
