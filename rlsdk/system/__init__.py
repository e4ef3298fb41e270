"""Small things of the operating system, of the standard library alone.

Files that are whole or absent, work that an interrupted program abandons, quantities as text; and what others wrote,
made harmless to read and to show.
"""
