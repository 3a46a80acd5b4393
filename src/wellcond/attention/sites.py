"""The attentions of a model as a list that can also be asked by name."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from typing import SupportsIndex, overload

from wellcond.attention.site import AttentionSite
from wellcond.errors import SiteNotFoundError


class Sites(list[AttentionSite]):
    """A list of attentions; ``sites["blocks.3"]`` is the one at that module path, or the only one in or under it.

    Example:
        >>> from torch import nn
        >>> from wellcond import find_attention
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> sites = find_attention(nn.TransformerEncoder(layer, 3))
        >>> sites["layers.1"].name, sites["2.self_attn"].q.read().shape
        ('layers.1.self_attn', torch.Size([2, 4, 8]))
    """

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> AttentionSite: ...
    @overload
    def __getitem__(self, key: slice) -> Sites: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> AttentionSite | Sites:
        """By number, by slice, or by a module path: whole, or a part of it that only one attention has.

        Raises: SiteNotFoundError if no attention or several have this path; it is a KeyError.
        """
        if isinstance(key, slice):
            return Sites(super().__getitem__(key))
        if isinstance(key, str):
            return self._named(key)
        if not hasattr(key, "__index__"):
            raise TypeError(f"sites: expected a number, a slice or a module path, got {key!r}")
        return super().__getitem__(key)

    def _named(self, path: str) -> AttentionSite:
        found = [site for site in self if site.name == path] or [
            site for site in self if f".{path}." in f".{site.name}."
        ]
        if len(found) == 1:
            return found[0]
        names = [site.name for site in found or self]
        raise SiteNotFoundError(path, names, several=bool(found), close=closest_paths(path, names))


def path_matches(pattern: str, path: str) -> bool:
    """Whether a path is, or lies in or under, a path or pattern of paths.

    Example:
        >>> path_matches("blocks.*", "blocks.3.attn"), path_matches("blocks.3", "vit.blocks.3.attn")
        (True, True)
        >>> path_matches("blocks.1", "blocks.11.attn"), path_matches("*.[02].attn", "blocks.1.attn")
        (False, False)
    """
    if not any(sign in pattern for sign in "*?["):
        return pattern == path or (bool(pattern) and f".{pattern}." in f".{path}.")
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*")


def closest_paths(path: str, names: Iterable[str]) -> list[str]:
    """Close matches for a mistyped path or pattern, by as many parts as it has."""
    starts = {".".join(name.split(".")[: path.count(".") + 1]): name for name in reversed(list(names))}
    return sorted(starts[start] for start in difflib.get_close_matches(path, starts, n=3))
