"""Operations: what the caller asked for, checked, with flat views of its arrays."""
