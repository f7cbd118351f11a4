"""Where weights live while a render runs, and what a render will need."""
