"""Models of the transformers library as fedmix takes them, with or without adapters of peft.

    adapters = LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"])
    model = SequenceClassifier(get_peft_model(BertForSequenceClassification(config), adapters))
    fedmix.train(federation=..., model=model, output=model.output_layer("classifier"), ...)

What peft freezes is placed as frozen: it is neither trained nor sent. Its adapters, and what it is told to save, are experts'.
"""

from typing import Any

from torch import Tensor, nn

from fedmix.errors import ModelError


class SequenceClassifier(nn.Module):
    """Numbers of tokens [B, T] -> logits [B, classes]. pad: the number that fills sequences up; it is masked."""

    def __init__(self, model: nn.Module, pad: int = 0) -> None:
        super().__init__()
        self.model = model
        self.pad = pad

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        answer: Any = self.model(input_ids=tokens, attention_mask=(tokens != self.pad).long())
        logits: Tensor = answer.logits
        return logits

    def output_layer(self, name: str = "classifier") -> str:
        """The whole name of a layer, wherever peft's wrappers have put it: the shortest that ends with `name`."""
        names: list[str] = [layer for layer, _ in self.named_modules() if layer == name or layer.endswith(f".{name}")]
        if not names:
            raise ModelError(f"the model must have a layer {name!r}. It has none.")
        return min(names, key=len)
