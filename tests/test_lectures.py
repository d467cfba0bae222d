"""The lectures that the project grew out of: each thing that they describe, and what proves it.

The five texts are a tutorial (000), course notes (001), two sets of slides (002, 003) and a lecture
on self-attention, BERT and GPT (004). They describe 141 things, numbered in `PROOFS` in their
order, and further ones in `ADDED`. A proof is a test, or a section of a notebook, which the tests
run. `IN_PART` and `NOT` say what is missing.
"""

import ast
import functools
import json
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data import TokenizerConfig, train_tokenizer
from flaxzoo.models.init import parameter_shapes
from flaxzoo.models.registry import families

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.md"
NUMBER_OF_ROWS = 141

HERE = "tests/test_lectures.py"
NN = "tests/models/nn"
GPT, BERT = "tests/models/families/test_gpt.py", "tests/models/families/test_bert.py"
TRANSFORMER, PRESETS = "tests/models/families/test_transformer.py", "tests/models/test_presets.py"
KINDS, ORDER = f"{NN}/test_position_kinds.py", "tests/models/test_order.py"
ADDED_POSITIONS = f"{KINDS}::test_positions_at_the_input_are_added_to_the_embeddings"
SIMPLE = "tests/models/test_parameter_free_attention.py"
OPTIONS = f"{NN}/test_block_options.py"
SUBWORDS = "tests/data/tokenizers/test_subwords.py"
SCORES = "tests/models/text/test_score.py"
PATTERNS = "tests/data/prompts/test_pattern.py"
AGAINST_TORCH = "tests/models/hf/test_decoders.py"
ATTENTION_BOOK = "colab/06_lectures.ipynb"
POSITIONS_BOOK = "colab/07_lectures_positions.ipynb"
EXPERIMENTS_BOOK = "colab/12_lectures_experiments.ipynb"
AROUND = "tests/train/lectures/test_around_a_model.py"
WINDOWS = "tests/data/features/test_token_windows.py"
REVIEWS = "tests/train/recipes/test_reviews.py"
RECORDED = f"{HERE}::test_the_experiments_are_recorded"
PRINTED_PROMPTS = (
    "tests/models/text/test_completions.py::"
    "test_the_prompts_of_the_lectures_are_those_that_patterns_make"
)
TOOLS = "tests/models/text/chat/tools/test_tools.py"
CONVERSATION = "tests/models/text/chat/test_conversation.py"
RECORDS = "tests/data/chat/test_records.py"

