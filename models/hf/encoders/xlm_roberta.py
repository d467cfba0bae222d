"""XLM-R in the Hugging Face format, with RoBERTa's tensors under RoBERTa's prefix."""

from ...encoders.xlm_roberta import XLMRobertaConfig
from .roberta import roberta_form

FORM = roberta_form(XLMRobertaConfig, "xlm-roberta", "XLMRoberta", body="roberta")
MAPPING = FORM.mapping()
