import pytest


@pytest.fixture
def publish(monkeypatch, tmp_path):
    """`publish(name, features, **splits)`: writes a data set of TFDS, as if it were published."""
    import tensorflow_datasets as tfds

    folder = tmp_path / "tfds"
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))

    def publish(name_, features, *, supervised_keys=None, **splits):
        class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
            name = name_
            VERSION = tfds.core.Version("1.0.0")
            url_infos = None
            code_path = None

            def _info(self):
                return tfds.core.DatasetInfo(
                    builder=self,
                    features=tfds.features.FeaturesDict(features),
                    supervised_keys=supervised_keys,
                )

            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(rows) for split, rows in splits.items()}

            def _generate_examples(self, rows):
                yield from enumerate(rows)

        Tiny(data_dir=folder, file_format="array_record").download_and_prepare()

    return publish