PROOFS: dict[int, tuple[str, ...]] = {
    # 000: words as inputs, attention, heads.
    1: (f"{HERE}::test_a_dense_layer_grows_with_the_text_and_attention_does_not",),
    2: ("tests/models/text/test_attend.py::test_the_command_prints_tables_and_draws",),
    3: (f"{NN}/test_attention.py::test_attention_by_hand",),
    4: (f"{AGAINST_TORCH}::test_logits_and_gradients", f"{SIMPLE}::test_the_worked_example"),
    5: (
        f"{HERE}::test_weights_grow_with_the_square_of_the_length_and_not_with_the_width",
        f"{ATTENTION_BOOK}::1. Self-attention without parameters",
    ),
    6: (f"{SIMPLE}::test_a_soft_dictionary", f"{ATTENTION_BOOK}::3. A soft dictionary"),
    7: (f"{SIMPLE}::test_dot_products_measure_angles",),
    8: (
        f"{SIMPLE}::test_any_similarity_is_an_argument_of_one_function",
        f"{SIMPLE}::test_kernel_regression_by_hand",
    ),
    9: (
        f"{ORDER}::test_a_permuted_input_gives_the_permuted_output",
        f"{ORDER}::test_the_man_ate_the_fish_as_the_fish_ate_the_man",
    ),
    10: (f"{KINDS}::test_given_and_counting_tables", ADDED_POSITIONS),
    11: (ADDED_POSITIONS,),
    12: (f"{KINDS}::test_one_layer_with_positions_at_every_layer_is_input_only",),
    13: (f"{KINDS}::test_values_and_residual_stream_contain_no_positions_of_queries_and_keys",),
    14: (f"{KINDS}::test_positions_at_projections_are_the_printed_formula",),
    15: (f"{NN}/test_attention.py::test_attention_by_hand",),
    16: (f"{HERE}::test_scaled_scores_neither_saturate_the_softmax_nor_lose_its_gradient",),
    17: (f"{AGAINST_TORCH}::test_logits_and_gradients",),
    18: (f"{OPTIONS}::test_a_masked_head_is_a_head_without_output",),
    19: (f"{AGAINST_TORCH}::test_logits_and_gradients",),
    # 000: tokens and embeddings.
    20: (f"{HERE}::test_words_of_one_stem_in_words_letters_and_pieces",),
    21: (
        f"{HERE}::test_words_of_one_stem_in_words_letters_and_pieces",
        "tests/data/tokenizers/test_tokenizers.py::test_trained_vocabularies_round_trip",
    ),
    22: (f"{SUBWORDS}::test_the_rhymes_whole_tables",),
    23: (f"{HERE}::test_the_embedding_of_30000_tokens",),
    24: (f"{NN}/test_layers.py::test_an_embedding_is_a_product_with_one_hot_rows",),
    25: (
        f"{BERT}::test_every_token_sees_both_sides",
        f"{GPT}::test_nothing_before_a_token_knows_of_it",
        f"{TRANSFORMER}::test_targets_see_no_later_token_and_all_of_the_source",
    ),
    26: (f"{PRESETS}::test_parameter_count_of_encoders",),
    # 000: BERT, and GPT.
    27: ("tests/train/recipes/test_presets.py::test_bert_in_one_phase_has_the_printed_numbers",),
    28: ("tests/models/text/test_fill_mask.py::test_train_is_more_probable_than_peanut",),
    29: (
        "tests/data/tasks/test_sequence_classification.py::test_a_binary_target_is_one_logit",
        "tests/train/objectives/test_objectives.py::test_one_logit_is_the_softmax_of_zero_and_it",
    ),
    30: ("tests/train/objectives/test_tasks.py::test_a_head_learns",),
    31: ("tests/data/tasks/test_question_answering.py::test_decode_is_the_original_search",),
    32: (
        "tests/data/features/test_segment_pairs.py::test_pairs",
        f"{WINDOWS}::test_windows_without_next_sentence",
        RECORDED,
    ),
    33: (f"{SCORES}::test_a_text_is_the_product_of_its_tokens",),
    34: (
        f"{GPT}::test_nothing_before_a_token_knows_of_it",
        f"{NN}/test_masks.py::test_band_mask",
    ),
    35: (
        f"{OPTIONS}::test_without_the_causal_mask_a_gpt_sees_what_it_is_to_predict",
        f"{ATTENTION_BOOK}::6. What the causal mask is for",
    ),
    36: (f"{SIMPLE}::test_a_mask_after_the_softmax_leaves_weights_that_sum_to_less_than_one",),
    37: (
        "tests/train/losses/test_cross_entropy.py::test_by_hand",
        "tests/data/packing/test_packing.py::"
        "test_concatenated_rows_are_full_and_hold_no_pair_twice",
    ),
    38: ("tests/models/decoding/test_cached_decoding.py::test_pieces_are_the_full_pass",),
    39: (
        "tests/models/decoding/test_sample.py::test_filter_tokens_by_hand",
        "tests/models/decoding/test_beam_search.py::test_wide_beams_find_what_exhaustive_search_finds",
    ),
    40: (PRINTED_PROMPTS,),
    41: (f"{HERE}::test_the_printed_numbers_of_gpt_3",),
    42: (
        f"{PATTERNS}::test_the_correction_of_grammar_as_the_lectures_print_it",
        f"{HERE}::test_examples_keep_their_printed_order",
    ),
    43: (
        f"{PATTERNS}::test_sums_and_questions_as_printed",
        "tests/data/prompts/test_examples.py::test_sums_are_questions_with_exact_answers",
        "tests/data/prompts/test_examples.py::test_questions_about_passages",
        "tests/data/prompts/test_examples.py::test_labeled_sources_and_pairs",
    ),
    44: ("tests/parity/test_transformer_against_torch.py::test_logits_and_hidden_states",),
    45: (f"{OPTIONS}::test_unscaled_scores_are_the_scaled_ones_times_the_root",),
    46: (
        "tests/models/test_vectors_as_inputs.py::"
        "test_the_vectors_of_tokens_give_the_outputs_of_these_tokens",
        "tests/models/test_vectors_as_inputs.py::"
        "test_a_graph_is_a_mask_that_says_which_nodes_attend_to_which",
        f"{EXPERIMENTS_BOOK}::4. Image patches in place of tokens",
    ),
    # 001: tokens, the model of the notes, norms, training and evaluation.
    47: (f"{SUBWORDS}::test_the_notes_sentence_has_the_printed_ids",),
    48: ("tests/data/tokenizers/test_tokenizers.py::test_gpt2_ids_are_the_published_ones",),
    49: (f"{HERE}::test_the_model_of_the_notes",),
    50: (f"{AROUND}::test_embeddings_begin_as_the_vectors_of_a_file",),
    51: (f"{NN}/test_attention.py::test_attention_by_hand",),
    52: (f"{PRESETS}::test_parameter_count",),
    53: (
        f"{NN}/test_layers.py::test_layer_norm_by_hand",
        f"{OPTIONS}::test_a_norm_without_parameters",
        f"{ATTENTION_BOOK}::7. Layer normalization, step by step",
    ),
    54: (f"{NN}/test_positions.py::test_every_dimension_has_its_wavelength",),
    55: (f"{POSITIONS_BOOK}::1. What a position is",),
    56: (f"{BERT}::test_masked_positions_are_the_same_as_all",),
    57: (
        f"{HERE}::test_the_printed_numbers_of_gpt_3",
        "tests/train/plan/test_plan.py::test_the_totals_of_a_run",
    ),
    58: (
        "tests/models/decoding/test_cached_decoding.py::test_left_padded_prompts_are_the_full_pass",
    ),
    59: (
        "tests/models/decoding/test_sample.py::test_greedy_is_the_argmax_of_the_full_forward_pass",
    ),
    60: (f"{POSITIONS_BOOK}::5. Attention against recurrent and convolutional layers",),
    61: (
        f"{PATTERNS}::test_the_news_article_as_printed_ends_with_a_space_unless_it_is_left_to_the_model",
    ),
    62: (f"{TRANSFORMER}::test_encoder_outputs_may_be_passed",),
    63: ("tests/data/tasks/test_translation.py::test_sequences_have_whole_and_separate_pairs",),
    64: ("tests/models/decoding/test_beam_search.py::test_greedy_takes_the_best_token_each_time",),
    65: (f"{POSITIONS_BOOK}::4. A translation, letter by letter",),
    # 002: parameters and length, positions, kernel regression, byte pairs.
    66: ("tests/train/recipes/test_t5.py::test_text_to_text_begins_with_it_and_prints_all_scores",),
    67: (f"{HERE}::test_parameters_do_not_grow_with_the_length_of_the_input",),
    68: (f"{NN}/test_positions.py::test_sinusoidal_positions",),
    69: (
        f"{SIMPLE}::test_dot_product_attention_is_kernel_regression_on_the_unit_sphere",
        f"{ATTENTION_BOOK}::2. Attention is kernel regression",
    ),
    70: (f"{AGAINST_TORCH}::test_logits_and_gradients",),
    71: (f"{SUBWORDS}::test_the_rhymes_whole_tables",),
    72: (f"{SUBWORDS}::test_the_rhymes_whole_tables",),
    73: (f"{SUBWORDS}::test_the_rhymes_fourth_table",),
    74: (f"{SUBWORDS}::test_the_rhymes_whole_tables",),
    75: (
        f"{SUBWORDS}::test_the_rhymes_number_of_tokens",
        f"{EXPERIMENTS_BOOK}::1. Tokens per merge",
    ),
    76: (f"{EXPERIMENTS_BOOK}::2. Sizes and years",),
    77: (f"{SCORES}::test_next_tokens_are_sorted_and_sum_to_one",),
    78: (PRINTED_PROMPTS,),
    79: (PRINTED_PROMPTS, f"{RECORDS}::test_sequences_have_each_answer_once_and_no_prompt"),
    # 003: encoder and decoder, positions, optimizer, Primer.
    80: ("tests/parity/test_transformer_against_torch.py::test_logits_and_hidden_states",),
    81: (f"{OPTIONS}::test_a_causal_encoder", RECORDED),
    82: (f"{TRANSFORMER}::test_targets_see_no_later_token_and_all_of_the_source",),
    83: (
        f"{KINDS}::test_given_and_counting_tables",
        f"{ORDER}::test_an_appended_counter_fails_beyond_the_trained_length",
    ),
    84: (f"{NN}/test_positions.py::test_binary_positions_are_the_printed_table",),
    85: (
        f"{KINDS}::test_generation_goes_on_beyond_the_trained_length",
        f"{POSITIONS_BOOK}::1. What a position is",
    ),
    86: (
        f"{KINDS}::test_laws_of_every_combination",
        f"{KINDS}::test_no_parameter_grows_with_the_longest_input",
        f"{POSITIONS_BOOK}::2. Beyond the trained length",
    ),
    87: (
        "tests/train/recipes/test_transformer.py::test_the_published_schedule",
        "tests/train/recipes/test_transformer.py::test_the_papers_numbers",
    ),
    88: ("tests/train/losses/test_cross_entropy.py::test_label_smoothing_by_hand",),
    89: (f"{HERE}::test_what_is_not_reproduced_is_said",),
    90: (f"{OPTIONS}::test_squared_relu_by_hand",),
    91: (
        f"{NN}/test_head_convolution.py::test_the_formula",
        f"{NN}/test_head_convolution.py::test_it_begins_as_the_plain_model",
        f"{NN}/test_head_convolution.py::test_padding_and_other_documents_count_as_zeros",
    ),
    92: (
        f"{HERE}::test_the_three_gpts_by_year_and_size",
        f"{EXPERIMENTS_BOOK}::2. Sizes and years",
    ),
    93: (f"{HERE}::test_the_printed_numbers_of_gpt_3",),
    # 004: simple self-attention, classification, positions, tokens, BERT, quality of data.
    94: (f"{SIMPLE}::test_the_worked_example",),
    95: (f"{ATTENTION_BOOK}::1. Self-attention without parameters",),
    96: (
        f"{SIMPLE}::test_each_vector_attends_most_to_itself",
        f"{SIMPLE}::test_gradients_take_two_paths",
        f"{SIMPLE}::test_there_are_no_parameters_of_attention",
    ),
    97: (
        f"{SIMPLE}::test_distance_is_no_matter",
        f"{SIMPLE}::test_a_permuted_input_gives_the_permuted_output",
    ),
    98: (
        f"{REVIEWS}::test_a_bag_of_words_is_scored_by_part",
        f"{REVIEWS}::test_a_mean_of_words_fails_on_negation",
    ),
    99: (
        f"{SIMPLE}::test_not_moderates_terrible_through_their_dot_product",
        f"{REVIEWS}::test_the_recipes_are_those_of_the_lecture",
        f"{ORDER}::test_order_is_learned_with_positions_only",
    ),
    100: (f"{GPT}::test_biases_are_optional",),
    101: (f"{SIMPLE}::test_a_soft_dictionary",),
    102: (f"{OPTIONS}::test_each_option_in_each_family",),
    103: (
        f"{NN}/test_layers.py::"
        "test_a_feed_forward_block_goes_up_to_four_times_the_width_and_down_again",
    ),
    104: (f"{OPTIONS}::test_a_residual_scalar_begins_at_one_and_0_is_the_identity",),
    105: (
        f"{AGAINST_TORCH}::test_logits_and_gradients",
        f"{ORDER}::test_only_attention_carries_information_between_tokens",
    ),
    106: (
        f"{REVIEWS}::test_the_recipes_are_those_of_the_lecture",
        f"{ORDER}::test_order_is_learned_with_positions_only",
    ),
    107: (
        f"{ORDER}::test_logits_are_the_same_for_any_order",
        f"{ORDER}::test_order_is_learned_with_positions_only",
    ),
    108: (ADDED_POSITIONS,),
    109: (f"{NN}/test_relative_positions.py::test_clipped_distances_are_vectors_of_shaw",),
    110: (f"{POSITIONS_BOOK}::3. Tokens and embeddings",),
    111: (f"{SUBWORDS}::test_fewest_pieces_of_the_slide",),
    112: (f"{SUBWORDS}::test_merged_tokens_stay_in_the_vocabulary",),
    113: ("tests/data/features/test_masking.py::test_the_three_rates",),
    114: (f"{WINDOWS}::test_halves", f"{WINDOWS}::test_halves_of_512_tokens"),
    115: (f"{WINDOWS}::test_windows_without_next_sentence",),
    116: (
        f"{HERE}::test_the_table_of_glue_has_the_known_fields",
        "tests/data/sources/test_tfds_records.py::test_well_known_data_sets_have_the_fields",
    ),
    117: ("tests/data/filters/test_selection.py::test_prepare_counts_what_a_filter_leaves_out",),
    119: ("tests/train/runs/test_quality.py::test_prepare_drops_planted_junk",),
    118: (f"{HERE}::test_the_unicorns_are_among_the_prompts",),
    120: (
        "tests/train/recipes/test_in_context.py::"
        "test_examples_of_a_task_that_was_never_trained_on_raise_the_accuracy",
        RECORDED,
    ),
    121: (
        "tests/data/prompts/test_few_shot.py::"
        "test_the_same_seed_makes_the_same_prompt_and_more_shots_include_fewer",
        "tests/models/text/prompting/test_answer.py::test_answers_end_at_the_line_feed",
    ),
    122: ("tests/train/serve/test_generation.py::test_texts_among_others_equal_those_in_process",),
    123: (
        f"{PATTERNS}::test_invented_words_as_printed",
        f"{AROUND}::test_each_answer_is_appended_to_the_next_prompt",
    ),
    124: (f"{PRESETS}::test_where_the_architectures_differ",),
    # 004: conversations, instructions, people's judgements, ensembles and tools.
    125: (f"{CONVERSATION}::test_a_stop_string_of_several_tokens_is_never_shown",),
    126: (f"{CONVERSATION}::test_the_model_reads_the_text_of_the_lectures",),
    127: (f"{EXPERIMENTS_BOOK}::7. A mixture of contexts",),
    128: (
        "tests/models/text/prompting/test_prefix_tree.py::"
        "test_examples_that_all_queries_share_are_computed_once",
        f"{EXPERIMENTS_BOOK}::8. What examples in a prompt cost",
    ),
    129: (f"{RECORDS}::test_templates_make_instructions_of_labeled_data_in_several_forms",),
    130: (
        "tests/benchmarks/test_lectures.py::"
        "test_a_held_out_instruction_is_a_new_pair_of_known_words",
        f"{RECORDS}::test_a_task_that_is_held_out_is_validated_on_and_never_trained_on",
        RECORDED,
    ),
    131: (RECORDED,),
    132: (
        "tests/train/cli/inference/test_rank.py::test_rankings_become_records_of_preferences",
        f"{RECORDS}::test_a_ranking_gives_all_pairs_of_different_rank_which_weigh_one_together",
    ),
    133: (
        "tests/train/objectives/test_sft.py::"
        "test_packed_examples_are_learned_as_they_are_alone_and_prompts_are_not",
    ),
    134: (
        "tests/train/objectives/test_dpo.py::test_the_loss_of_a_reward_model_by_hand",
        f"{RECORDS}::test_a_ranking_gives_all_pairs_of_different_rank_which_weigh_one_together",
    ),
    135: (
        "tests/train/objectives/test_grpo.py::test_advantages_by_hand",
        "tests/train/objectives/test_grpo.py::test_an_answer_with_a_reward_becomes_probable",
    ),
    136: (f"{CONVERSATION}::test_the_model_reads_the_text_of_the_lectures",),
    137: (RECORDED,),
    138: (
        "tests/models/nn/test_experts.py::test_every_execution_equals_a_loop_over_experts",
        f"{AROUND}::test_an_ensemble_draws_tokens_from_the_mean_of_the_probabilities",
        f"{AROUND}::test_an_ensemble_of_classifiers_predicts_the_mean",
    ),
    139: (
        f"{TOOLS}::test_a_model_of_the_lectures_template_calls_reads_and_answers",
        f"{TOOLS}::test_a_program_computes_and_writes_in_its_own_folder",
    ),
    140: (
        f"{TOOLS}::test_search_finds_paragraphs_and_never_leaves_its_folder",
        "tests/train/search/test_index.py::test_a_tool_retrieves_texts_from_an_index",
    ),
    141: (
        f"{HERE}::test_a_model_does_not_see_the_letters_of_a_token",
        f"{EXPERIMENTS_BOOK}::3. A model does not see the letters of a token",
    ),
}
"""Number of a thing in the lectures → what proves that it works here."""

