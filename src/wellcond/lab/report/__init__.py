"""Pages and tables made of stored records; nothing here trains or measures."""
