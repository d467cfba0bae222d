"""Asks a model of `flaxzoo train calculations` held-out questions, with and without its tool.

flaxzoo train calculations
python tests/benchmarks/tool_calls.py runs/calculations
"""

import sys

from flaxzoo import data, train
from flaxzoo.data.chat.calculations import NAME

QUESTIONS = 100


def main():
    """Prints the share of right answers."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/calculations"
    config, tokenizer = train.open_run(folder)
    assert config.data.source_name == NAME
    held_out = config.data.validation_split(tokenizer, ()).content[:QUESTIONS]
    generator = train.TextGenerator.of_run(folder)
    for tools in ([train.arithmetic()], []):
        instructions = None if tools else held_out[0].messages[0]["content"]
        chat = train.Conversation(
            generator, tools=tools, instructions=instructions, temperature=0, max_new_tokens=40
        )
        right = 0
        for example in held_out:
            assert isinstance(example, data.Dialogue)
            chat.reset()
            answer = chat.reply(example.messages[1]["content"])
            right += answer.content == example.messages[-1]["content"]
        name = "with the tool" if tools else "without"
        print(f"{name:<14} {right} of {len(held_out)} right")


if __name__ == "__main__":
    main()
