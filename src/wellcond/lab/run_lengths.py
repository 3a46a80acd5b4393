"""Run lengths of a mask in the compressed text of COCO, which training writes and a report draws."""

from __future__ import annotations


def read_counts(text: str | bytes) -> list[int]:
    """Run lengths from COCO's compressed text.

    A number is written five bits a character (plus 48), lowest first, bit 6 saying that more follow, the highest bit
    of the last being the sign. From the fourth run on, the difference to the run two before is written.

    Raises:
        ValueError: the text is cut short or holds other characters.

    Example:
        >>> read_counts("0120")
        [0, 1, 2, 1]
    """
    codes = list(text.encode("utf-8") if isinstance(text, str) else text)
    counts: list[int] = []
    value = shift = 0
    for code in codes:
        if not 48 <= code < 48 + 64:
            raise ValueError(f"character number {code}")
        bits = code - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("the last number is cut short")
    return counts
