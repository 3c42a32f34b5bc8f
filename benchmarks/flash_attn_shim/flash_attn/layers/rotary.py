"""Rotary embedding in plain PyTorch."""

import torch


def apply_rotary_emb(x, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotate pairs of the first columns of x (batch, seqlen, heads, head_dim) by their position.

    Pairs are neighbours if interleaved, else columns half of the rotated ones apart.
    """
    half = cos.shape[-1]
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    places = offsets + torch.arange(x.shape[1], device=x.device)
    cos, sin = (angles[places].unsqueeze(2).float() for angles in (cos, sin))
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    pairs = first * cos - second * sin, first * sin + second * cos
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
