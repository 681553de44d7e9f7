"""A memory of what followed the latest tokens the last time, at the input of the first layer.

For each context of k = 1, 2, 3, 4, 6, 8, 12 ... tokens, o lengths in all, a table holds the hash of
the context and the token that followed it, in a slot that the hash gives; newer contexts replace
older ones. Each token is first written under the contexts that end before it, and then looked up
with those that end with it.
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
      recent: [b l], the last l tokens, oldest first, where l is the longest context; ABSENT if
        there are fewer.
    """

    hashes: torch.Tensor
    followers: torch.Tensor
    recent: torch.Tensor


class NgramMemory(nn.Module):
    def __init__(self, config):
        super().__init__()
        o, self.slots, d = config.ngram_memory, config.ngram_slots, config.width
        self.lengths = context_lengths(o)
        self.kernel = nn.Parameter(torch.zeros(o * d, d))
        self.bias = nn.Parameter(torch.zeros(o, d))

    def init_state(self, batch):
        o, longest = len(self.lengths), self.lengths[-1]
        empty = self.bias.new_full((batch, o, self.slots), ABSENT, dtype=torch.long)
        recent = self.bias.new_full((batch, longest), ABSENT, dtype=torch.long)
        return NgramState(torch.zeros_like(empty), empty, recent)

    def forward(self, x, ids, state, counts, embed):
        """Add what is recalled to embeddings [b t d]; return them, and the state after the tokens.

        Args:
          counts: number of tokens of each row; the rest is padding.
          embed: function from tokens to their embeddings.
        """
        found, state = self.recall(ids, state, counts)
        kernels = self.kernel.view(len(self.lengths), -1, x.shape[-1])
        for k in range(len(self.lengths)):
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
            before, exists = contexts(recent, self.lengths)
            slot = (before % self.slots)[..., None]
            writes = (exists & valid)[..., None]
            for table, value in ((hashes, before), (followers, token[:, None].expand_as(before))):
                table.scatter_(2, slot, value[..., None].where(writes, table.gather(2, slot)))
            recent = torch.cat([recent[:, 1:], token[:, None]], 1).where(valid, recent)
            now, exists = contexts(recent, self.lengths)
            slot = (now % self.slots)[..., None]
            is_stored = exists & (hashes.gather(2, slot)[..., 0] == now)
            found.append(followers.gather(2, slot)[..., 0].where(is_stored, ABSENT))
        return torch.stack(found, 1), NgramState(hashes, followers, recent)


def context_lengths(count):
    """Return the lengths of contexts, which double every second time."""
    return (1, *((3 if n % 2 else 2) * 2 ** (n // 2 - 1) for n in range(2, count + 1)))[:count]


def contexts(recent, lengths):
    """Return the hash of each context at the end of [b l], and whether there is one: [b o]."""
    value = torch.full_like(recent[:, 0], _SEED)
    hashes = []
    for token in reversed(recent.unbind(1)):
        value = mix(value, token & _BITS)
        hashes.append(value)
    at = [length - 1 for length in lengths]
    return torch.stack([hashes[k] for k in at], 1), recent.flip(1)[:, at] != ABSENT


def mix(value, token):
    """Return the hash of a hash and a token, by the finalizer of MurmurHash3, in 32 bits."""
    h = value ^ (token * 0x9E3779B1 & _BITS)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _BITS
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _BITS
    return h ^ (h >> 16)
