"""The feed-forward network of a layer."""

from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.models.checks import check_dropout
from memformers.models.linear import linear


class FeedForward(nn.Module):
    """FFN(x) = W₂ · dropout(max(0, W₁x + b₁)) + b₂, position by position: ``[S, B, D]`` to the same.

    ``d_ff`` is the width of the hidden layer. Source: Vaswani et al. 2017, section 3.3.
    """

    def __init__(self, d_model: int, d_ff: int, dropout_prob: float = 0.1):
        super().__init__()
        check_dropout(dropout_prob)
        if d_model < 1 or d_ff < 1:
            raise UserError(f"d_model={d_model} and d_ff={d_ff} must both be at least 1.")
        self.layer1 = nn.Linear(d_model, d_ff)
        self.layer2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        """``[S, B, D]`` to ``[S, B, D]``."""
        # Flat, since what is changed in place must not be a view: autograd would copy its gradient twice.
        hidden = linear(self.layer1, x.flatten(0, -2)).relu_()  # [S·B, d_ff]
        hidden = self.dropout(hidden) if self.training else hidden
        return linear(self.layer2, hidden).view_as(x)
