"""Exchange messages between two ranks."""
