"""Operations: checked calls with flat views of their arrays."""
