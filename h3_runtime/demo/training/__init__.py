"""Scripts that made the carried small model, in pieces of at most 20 minutes on two cores; see ``__main__``."""
