"""A memory of what followed the latest tokens the last time, at the input of the first layer.

For each context of k = 1 .. o tokens a table holds the hash of the context and the token that
followed it, in a slot that the hash gives; newer contexts replace older ones. Each token is first
written under the contexts that end before it, and then looked up with those that end with it.
"""

from typing import NamedTuple

import torch
from torch import nn

ABSENT = -1
_SEED, _BITS = 0x2545F491, 0xFFFFFFFF


class NgramState(NamedTuple):
    """The table of each row's document, and its latest tokens.

    Attributes:
      hashes: [b o s], the hash of each slot's context.
      followers: [b o s], the token that followed it; ABSENT in an empty slot.
      recent: [b o], the last o tokens, oldest first; ABSENT if there are fewer.
    """

    hashes: torch.Tensor
    followers: torch.Tensor
    recent: torch.Tensor


class NgramMemory(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.orders, self.slots, d = config.ngram_memory, config.ngram_slots, config.width
        self.kernel = nn.Parameter(torch.zeros(self.orders * d, d))
        self.bias = nn.Parameter(torch.zeros(self.orders, d))

    def init_state(self, batch):
        empty = self.bias.new_full((batch, self.orders, self.slots), ABSENT, dtype=torch.long)
        return NgramState(torch.zeros_like(empty), empty, empty[..., 0].clone())

    def forward(self, x, ids, state, counts, embed):
        """Add what is recalled to embeddings [b t d]; return them, and the state after the tokens.

        Args:
          counts: number of tokens of each row; the rest is padding.
          embed: function from tokens to their embeddings.
        """
        found, state = self.recall(ids, state, counts)
        kernels = self.kernel.view(self.orders, -1, x.shape[-1])
        for k in range(self.orders):
            # without a gradient to the embedding, as in famjax
            embedded = embed(found[..., k].clamp_min(0)).detach()
            recalled = embedded @ kernels[k] + self.bias[k]
            x = torch.where((found[..., k] == ABSENT)[..., None], x, x + recalled)
        return x, state

    def recall(self, ids, state, counts):
        """Return what followed each token's contexts, [b t o], and the state after the tokens."""
        hashes, followers, recent = (a.clone() for a in state)
        counts = torch.tensor(counts, device=ids.device)
        found = []
        for i, token in enumerate(ids.unbind(1)):
            valid = (i < counts)[:, None]  # [b 1]
            before, exists = contexts(recent)
            slot = (before % self.slots)[..., None]
            writes = (exists & valid)[..., None]
            for table, value in ((hashes, before), (followers, token[:, None].expand_as(before))):
                table.scatter_(2, slot, value[..., None].where(writes, table.gather(2, slot)))
            recent = torch.cat([recent[:, 1:], token[:, None]], 1).where(valid, recent)
            now, exists = contexts(recent)
            slot = (now % self.slots)[..., None]
            is_stored = exists & (hashes.gather(2, slot)[..., 0] == now)
            found.append(followers.gather(2, slot)[..., 0].where(is_stored, ABSENT))
        return torch.stack(found, 1), NgramState(hashes, followers, recent)


def contexts(recent):
    """Return the hash of the last 1 to o tokens [b o], and whether there are as many: [b o]."""
    value = torch.full_like(recent[:, 0], _SEED)
    hashes = []
    for token in reversed(recent.unbind(1)):
        value = mix(value, token & _BITS)
        hashes.append(value)
    return torch.stack(hashes, 1), recent.flip(1) != ABSENT


def mix(value, token):
    """Return the hash of a hash and a token, by the finalizer of MurmurHash3, in 32 bits."""
    h = value ^ (token * 0x9E3779B1 & _BITS)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _BITS
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _BITS
    return h ^ (h >> 16)
