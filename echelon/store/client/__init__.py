"""The store's client: calls, connections and hosted servers."""
