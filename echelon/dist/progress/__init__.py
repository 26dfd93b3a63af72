"""Operations in progress: how they are waited for and executed, and how they end."""
