"""Callbacks for other people's training loops; each module needs the library it is named after."""
