"""What one agent asked for: requests, histories, rows, the account of its tokens. No server."""