ADDED: dict[str, tuple[str, ...]] = {
    "an affine output layer": (
        f"{OPTIONS}::test_an_affine_output_layer_adds_its_bias_to_the_logits",
    ),
    "blocks without residuals, and magnitudes by depth": (
        f"{OPTIONS}::test_without_residuals_a_sublayer_replaces_its_input",
        f"{EXPERIMENTS_BOOK}::5. Why blocks have residuals",
    ),
    "heads on not, too and restaurant": (
        f"{EXPERIMENTS_BOOK}::6. Two heads look at different words",
    ),
    "BERT without unchanged tokens, and without next sentences": (RECORDED,),
    "FLOPs and cost of a run": ("tests/train/plan/test_plan.py::test_the_totals_of_a_run",),
    "queries of a database as a tool": (
        f"{TOOLS}::test_a_database_answers_queries",
        f"{TOOLS}::test_a_database_is_only_read",
    ),
    "counters appended to the embeddings": (f"{KINDS}::test_given_and_counting_tables",),
}
"""Things in the texts that have no number → what proves that they work here."""

WEIGHTS = "the prompt is here; no continuation by published weights is recorded"
IN_PART: dict[int | str, str] = {
    40: WEIGHTS,
    78: WEIGHTS,
    118: WEIGHTS,
    116: "one table of the tasks and their fields; no model of ours was scored on all of GLUE",
    131: "four sizes up to width 64; those of the figure, 8 to 60 billion, are out of reach",
    136: "only the conversation; the screenshots show a model that is not public",
}
"""Number of a thing that works in part → what is missing."""
NOT: dict[int, str] = {
    89: "label smoothing did not raise accuracy and BLEU in any run of ours",
}
"""Number of a thing that is not shown here → why."""


