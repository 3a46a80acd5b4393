"""Private names of torch and other libraries that wellcond relies on, in one place, with what they were tried on.

Every function says what it needs, why no public name serves, and with which versions it was tried. Code elsewhere in
wellcond uses public names only.
"""

from __future__ import annotations
