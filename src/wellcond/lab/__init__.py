"""The laboratory: everything that needs data or an optimiser. The core never imports it."""

from wellcond.lab.models import build_architecture
from wellcond.lab.models.build import BUILDERS

BUILDERS["wellcond"] = build_architecture