def test_every_row_of_the_lectures_is_proved_once():
    assert sorted(PROOFS) == list(range(1, NUMBER_OF_ROWS + 1))
    assert not IN_PART.keys() & NOT.keys()
    assert IN_PART.keys() | NOT.keys() <= PROOFS.keys() | ADDED.keys()


def test_what_is_not_reproduced_is_said():
    """The page of the results names these experiments, with the counts of this file."""
    page = " ".join(RESULTS.read_text(encoding="utf-8").split())
    in_part = len(IN_PART.keys() & PROOFS.keys())
    whole = NUMBER_OF_ROWS - in_part - len(NOT)
    counts = rf"{whole} of .*{NUMBER_OF_ROWS} .* hold, {in_part} hold .*, and {len(NOT)} does not"
    assert re.search(counts, page)
    assert "label smoothing" in page


def test_the_experiments_are_recorded():
    """Each experiment of the script has figures in a table."""
    text = (ROOT / "tests/benchmarks/lectures.py").read_text(encoding="utf-8")
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    page = RESULTS.read_text(encoding="utf-8")
    experiments = [name for name in names if name not in ("main", "finished") and name[0] != "_"]
    recorded = {name for name in experiments if re.search(rf"^\| `{name}` \|.*\d", page, re.M)}
    assert recorded == {*experiments}
    assert recorded == {"encoder", "counter", "shots", "instructions", "refusals", "bert"}


