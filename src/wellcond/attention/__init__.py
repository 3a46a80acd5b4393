"""Where Q, K, V and O are stored, in any transformer."""
