"""Margins on the positive, for rows on the unit sphere: ArcFace, CosFace, SphereFace and combinations."""

from __future__ import annotations

import dataclasses

from samplex_cuda._checks import check_number

__all__ = ["ArcFace", "CosFace", "Margin"]

_MOST_M1, _MOST_M2, _MOST_M3 = 4.0, 1.5, 1.0


@dataclasses.dataclass(frozen=True)
class Margin:
    """The cosine of a target, cos t, becomes cos(m1 t + m2) - m3 in training (Deng et al. 2019).

    Beyond an angle of pi the function continues to decrease, (-1)^k cos(m1 t + m2) - 2k - m3 with
    k = floor((m1 t + m2) / pi), so that a target on the far side is still pulled over. The gradient is that of this
    function.

    Args:
        m1: factor of the angle, 1 to 4 (SphereFace).
        m2: added to the angle, 0 to 1.5 (ArcFace).
        m3: subtracted from the cosine, 0 to 1 (CosFace).

    Example:
        >>> import samplex_cuda as sx
        >>> sx.losses.SampledSoftmax(margin=sx.losses.Margin(m2=0.3, m3=0.2))
        SampledSoftmax(margin=Margin(m1=1.0, m2=0.3, m3=0.2))
    """

    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0

    def __post_init__(self) -> None:
        """Checks the options."""
        check_number("Margin", "m1", self.m1, 1.0, _MOST_M1)
        check_number("Margin", "m2", self.m2, 0.0, _MOST_M2)
        check_number("Margin", "m3", self.m3, 0.0, _MOST_M3)

    def numbers(self) -> tuple[float, ...]:
        """(m1, m2, m3) as the ops take them; () where the margin changes nothing.

        Example:
            >>> import samplex_cuda as sx
            >>> sx.losses.CosFace(0.4).numbers(), sx.losses.Margin().numbers()
            ((1.0, 0.0, 0.4), ())
        """
        found = (float(self.m1), float(self.m2), float(self.m3))
        return () if found == (1.0, 0.0, 0.0) else found


def ArcFace(m: float = 0.5) -> Margin:  # noqa: N802 - the name people know
    """cos(t + m): `Margin(m2=m)` (Deng et al. 2019).

    Example:
        >>> import samplex_cuda as sx
        >>> sx.losses.ArcFace(0.5)
        Margin(m1=1.0, m2=0.5, m3=0.0)
    """
    check_number("ArcFace", "m", m, 0.0, _MOST_M2)
    return Margin(m2=m)


def CosFace(m: float = 0.35) -> Margin:  # noqa: N802 - the name people know
    """cos t - m: `Margin(m3=m)` (Wang et al. 2018).

    Example:
        >>> import samplex_cuda as sx
        >>> sx.losses.CosFace(0.35)
        Margin(m1=1.0, m2=0.0, m3=0.35)
    """
    check_number("CosFace", "m", m, 0.0, _MOST_M3)
    return Margin(m3=m)
