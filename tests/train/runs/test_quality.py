"""A classifier told good texts from a crawl; `prepare` keeps what it holds for good."""

import dataclasses
import json
import pickle
import random
import shutil

import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.prepared.write_shards import in_order
from flaxzoo.train.cli import main as cli

pytestmark = [pytest.mark.usefixtures("on_one_device"), pytest.mark.slow]

GOOD = "the cat sat on a mat and then it saw some dog run from the house".split()
JUNK = "click here buy cheap pills now win free casino bonus offer".split()
SIZES = {"vocab_size": 1, "max_length": 16, "num_layers": 1, "d_model": 16, "num_heads": 2}


def lines(words, number, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=8)) for _ in range(number)]


@pytest.fixture(scope="module")
def work_folder(tmp_path_factory):
    """A good corpus, a crawl that is half good and half junk, and a classifier of the two."""
    work_folder = tmp_path_factory.mktemp("quality")
    (work_folder / "good.txt").write_text("\n".join(lines(GOOD, 60, 0)))
    (work_folder / "junk.txt").write_text("\n".join(lines(JUNK, 60, 1)))
    crawl = lines(GOOD, 25, 2) + lines(JUNK, 15, 3)
    random.Random(4).shuffle(crawl)
    (work_folder / "crawl.txt").write_text("\n".join(crawl))
    config = train.TrainConfig(
        model=models.BertConfig(**SIZES),
        data=data.SequenceClassificationData(
            source=f"corpora:crawl=text:{work_folder}/junk.txt#line | "
            f"good=text:{work_folder}/good.txt#line",
            length=16,
            target="binary",
            tokenizer=data.TokenizerConfig("wordpiece", 90),
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=2e-2, beta2=0.99),
        batch_size=16,
        steps=40,
    )
    result = train.train(config, work_folder / "quality", quiet=True)
    assert result.validation["accuracy"] == 1.0
    return work_folder


def test_the_classifier_tells_good_from_junk(work_folder):
    quality = train.QualityClassifier(str(work_folder / "quality"), threshold=0.9)
    assert quality.label == "good"
    texts = [*lines(GOOD, 70, 5), *lines(JUNK, 5, 6)]
    p = quality.probabilities(texts)
    assert (p[:70] > 0.9).all()
    assert (p[70:] < 0.1).all()
    assert quality(texts) == [True] * 70 + [False] * 5
    np.testing.assert_allclose(quality.probabilities(texts[-3:]), p[-3:], rtol=1e-4)
    copy = pickle.loads(pickle.dumps(quality))
    assert copy(texts[68:72]) == [True, True, False, False]
    assert copy.fingerprint == quality.fingerprint
    assert dataclasses.replace(quality, threshold=0.5).fingerprint != quality.fingerprint
    predicted = train.predict(work_folder / "quality", texts[-1:], log=lambda line: None)
    assert predicted[0]["label"] == "not good"


def test_prepare_drops_planted_junk(work_folder, monkeypatch, capsys):
    monkeypatch.setattr("flaxzoo.data.prepared.apache_beam.beam_workers", lambda options: in_order)
    data.train_tokenizer(lines(GOOD + JUNK, 40, 7), data.TokenizerConfig("characters")).save(
        work_folder / "letters"
    )
    source, out = f"text:{work_folder}/crawl.txt#line", work_folder / "rows"
    options = ["--tokenizer", str(work_folder / "letters"), "--length", "16"]
    keep = ["--keep", str(work_folder / "quality"), "--threshold", "0.9"]
    assert cli.main(["prepare", source, str(out), *options, *keep]) == 0
    left_out = f"the classifier {work_folder}/quality below 0.9"
    assert f"{out}: 15 documents left out by {left_out}\n" in capsys.readouterr().err
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["left_out"] == {left_out: 15}
    shards = manifest["shards"]
    assert sum(rows["documents"] for shard in shards for rows in shard["splits"].values()) == 25
    assert cli.main(["prepare", source, str(out), *options]) == 2
    assert "(keep " in capsys.readouterr().err
    assert cli.main(["prepare", source, str(out), *options, "--threshold", "0.9"]) == 2
    assert "--threshold 0.9 " in capsys.readouterr().err


def test_a_run_that_does_not_select_is_refused(work_folder):
    named = json.loads((work_folder / "quality" / "config.json").read_text())
    shutil.copytree(work_folder / "quality", work_folder / "other")
    named["model"]["labels"] = ["web"]
    (work_folder / "other" / "config.json").write_text(json.dumps(named))
    with pytest.raises(train.RunError, match=r"other .*labels web"):
        train.QualityClassifier(str(work_folder / "other"))(["a"])
    named["train"]["data"]["target"] = "regression"
    (work_folder / "other" / "config.json").write_text(json.dumps(named))
    with pytest.raises(train.RunError, match=r"other .*classify"):
        train.QualityClassifier(str(work_folder / "other"))(["a"])
    with pytest.raises(data.UserError, match=r"threshold .*got 2\.0"):
        train.QualityClassifier(str(work_folder / "quality"), threshold=2.0)
