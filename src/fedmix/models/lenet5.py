"""LeNet-5 as the paper's communication figures imply it: two 5x5 convolutions without padding, one hidden layer."""

from collections.abc import Sequence

from torch import Tensor, nn

OUTPUT = "out"


class LeNet5(nn.Module):
    """conv 5x5 - pool 2 - ReLU, twice; fc - ReLU; out.

    The two rates of dropout are for what follows the second convolution and the hidden layer.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        channels: Sequence[int] = (32, 64),
        hidden: Sequence[int] = (512,),
        dropout: Sequence[float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        colours, height, width = shape
        first, second = channels
        side = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
        self.conv1 = nn.Conv2d(colours, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.dropout_conv = nn.Dropout(dropout[0])
        self.fc = nn.Linear(second * side[0] * side[1], hidden[0])
        self.dropout_fc = nn.Dropout(dropout[1])
        self.out = nn.Linear(hidden[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        pool = nn.functional.max_pool2d
        x = pool(self.conv1(x), 2).relu()  # the same as ReLU before pooling, on a quarter of the values
        x = self.dropout_conv(pool(self.conv2(x), 2).relu())
        x = self.dropout_fc(self.fc(x.flatten(1)).relu())
        logits: Tensor = self.out(x)
        return logits
