"""What pydantic models and dataclasses say of their fields, and instances of them from plain data."""
