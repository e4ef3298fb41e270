"""Small things of the operating system, of the standard library alone: what others wrote, made harmless to read and to
show."""
