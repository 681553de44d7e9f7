"""A short causal convolution of the token embeddings, at the input of the first layer."""

import torch
from torch import nn


class ShortConv(nn.Module):
    """Adds products of the embeddings of the k-1 tokens before each token to its own."""

    def __init__(self, config):
        super().__init__()
        self.before, self.width = config.short_conv - 1, config.width
        self.kernel = nn.Parameter(torch.zeros(self.before * self.width, self.width))

    def init_state(self, batch):
        """Return the embeddings of the last k-1 tokens [b k-1 d], 0 where there is none."""
        return self.kernel.new_zeros(batch, self.before, self.width)

    def forward(self, x, last, counts):
        """Add the products to embeddings [b t d]; return them, and the last k-1 embeddings.

        Args:
          last: [b k-1 d], the embeddings of the tokens before the call, oldest first.
          counts: number of tokens of each row; the rest is padding.
        """
        embedded = torch.cat([last, x], 1)
        kernels = self.kernel.view(self.before, self.width, self.width)
        y = x
        for j in range(1, self.before + 1):
            y = y + embedded[:, self.before - j :][:, : x.shape[1]] @ kernels[j - 1]
        index = torch.tensor(counts)[:, None] + torch.arange(self.before)
        index = index.to(x.device)[..., None].expand(-1, -1, self.width)
        return y, embedded.gather(1, index)
