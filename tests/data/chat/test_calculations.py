"""Conversations with a tool for arithmetic."""

from flaxzoo import data, models
from flaxzoo.data.chat.calculations import INSTRUCTIONS, NAME, NUMBER
from flaxzoo.data.chat.rows import read_rows
from flaxzoo.models.text.chat.tools.call_forms import Brackets


def test_every_call_is_right_and_what_the_tool_says_is_not_learned():
    rows = [row["messages"] for _, row in read_rows(NAME)]
    assert len(rows) == NUMBER
    tool = models.arithmetic()
    form = Brackets()
    assert rows[0][0]["content"] == INSTRUCTIONS == form.instructions([tool])
    for messages in rows[:200]:
        [call] = form.read(messages[2]["content"], [tool]).calls
        assert tool(call.arguments) == messages[3]["content"] == messages[4]["content"]
    config = data.SupervisedData(
        source=NAME, length=144, tokenizer=data.TokenizerConfig(kind="characters"), packing="none"
    )
    tokenizer = config.with_chat_template(config.make_tokenizer())
    arrays = config.validation_split(tokenizer, ()).examples.example(0, 0)
    learned = tokenizer.decode(arrays["labels"][arrays["loss_mask"] == 1].tolist())
    assert learned.startswith(" <<arithmetic ")
    assert "tool" not in learned