@functools.cache
def names_in(path):
    """The tests of a file, or the headings of a notebook."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        cells = ("".join(cell["source"]) for cell in json.loads(text)["cells"])
        return {heading for cell in cells for heading in re.findall(r"^## (.+)$", cell, re.M)}
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_a_proof():
    for row, proofs in (PROOFS | ADDED).items():
        assert proofs, row
        for proof in proofs:
            path, name = proof.split("::")
            assert name in names_in(path), proof


# Numbers and small laws that belong to no single module.

PASSAGE = (
    "The restaurant refused to serve me a ham sandwich, because it only cooks vegetarian food. In "
    "the end, they just gave me two slices of bread. Their ambience was just as good as the food "
    "and service."
)


def test_a_dense_layer_grows_with_the_text_and_attention_does_not():
    assert len(PASSAGE.split()) == 37
    size = 37 * 1024
    assert (size, size**2) == (37_888, 1_435_500_544)
    x = jax.ShapeDtypeStruct((1, 37, 1024), jnp.float32)
    qkv = jax.eval_shape(nn.Dense(3 * 1024).init, jax.random.key(0), x)
    weights = sum(leaf.size for leaf in jax.tree.leaves(qkv))
    assert weights == 3 * (1024**2 + 1024) == 3_148_800


@pytest.mark.parametrize(("length", "width"), [(4, 8), (8, 8), (8, 16)])
def test_weights_grow_with_the_square_of_the_length_and_not_with_the_width(length, width):
    sizes = {"num_layers": 2, "d_model": width, "num_heads": 2, "max_length": 8}
    model = models.create(models.GPTConfig(vocab_size=5, **sizes))

    def attentions(key):
        params = models.init_params(model, key)
        ids = jnp.zeros((1, length), jnp.int32)
        return model.apply({"params": params}, input_ids=ids, output_attentions=True).attentions

    found = jax.eval_shape(attentions, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(found)) == 2 * 2 * length**2


def test_scaled_scores_neither_saturate_the_softmax_nor_lose_its_gradient():
    """Unscaled, the variance is the size, so one weight is nearly 1 and gradients are nearly 0."""
    rng, largest, slopes = np.random.default_rng(0), {}, {}
    for size in (4, 64, 1024):
        queries, keys = jnp.asarray(rng.normal(size=(2, 200, 16, size)), jnp.float32)
        products = jnp.einsum("bik,bjk->bij", queries, keys)
        assert products.var() == pytest.approx(size, rel=0.1)
        assert np.linalg.norm(np.full(size, 0.5)) == pytest.approx(0.5 * np.sqrt(size))
        for score in ("dot", "scaled"):
            values = jnp.broadcast_to(jnp.eye(16), (200, 16, 16))  # the outputs are the weights
            weights = models.similarity_attention(queries, keys, values, score=score)
            largest[score, size] = float(weights.max(-1).mean())
            # The slope of a weight with respect to its own score is w (1 - w).
            slopes[score, size] = float((weights * (1 - weights)).mean())
    assert largest["dot", 1024] > 0.9
    assert slopes["dot", 1024] < 0.1 * slopes["scaled", 1024]
    for numbers in (largest, slopes):
        assert numbers["scaled", 1024] == pytest.approx(numbers["scaled", 64], rel=0.1)


def test_words_of_one_stem_in_words_letters_and_pieces():
    """Words have no walking, letters make the text longest, and pieces share the stem."""
    texts, stems = ["walk walks walked talking " * 3], "walk walks walked walking"
    words, letters, pieces = (
        train_tokenizer(texts, TokenizerConfig(*kind))
        for kind in (("words",), ("characters",), ("byte-bpe", 262))
    )
    ids = words.encode(stems, add_special_tokens=False)
    assert len(set(ids)) == 4
    assert ids[3] == words.special_ids.unk
    spelled = letters.encode(stems, add_special_tokens=False)
    assert [letters.token(i) for i in spelled] == [*stems]
    parts = pieces.encode(stems, add_special_tokens=False)
    assert pieces.decode(parts) == stems
    (stem,) = pieces.encode(" walk", add_special_tokens=False)
    assert parts.count(stem) == 3  # the first word has no space before it
    assert len(ids) < len(parts) < len(spelled) == 25


def test_the_embedding_of_30000_tokens():
    config = models.BertConfig(
        vocab_size=30_000, max_length=512, d_model=1024, num_layers=1, num_heads=16
    )
    table = parameter_shapes(models.create(config))["token_embedding"]["embedding"]
    assert table.size == 30_000 * 1024 == 30_720_000


def test_the_printed_numbers_of_gpt_3():
    """The lectures print 3.2 million tokens a batch and 800 GB; exactly it is 3.1 and 700."""
    recipe = train.recipe("gpt3-175b")
    assert recipe.batch_size * recipe.data.length == 3_145_728
    assert recipe.steps * 3_145_728 == pytest.approx(300e9, rel=0.01)
    config = models.preset("gpt3-175b")
    assert (config.num_layers, config.d_model, config.num_heads) == (96, 12_288, 96)
    assert (config.head_dim, config.max_length, recipe.data.length) == (128, 2048, 2048)
    assert config.local_window == 256  # of every other layer: "some sparse"
    size = train.count_parameters(parameter_shapes(models.create(config)))
    assert size * 4 == pytest.approx(700e9, rel=0.01)


def test_examples_keep_their_printed_order():
    rows = [{"input": str(i), "output": str(-i)} for i in range(4)]
    few = data.FewShot(data.PATTERNS["grammar"], data.prompt_examples(rows), 3)
    prompt = few.prompt({"input": "x"})
    assert re.findall(r"input: (\w)", prompt) == ["0", "1", "2", "x"]


def test_the_three_gpts_by_year_and_size():
    """As lecture 003 prints them: 117 million in 2018, 1.5 billion in 2019, 175 billion in 2020."""
    family = families()["gpt"]
    for name, year, size in (
        ("gpt", "2018", 117e6),
        ("gpt2-xl", "2019", 1.5e9),
        ("gpt3-175b", "2020", 175e9),
    ):
        assert family.presets[name].paper.endswith(year)
        assert family.num_parameters[name] == pytest.approx(size, rel=0.04)


def test_the_unicorns_are_among_the_prompts():
    rows = (ROOT / "colab/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = {row["name"]: row for row in map(json.loads, rows)}
    assert "a herd of unicorns" in prompts["unicorns"]["prompt"]
    assert prompts["textbook"]["source"] == "lecture 002"


def test_the_table_of_glue_has_the_known_fields():
    page = (ROOT / "docs/reference/sources.md").read_text(encoding="utf-8")
    known = data.SequenceClassificationData.published_fields
    table = dict(re.findall(r"^\| [^|]+ \| `(glue/\w+)` \| `([\w,]+)` \|", page, re.M))
    assert table == {name: fields for name, fields in known.items() if name.startswith("glue/")}


def test_the_model_of_the_notes():
    """Their GPT has 512 dimensions and 8 heads of 64; the paper's has 768 and 12."""
    config = models.GPTConfig(
        vocab_size=50_257,
        max_length=512,
        num_layers=12,
        d_model=512,
        num_heads=8,
        norm_position="post",
        activation="relu",
        positions="sinusoidal",
        position_base=100_000.0,
        position_layout="per_dimension",
    )
    assert config.d_model // config.num_heads == 64
    shapes = parameter_shapes(models.create(config))
    assert "position_embedding" not in shapes
    layer = 12 * 512**2 + 13 * 512  # 4 D² + 8 D² and their biases, two norms
    assert train.count_parameters(shapes) == 50_257 * 512 + 12 * layer


def test_parameters_do_not_grow_with_the_length_of_the_input():
    sizes = {"vocab_size": 7, "num_layers": 1, "d_model": 8, "num_heads": 2, "positions": "none"}
    short, long = (
        parameter_shapes(models.create(models.GPTConfig(max_length=length, **sizes)))
        for length in (8, 8000)
    )
    assert short == long


def test_a_model_does_not_see_the_letters_of_a_token():
    """With sub-words `ketchup` is one number, which says nothing of its letters."""
    text = ["ketchup and ketchup and ketchup " * 20]
    pieces = train_tokenizer(text, TokenizerConfig("byte-bpe", 267))
    letters = train_tokenizer(text, TokenizerConfig("characters"))
    [token] = pieces.encode("ketchup", add_special_tokens=False)
    assert token != pieces.encode(" ketchup", add_special_tokens=False)[0]
    assert len(letters.encode("ketchup", add_special_tokens=False)) == 7
    assert data.fewest_pieces("ketchup", {*"ketchup", "ketch", "up"}) == ["ketch", "up"]
