"""One family of models per file; importing this package registers them all. None imports timm or transformers."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from wellcond.attention.find import ADAPTERS, BUILT_IN  # noqa: E402  (after they registered)

BUILT_IN.update(ADAPTERS)
