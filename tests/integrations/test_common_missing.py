"""Where a library is not installed, its integration names the line that installs it."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_missing_library_names_its_install_line():
    code = (
        "import importlib, sys\n"
        "for name in ('transformers', 'lightning', 'pytorch_lightning'): sys.modules[name] = None\n"
        "from wellcond.errors import MissingExtraError\n"
        "for name in ('transformers', 'lightning'):\n"
        "    try: importlib.import_module(f'wellcond.integrations.{name}')\n"
        "    except MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.endswith("pip install 'wellcond[text]'") and second.endswith("pip install 'wellcond[lightning]'")
