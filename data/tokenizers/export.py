"""Exports tokenizers to transformers, whose ``AutoTokenizer`` loads an equal tokenizer.

Where the libraries differ, ``tokenizer_config.json`` states the behavior of the run if possible:

- A tokenizer that was loaded from a folder keeps the folder's batch settings: ``padding_side``,
  ``truncation_side``, ``split_special_tokens`` and whether there are token types. Transformers
  therefore reads and pads texts in the same way before an import and after the export. The
  following settings apply only to vocabularies that flaxzoo trained.
- ``<|endoftext|>`` in a text is ordinary text (``split_special_tokens``), as in the run. A program
  must append the end token by its id, because its name would be split into several pieces. However,
  if a vocabulary has ``[MASK]``, sentinels or a chat template (which writes special tokens by
  name), the names of special tokens in a text are read as tokens, as users of transformers expect.
- Batches are padded with the padding token, or with the end token if the vocabulary has no padding
  token. For language models, padding is on the left, because they continue texts on the right. For
  other models, it is on the right.
- ``tokenizer(texts)`` returns the inputs of a model. They include token types only if the two texts
  of a pair have different types (BERT).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

import tokenizers
from tokenizers import models, processors

from ..common.atomic_io import write_file
from ..common.errors import DataError
from ..common.json_text import optional_object
from .base import Tokenizer
from .folder import library_errors
from .frame import CONFIG, FIXED_TYPES, BatchSettings, Frame, Layout, Side

# The files that `save` writes, and that `tokenizer.json` is made from.
_KEPT = ("characters.json", "sentencepiece.model", "vocab.txt")
# For each kind of tokenizer, how the results of the exported tokenizer may differ.
_DIFFERENCES = {
    "sentencepiece-unigram": "of two ways to split a text whose scores agree in seven digits (as "
    "in 'hahaha', or in lines of more than about 16,000 characters) it may choose the other"
}
_NO_ID = 2**32 - 1


@dataclass(frozen=True)
class Export:
    """Files for transformers that ``Tokenizer.save`` does not write.

    Attributes:
      note: A line for the log.
      files: The content of each file, by the file's name.
      config: The fields of ``tokenizer_config.json``. If empty, the file is not written.
      settings: The batch settings, which apply unless the tokenizer's folder states others.
    """

    note: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    settings: BatchSettings = BatchSettings()


class ExportedTokenizer(Tokenizer):
    """A tokenizer that can be exported to transformers."""

    def backend(self) -> tokenizers.Tokenizer:
        """Creates an equal tokenizer of the ``tokenizers`` library.

        Its special tokens are marked as special. The export sets its template.

        Raises:
          DataError: The library has no equal tokenizer.
        """
        raise DataError(f"a {self.kind} tokenizer cannot be written for transformers")

    def export_without_backend(self) -> Export | None:
        """Returns the files to write if the library has no exact equivalent of this tokenizer.

        Returns:
          The files, or None if ``backend`` encodes and decodes exactly as this tokenizer does.
        """
        return None

    def transformers_config(self) -> dict[str, object]:
        """Returns the settings for transformers: the tokenizer's class and its special tokens."""
        # The unknown token represents text, so it must not be skipped as a special token.
        roles = self.special_ids.present
        roles.pop("unk", None)
        return {f"{role}_token": self.token(id) for role, id in roles.items()}

    def export(
        self,
        folder: str | PathLike[str],
        *,
        closing: bool = False,
        padding_side: Side | None = None,
        max_length: int | None = None,
    ) -> str:
        """See ``Tokenizer``."""
        folder = Path(folder)
        frame = self.source_frame if closing else self.frame
        self.save(folder)
        # Do not write a tokenizer.json that encodes differently.
        export = self.export_without_backend()
        if export is None:
            settings = self.batch_settings or self._usual_settings(closing, padding_side)
            fixed = optional_object(folder / "config.json").get("model_type") in FIXED_TYPES
            export = self._export_backend(frame, settings, keeps_class=fixed)
            kept = [name for name in _KEPT if (folder / name).is_file()]
            export = replace(export, note=", ".join([*kept, export.note]))
        # Write the files and the settings.
        for name, content in export.files.items():
            write_file(folder / name, content)
        if export.config:
            settings = self.batch_settings or export.settings
            limit = {} if max_length is None else {"model_max_length": max_length}
            config = {**export.config, **settings.fields(), **limit}
            write_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        return f"tokenizer: {export.note}"

    def _usual_settings(self, closing: bool, padding_side: Side | None) -> BatchSettings:
        """Returns the batch settings for a vocabulary that flaxzoo trained."""
        special = self.special_ids
        # Vocabularies of encoders have a mask token or [CLS]; all other vocabularies are for models
        # that continue text.
        continues_text = not closing and special.mask is None and special.cls is None
        return BatchSettings(
            padding_side=padding_side or ("left" if continues_text else "right"),
            # A chat template writes the names of special tokens, and users write the names of
            # sentinels. In both cases, the names must be read as tokens.
            split_special_tokens=special.mask is None
            and self.own_chat_template is None
            and not self.sentinels,
            token_types=any(map(any, self.frame.pair.mark_types)),
        )

    def _export_backend(
        self, frame: Frame, settings: BatchSettings, *, keeps_class: bool
    ) -> Export:
        """Creates ``tokenizer.json`` with the template of a frame.

        Args:
          frame: The special tokens around texts.
          settings: The batch settings.
          keeps_class: Whether to state that transformers must not replace the tokenizer's class
            with the default class of the model.
        """
        backend = self.backend()
        _set_template(backend, frame)
        plain = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        config = plain | self.transformers_config()
        # transformers cannot make batches without a padding token, so use the end token as padding
        # if none is set.
        if "eos_token" in config:
            config.setdefault("pad_token", config["eos_token"])
        if keeps_class:
            config["auto_map"] = {"AutoTokenizer": [None, None]}
        # The log states how the exported tokenizer differs from this one.
        named = "names of special tokens in a text are these tokens (text in flaxzoo)"
        differences = [
            None if settings.split_special_tokens else named,
            _DIFFERENCES.get(self.kind),
        ]
        exceptions = ", and ".join(filter(None, differences))
        note = "transformers gives the same ids and texts"
        return Export(
            f"tokenizer.json; {note}" + (f", except that {exceptions}" if exceptions else ""),
            {"tokenizer.json": backend.to_str(pretty=True).encode()},
            config,
            settings,
        )


