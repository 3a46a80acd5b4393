"""Pathfinder: do two markers lie on the ends of one dashed curve? Images of the Long Range Arena, or like them.

`strokes` tabulates a single dash (a paddle), `scenes` grows curves and draws them, `folder` reads published images.
"""

from wellcond.lab.data.pathfinder import folder, scenes  # noqa: F401  (these register themselves)
