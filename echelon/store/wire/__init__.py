"""The store's wire protocol: encoding, limits, authentication and sealed records."""
