"""`--evaluate.tasks`: tasks judge a model during training as `flaxzoo evaluate --tasks` does."""

import json

import pytest
from flaxzoo import data, train
from flaxzoo.data.common.errors import DataError, UserError
from flaxzoo.train.cli.main import main
from flaxzoo.train.evaluate_config import EvaluateConfig
from flaxzoo.train.evaluation.tasks import Judged, Task, flat, judge, open_all

from ...support.run_folders import small_run
from ..runs.test_embedding_run import PAIRS, config_of

pytestmark = pytest.mark.integration


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def own_task(folder):
    """Write a task of the harness with four questions, and return its file."""
    rows = [
        {"question": word, "choices": ["dog", "cat"], "answer": 0} for word in "a b c d".split()
    ]
    file = str(write_lines(folder / "questions.jsonl", rows))
    task = {
        "task": "pets",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": file}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "pets.yaml").write_text(json.dumps(task))
    return folder / "pets.yaml"


@pytest.fixture
def _offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def evaluations(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == "validation"]


@pytest.mark.usefixtures("_offline")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tasks_judge_a_run_and_choose_its_best_checkpoint(tmp_path, capsys):
    prompts = [{"prompt": "the", "answer": "the"}, {"prompt": "a", "completion": "a"}]
    names = (str(own_task(tmp_path)), f"prompts:{write_lines(tmp_path / 'say.jsonl', prompts)}")
    settings = EvaluateConfig(tasks=names, tasks_every=2, max_new_tokens=4, stop=("q",))
    optimizer = train.OptimizerConfig(peak_learning_rate=1e-2, ema_decay=0.5)
    config = small_run(
        tmp_path,
        steps=3,
        evaluate_every=1,
        evaluate=settings,
        best_metric="max:say/rougeL",
        optimizer=optimizer,
    )
    run = tmp_path / "run"
    result = train.train(config, run, quiet=True)
    # Tasks are due before training, to check `best_metric`, and after steps 2 and 3, the last one.
    judged = [{name for name in line if "/" in name} for line in evaluations(run)]
    assert [bool(names) for names in judged] == [True, False, True, True]
    assert {"pets/acc", "say/exact_match", "ema_pets/acc", "ema_say/rougeL"} <= judged[-1]
    assert "say/exact_match" in (run / "report.md").read_text()
    measure = json.loads((run / "checkpoints" / "3" / "metrics" / "metrics").read_text())["loss"]
    assert result.validation is not None
    assert measure == -result.validation["say/rougeL"]
    # The command gives the same metrics for the checkpoint.
    options = ["--tasks", ",".join(names), "--max-new-tokens", "4", "--stop", "q"]
    for prefix, average in (("", []), ("ema_", ["--ema"])):
        capsys.readouterr()
        assert main(["evaluate", str(run), *options, *average]) == 0
        printed = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]
        found = flat(printed)
        assert found == pytest.approx({x: result.validation[prefix + x] for x in found})


def test_a_search_judges_a_run_of_vectors(tmp_path):
    documents = {str(i): text for i, (_, text) in enumerate(PAIRS)} | {"x": "related to nothing"}
    queries = {str(i): text for i, (text, _) in enumerate(PAIRS)}
    relevant = {i: {i: 1} for i in queries}
    data.RetrievalData(documents, queries, relevant).save(tmp_path / "facts")
    task = f"beir:{tmp_path / 'facts'}"
    settings = EvaluateConfig(tasks=(task,))
    config = config_of(None, steps=1, evaluate=settings, best_metric="max:facts/ndcg@10")
    result = train.train(config, tmp_path / "run", quiet=True)
    scores = {x: y for x, y in (result.validation or {}).items() if x.startswith("facts/")}
    expected = train.evaluate_retrieval(tmp_path / "run", task)
    assert scores == pytest.approx({f"facts/{name}": x for name, x in expected.items()})


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (("prompts:{}/none.jsonl",), "none.jsonl"),
        (("prompts:{}/bare.jsonl",), "line 1 .*answer"),
        (("prompts:{}/question.jsonl",), "line 1 .*answer"),  # a question is not its answer
        (("prompts:{}/one.jsonl", "prompts:{}/again/one.jsonl"), "name one"),
        (("beir:{}",), "corpus.jsonl"),
    ],
)
def test_what_cannot_judge_is_named(tasks, message, tmp_path):
    (tmp_path / "again").mkdir()
    write_lines(tmp_path / "bare.jsonl", [{"prompt": "a"}])
    question = [{"messages": [{"role": "user", "content": "2 + 2?"}]}]
    write_lines(tmp_path / "question.jsonl", question)
    for folder in (tmp_path, tmp_path / "again"):
        write_lines(folder / "one.jsonl", [{"prompt": "a", "answer": 1}])
    names = tuple(name.format(tmp_path) for name in tasks)
    with pytest.raises((DataError, UserError), match=message):
        open_all(EvaluateConfig(tasks=names))


class Logging(Task):
    """A task that logs a line."""

    names = ("pets",)

    def check(self, model):
        pass

    def __call__(self, judged):
        judged.log("1 prompt is truncated")
        return {"pets": {"acc": 1.0}}


def test_a_line_of_the_log_names_its_task(tmp_path):
    lines = []
    assert judge([Logging()], Judged(tmp_path, log=lines.append)) == {"pets": {"acc": 1.0}}
    assert lines == ["pets: 1 prompt is truncated"]


@pytest.mark.parametrize("options", [{"tasks_every": 10}, {"shots": 5}, {"stop": ("q",)}])
def test_options_of_tasks_are_refused_without_tasks(options):
    with pytest.raises(UserError, match=f"{next(iter(options))} .*requires tasks"):
        EvaluateConfig(**options)


def test_a_model_without_texts_is_refused_before_the_first_step(tmp_path, monkeypatch):
    file = write_lines(tmp_path / "one.jsonl", [{"prompt": "a", "answer": "b"}])
    settings = EvaluateConfig(tasks=(f"prompts:{file}",))
    with pytest.raises(UserError, match=r"head none .*task one"):
        train.train(config_of(None, evaluate=settings), tmp_path / "run", quiet=True)
    # A missing package is named before data are read.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = small_run(tmp_path, steps=1, evaluate=EvaluateConfig(tasks=("hellaswag",)))
    with pytest.raises(UserError, match=r"flaxzoo\[eval\]"):
        train.train(config, tmp_path / "other", quiet=True)
    assert not (tmp_path / "other").exists()
