"""Options of the Pathfinder images; the defaults are those published for the 32-pixel set of the Long Range Arena."""

from __future__ import annotations

from pydantic import Field, model_validator

from wellcond.lab.data.generated import GeneratorOptions

REFERENCE_SIZE, REFERENCE_SEED_DISTANCE, REFERENCE_PADDLES = 32, 7, 20


class PathfinderOptions(GeneratorOptions):
    """Options of `pathfinder`; lengths are in pixels of the image."""

    image_size: int = Field(32, ge=12, le=256)
    contour_length: int = Field(14, ge=2, le=64)
    """Paddles in each of the two long curves; 14, 9 and 6 are the three difficulties of the Long Range Arena."""
    distractor_length: int | None = Field(None, ge=1, le=64)
    """Paddles in each distractor; by default a third of `contour_length`, rounded down, and at least one."""
    num_distractors: int | None = Field(None, ge=0, le=400)
    """Distractors to try for; by default as many as make 20 paddles, below 32 pixels in proportion to the area. Those
    that find no room are left out."""
    paddle_length: int = Field(2, ge=1, le=32)
    paddle_thickness: float = Field(0.5, gt=0, le=16)
    paddle_margin: int = Field(1, ge=1, le=16)
    """Free pixels around a paddle; two paddles of a curve are twice as far apart."""
    continuity: float = Field(1.0, ge=0.25, le=10)
    """A turn by the angle a between paddles has weight cos^2(continuity * a), and none beyond a right angle of that."""
    marker_radius: float = Field(1.5, gt=0, le=32)
    padding: int = Field(1, ge=1, le=64)
    """Width of the border that no paddle may enter."""
    seed_distance: int | None = Field(None, ge=1, le=128)
    """Distance between the first ends of the two curves, the first of which lies at least twice as far from every
    border; by default 7 in 32 pixels, and in proportion."""
    antialias_scale: int = Field(2, ge=1, le=8)
    """Lines and discs are drawn this much larger, then reduced with a Lanczos window."""
    curve_contrast: float = Field(1.5, gt=0)
    distractor_contrast: float = Field(2.0, gt=0)
    """Brightness of a paddle, where 1 is that of the markers; every image is then scaled to the range 0 to 255."""
    paddle_tries: int = Field(3, ge=1, le=100)
    """Directions drawn for the next paddle before its curve is given up."""
    distractor_tries: int = Field(5, ge=1, le=100)
    """Curves begun for each distractor before it is left out."""

    @model_validator(mode="after")
    def _check_room(self) -> PathfinderOptions:
        if 4 * self.resolved_seed_distance >= self.image_size:
            raise ValueError(
                f"a seed_distance of {self.resolved_seed_distance} leaves no room for a curve to begin in an image of "
                f"{self.image_size} pixels: four times the distance must be less than the image"
            )
        if 2 * self.padding >= self.image_size - 2 * self.stroke_reach:
            raise ValueError(
                f"a padding of {self.padding} leaves no room for paddles in an image of {self.image_size} pixels"
            )
        return self

    @property
    def resolved_distractor_length(self) -> int:
        """Paddles in each distractor."""
        return self.distractor_length or max(1, self.contour_length // 3)

    @property
    def resolved_num_distractors(self) -> int:
        """Distractors to try for."""
        if self.num_distractors is not None:
            return self.num_distractors
        paddles = min(REFERENCE_PADDLES, REFERENCE_PADDLES * self.image_size**2 // REFERENCE_SIZE**2)
        return paddles // self.resolved_distractor_length

    @property
    def resolved_seed_distance(self) -> int:
        """Distance between the first ends of the two curves."""
        return self.seed_distance or max(1, REFERENCE_SEED_DISTANCE * self.image_size // REFERENCE_SIZE)

    @property
    def stroke_reach(self) -> int:
        """Pixels from the start of a paddle that it and its margin can reach."""
        return self.paddle_length + int(-(-self.paddle_thickness // 1)) + self.paddle_margin
