"""Logical axes of the parameters that several families share, for their `parameter_axes`.

Each rule maps a pattern of parameter paths to the logical axis of each dimension (see
`models.registry.AxisRules`).
"""

# An encoder-decoder has two stacks; other models have their layers at the top level.
_LAYERS = r"((encoder|decoder)/)?layers"
_ATTENTION = rf"{_LAYERS}/(cross_)?attention"

EMBEDDING_AXES = {
    r"(token|source|output)_embedding/embedding": ("vocabulary", "model"),
    r"((encoder|decoder)/)?(position|token_type)_embedding/embedding": (None, "model"),
    r"((encoder|decoder)/)?position_bias/embedding": (None, "heads"),
    r"output_bias": ("vocabulary",),
}
"""The axes of the tables for tokens, positions, distance biases and token types, and of the bias of
the logits."""

LAYER_AXES = {
    rf"{_ATTENTION}/(query|key|value)/kernel": ("layers", "model", "heads", None),
    rf"{_ATTENTION}/(query|key|value)/bias": ("layers", "heads", None),
    rf"{_LAYERS}/attention/(query|key)_norm/scale": ("layers", None),
    rf"{_ATTENTION}/output/kernel": ("layers", "heads", None, "model"),
    rf"{_LAYERS}/feed_forward/(up|gate)/kernel": ("layers", "model", "feed_forward"),
    rf"{_LAYERS}/feed_forward/(up|gate)/bias": ("layers", "feed_forward"),
    rf"{_LAYERS}/feed_forward/down/kernel": ("layers", "feed_forward", "model"),
    rf"{_LAYERS}/experts/shared_\d+/(up|gate)/kernel": ("layers", "model", "feed_forward"),
    rf"{_LAYERS}/experts/shared_\d+/(up|gate)/bias": ("layers", "feed_forward"),
    rf"{_LAYERS}/experts/shared_\d+/down/kernel": ("layers", "feed_forward", "model"),
    rf"{_LAYERS}/experts/shared_\d+/down/bias": ("layers", None),
    rf"{_LAYERS}/experts/router": ("layers", "model", None),
    rf"{_LAYERS}/experts/(up|gate)": ("layers", "experts", "model", "feed_forward"),
    rf"{_LAYERS}/experts/down": ("layers", "experts", "feed_forward", "model"),
    rf"{_LAYERS}/((cross_)?attention/output|feed_forward/down)/bias": ("layers", None),
    rf"{_LAYERS}/((cross_)?attention|feed_forward)(_output)?_norm/(scale|bias)": ("layers", None),
}
"""The axes of the attention, feed-forward and norm parameters of a stack, which are stored with a
leading axis L."""

NORM_OF_HEADS_AXES = {rf"{_LAYERS}/attention/(query|key)_norm/scale": ("layers", "heads", None)}
"""The axes of query and key norms with a separate scale for each head. They replace the rule in
`LAYER_AXES`."""

FINAL_NORM_AXES = {r"((encoder|decoder)/)?final_norm/(scale|bias)": (None,)}
"""The axes of the norm after the last layer."""

HEAD_AXES = {
    r"head/bias": ("vocabulary",),
    r"head/output_embedding/embedding": ("vocabulary", "model"),
    r"head/\w+/kernel": ("model", None),
    r"head/\w+/(scale|bias)": (None,),
}
"""The axes of the linear maps and norms of any head (`models.heads`), and of the bias of its
logits."""
