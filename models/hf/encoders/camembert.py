"""CamemBERT in the Hugging Face format, with RoBERTa's tensors under RoBERTa's prefix."""

from ...encoders.camembert import CamembertConfig
from .roberta import roberta_form

FORM = roberta_form(CamembertConfig, "camembert", "Camembert", body="roberta")
MAPPING = FORM.mapping()
