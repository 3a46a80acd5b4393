"""Importing this registers every task."""

import importlib
import pkgutil

import wellcond.lab.tasks

for _module in pkgutil.iter_modules(wellcond.lab.tasks.__path__):
    if _module.name != "register":
        importlib.import_module(f"wellcond.lab.tasks.{_module.name}" + (".task" if _module.ispkg else ""))
