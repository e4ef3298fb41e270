"""Tasks with state: their tools, and the loop that plays them."""
