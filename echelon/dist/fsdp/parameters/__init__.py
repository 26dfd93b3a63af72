"""Store the parameters of a unit as flat vectors, which are sharded across ranks."""