def frame_of(backend: tokenizers.Tokenizer) -> Frame:
    """Reads which special tokens the library's post-processor adds to one text and to two texts.

    Raises:
      DataError: The post-processor fails, changes the order of its texts, or repeats a text.
    """
    # Encode two texts that consist of one ordinary token each, and read the tokens around them.
    texts = {"a": _NO_ID - 1, "b": _NO_ID}
    probe = tokenizers.Tokenizer(models.WordLevel(texts, unk_token="a"))
    probe.post_processor = backend.post_processor
    with library_errors("the template of this tokenizer fails: correct its post_processor"):
        one, two = probe.encode("a"), probe.encode("a", "b")
    ids = list(texts.values())
    single = Layout.read(one.ids, one.type_ids, ids[:1])
    return Frame(single, Layout.read(two.ids, two.type_ids, ids))


def _set_template(backend: tokenizers.Tokenizer, frame: Frame) -> None:
    """Sets the template of a frame in a tokenizer, unless it already has this template."""
    own = frame_of(backend)
    if (frame.single.marks, frame.pair.marks) == (own.single.marks, own.pair.marks):
        return
    marks = sum(frame.single.marks + frame.pair.marks, ())
    named = {id: str(backend.id_to_token(id)) for id in marks}

    # In the library's notation, $A and $B stand for the two texts.
    def written(layout: Layout) -> list[str]:
        before, *after = ([named[id] for id in marks] for marks in layout.marks)
        texts = zip(("$A", "$B"), after, strict=False)
        return [*before, *(part for text, marks in texts for part in (text, *marks))]

    backend.post_processor = processors.TemplateProcessing(
        single=written(frame.single),
        pair=written(frame.pair),
        special_tokens=[(name, id) for id, name in sorted(named.items())],
    )
