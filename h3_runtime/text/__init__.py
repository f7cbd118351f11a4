"""MiniMax-H3 Runtime."""
