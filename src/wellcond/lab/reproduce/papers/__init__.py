"""What the papers print, a file for each table: transcribed, never computed here."""
