"""The papers' tables and figures, by id: what each needs, how it is run, and what came out beside what was printed."""
