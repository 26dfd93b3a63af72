"""The store's server: event loop, peers and commands."""
