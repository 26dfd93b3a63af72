"""Own a library's communicators, and make calls on them."""
