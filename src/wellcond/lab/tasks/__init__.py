"""One task per file or package; `register` imports them all."""
