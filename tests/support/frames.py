"""Frames of published tokenizers, for tests that make tokens by hand."""

from flaxzoo.data.tokenizers.frame import Frame, Layout


def bert(cls, sep):
    """``[CLS] A [SEP] B [SEP]`` with token types."""
    single = Layout(((cls,), (sep,)), ((0,), (0,)), (0,))
    return Frame(single, Layout(((cls,), (sep,), (sep,)), ((0,), (0,), (1,)), (0, 1)))


def roberta(cls, sep):
    """``<s> A </s></s> B </s>`` without token types."""
    single = Layout(((cls,), (sep,)), ((0,), (0,)), (0,))
    return Frame(single, Layout(((cls,), (sep, sep), (sep,)), ((0,), (0, 0), (0,)), (0, 0)))
